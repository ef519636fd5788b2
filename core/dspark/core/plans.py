"""What the scheduler wants one verifier to do, and the barrier in front of it.

A plan is made from drafts whose verdicts are in. To stay lossless (design.md §4, L2) a step may use
its numbers only if every draft that the step could admit is newer than all of those: so they are
reached through `Plan.directions`, which asks for the oldest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import InvalidRequest
from dspark.core.sampling import SamplingMode


def _nothing() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """temperatures: [γ] divisor of the confidence logit at each position, above 0. offsets: [γ] of
    what is added then, empty for nothing. Later positions use the last. drafter_id: DrafterCard's.
    """

    drafter_id: str
    mode: SamplingMode
    temperatures: tuple[float, ...]
    offsets: tuple[float, ...] = ()

    def fault(self) -> tuple[str, object, str] | None:
        """What no logit can be scaled with: (field, value, what it must be); None if nothing."""
        size = len(self.temperatures)
        if not 1 <= size <= MAX_GAMMA:
            return "temperatures", size, f"must be 1 to {MAX_GAMMA} numbers"
        if self.offsets and len(self.offsets) != size:
            return "offsets", len(self.offsets), f"must be none or {size}, as the temperatures"
        for k, t in enumerate(self.temperatures):
            if not 0 < t < math.inf:  # NaN: no comparison
                return f"temperatures[{k}]", t, "must be above 0 and finite"
        for k, b in enumerate(self.offsets):
            if not math.isfinite(b):
                return f"offsets[{k}]", b, "must be finite"
        return None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Replaced as a whole by a higher version. It is applied when a draft arrives, and so made
    from older drafts only."""

    version: int
    tables: tuple[CalibrationTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Directions:
    """Numbers for one step. requests: R they were made for. capacity K: draft tokens that a step
    of so many requests may carry, 0 for plain decoding, None for no central capacity. caps: by
    tenant, the longest ℓ of each of its requests; a tenant left out has none. weights: by tenant,
    of its survivals in the ranking; left out: 1."""

    requests: float
    capacity: int | None = None
    caps: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    weights: Mapping[str, float] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class Plan:
    """version: grows with every plan of the cluster. epoch: of the verifier it is for; another
    drops it. seen_through: newest draft that it knows of. ttl_s: for how long it holds, from its
    arrival. draft_budgets: by drafter replica, draft tokens a second that may be asked of it; left
    out: no limit. shares: by tenant, of the tokens that this verifier admits when more wait than it
    can run; empty: as the verifier is configured. calibration: None keeps the one in use.

    What is asked of drafters is decided before a draft is drawn, so budgets need no barrier.
    """

    version: int
    verifier: str
    epoch: int
    seen_through: int
    ttl_s: float
    _directions: Directions
    draft_budgets: Mapping[str, float] = field(default_factory=_nothing)
    shares: Mapping[str, float] = field(default_factory=_nothing)
    calibration: Calibration | None = None

    def directions(self, oldest_draft: int | None) -> Directions | None:
        """For a step whose oldest draft not free of the barrier has this number (None: it has no
        such draft); None if the plan may know of it."""
        if oldest_draft is not None and oldest_draft <= self.seen_through:
            return None
        return self._directions

    def bypasses(self, tenant: str) -> bool:
        """Whether no drafts are to be asked for a tenant's requests, probes aside. That is settled
        before any is drawn, and so needs no barrier."""
        return self._directions.capacity == 0 or self._directions.caps.get(tenant) == 0


def check_plan(plan: Plan) -> None:
    """Raise `InvalidRequest` for numbers that no planner makes. What a verifier does with a plan is
    lossless whatever stands in it, so this guards its speed, not its text."""
    directions = plan.directions(None)
    assert directions is not None  # no draft, no barrier
    numbers = {
        "ttl_s": (plan.ttl_s,),
        "requests": (directions.requests,),
        "weights": directions.weights.values(),
        "draft_budgets": plan.draft_budgets.values(),
        "shares": plan.shares.values(),
    }
    for name, values in numbers.items():
        for value in values:
            if not 0 <= value < math.inf:
                raise InvalidRequest(name, value, "must be at least 0 and finite")
    for table in plan.calibration.tables if plan.calibration is not None else ():
        if (fault := table.fault()) is not None:
            raise InvalidRequest(*fault)
