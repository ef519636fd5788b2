"""The paper's own percentages of a preset, next to what a simulation of it says.

A curve is (tokens/s/user, tokens/s/GPU) over concurrency. Between two points both are taken to be
straight lines; beyond the ends nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.scheduler.simulation.figures import Figures
from dspark.scheduler.simulation.presets import Paper

BASELINE, SPECULATING = "mtp-1", "dspark"


@dataclass(frozen=True, slots=True)
class Anchor:
    """said: by the paper. found: by the simulation, None where its curves do not reach so far."""

    name: str
    said: float
    found: float | None

    @property
    def error(self) -> float | None:
        """found − said; of gains, in parts of the baseline."""
        return None if self.found is None else self.found - self.said


def anchors(paper: Paper, found: Sequence[Figures]) -> list[Anchor]:
    """All of a preset; none if its two arms were not both simulated."""
    base, ours = (_curve(found, name) for name in (BASELINE, SPECULATING))
    if base is None or ours is None:
        return []
    told = [
        Anchor(f"throughput at {tps:g} tok/s/user", said, _gain(ours, base, tps, 0))
        for tps, said in paper.throughput_gains
    ]
    told += [
        Anchor(f"tok/s/user at {throughput:g} tok/s/GPU", said, _gain(ours, base, throughput, 1))
        for throughput, said in paper.speed_gains
    ]
    points = [point for point in found if point.arm == SPECULATING]
    users = np.array([point.value for point in points])
    budgets = np.array([point.budget for point in points])
    order = np.argsort(users)
    for concurrency, said in paper.budgets:
        within = users.min() <= concurrency <= users.max()
        budget = float(np.interp(concurrency, users[order], budgets[order])) if within else None
        told.append(Anchor(f"budget at {concurrency:g} requests", said, budget))
    return told


def _curve(found: Sequence[Figures], arm: str) -> np.ndarray | None:
    """[n, 2] tokens/s/user and tokens/s/GPU."""
    points = [
        (point.throughput / point.value, point.throughput)
        for point in found
        if point.arm == arm and point.setting == "users"
    ]
    return np.array(points) if len(points) > 1 else None


def _gain(ours: np.ndarray, base: np.ndarray, at: float, axis: int) -> float | None:
    """Ours over the baseline − 1 on the other axis, where both are `at` on this one."""
    values = [_along(curve, at, axis) for curve in (ours, base)]
    if None in values:
        return None
    return values[0] / values[1] - 1  # type: ignore[operator]


def _along(curve: np.ndarray, at: float, axis: int) -> float | None:
    x, y = curve[:, axis], curve[:, 1 - axis]
    if not x.min() <= at <= x.max():
        return None
    order = np.argsort(x)
    return float(np.interp(at, x[order], y[order]))
