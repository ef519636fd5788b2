"""How many replicas a pool should have: policies that run in Serve's controller.

Serve carries this module to its controller by value, asks each policy about ten times a second, and
keeps its answer within the pool's bounds and cool-downs.
"""

from __future__ import annotations

import math
import time
from typing import Any

# Seconds between two looks at Ray's nodes.
LOOK_S = 1.0
# What a replica says of itself (replica.py) under this name.
PRESSURE = "pressure"

Answer = tuple[int, dict[str, Any]]


def replicas_wanted(pressures: list[float], now: int, target: float) -> int:
    """So many that the load they carry together is `target` of what each can take. pressures: of
    the replicas that have told theirs, 1 is full. now: replicas that there are or should be. A pool
    that lies within a tenth of the target stays as it is, so that it does not swing."""
    if not pressures:
        return now
    load = sum(pressures) / len(pressures)
    if abs(load / target - 1) <= 0.1:
        return now
    return max(math.ceil(load * len(pressures) / target - 1e-9), 0)


class ByPressure:
    """target: of `replicas_wanted`."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> Answer:
        told = (context.aggregated_metrics or {}).get(PRESSURE, {})
        return replicas_wanted(list(told.values()), context.target_num_replicas, self._target), {}


class OnePerNode:
    """One replica on each living node that offers a custom resource, `least` at least."""

    def __init__(self, resource: str, least: int) -> None:
        self._resource = resource
        self._least = least
        self._looked_at = -math.inf
        self._nodes = 0

    def __call__(self, context: Any) -> Answer:
        import ray

        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._nodes = sum(
                node["Alive"] and node["Resources"].get(self._resource, 0) > 0
                for node in ray.nodes()
            )
        return max(self._nodes, self._least), {}
