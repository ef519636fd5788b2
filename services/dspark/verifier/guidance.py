"""The scheduler's plan as a verifier's engine follows it: the newest one, while it holds.

A plan comes late, twice, out of order, or from a scheduler that has lost its place; each of those
is dropped and counted, and the engine plans by itself. Nothing here waits for anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.core.plans import Calibration, CalibrationTable, Directions, Plan
from dspark.core.sampling import SamplingMode
from dspark.scheduler.calibration import scaling_of, stretched
from dspark.scheduler.sts import UNSCALED

FloatArray = NDArray[np.float64]

# Of a token, lost where seconds are added up; a bucket that is full to this is full.
ROUNDING = 1e-6


class Guidance:
    """The engine's thread's. clock: seconds, the engine's. configured_shares: by tenant, where no
    plan has any. dropped: plans by what was wrong."""

    def __init__(
        self, clock: Callable[[], float], configured_shares: Mapping[str, float] | None = None
    ) -> None:
        self.configured_shares = configured_shares or {}
        self.dropped: Counter[str] = Counter()
        self._clock = clock
        self._replica = ""
        self._epoch = 0
        self._plan: Plan | None = None
        self._until = 0.0
        self._scalings: dict[tuple[str, SamplingMode], FloatArray] = {}
        self._shipped: dict[tuple[str, SamplingMode], FloatArray] = {}
        self._calibration = 0
        self._buckets: dict[str, _Bucket] = {}

    def registered(self, replica: str, epoch: int) -> None:
        """This verifier has a new life in the cluster; plans of its older ones are void. What the
        store counts may have started again with it, so versions are not compared across lives."""
        self._replica, self._epoch = replica, epoch
        self._plan, self._calibration = None, 0

    def take(self, plan: Plan) -> bool:
        """Follow a plan from now on; False if it is not ours, or not newer than what we have."""
        if (plan.verifier, plan.epoch) != (self._replica, self._epoch):
            self.dropped["another epoch"] += 1
            return False
        if self._plan is not None and plan.version <= self._plan.version:
            self.dropped["not newer"] += 1
            return False
        self._plan, self._until = plan, self._clock() + plan.ttl_s
        if plan.calibration is not None and plan.calibration.version > self._calibration:
            self._adopt(plan.calibration)
        return True

    def ship(self, tables: Iterable[CalibrationTable]) -> None:
        """Tables that came with a drafter's checkpoint, until a plan has better ones."""
        self._shipped.update(_by_drafter(tables))

    def _adopt(self, calibration: Calibration) -> None:
        self._calibration = calibration.version
        self._scalings = _by_drafter(calibration.tables)

    @property
    def plan(self) -> Plan | None:
        """The plan that holds now."""
        if self._plan is None or self._clock() >= self._until:
            return None
        return self._plan

    @property
    def age_s(self) -> float | None:
        """Since the plan that holds now came; None without one."""
        plan = self.plan
        return None if plan is None else max(self._clock() - (self._until - plan.ttl_s), 0.0)

    @property
    def calibration(self) -> int:
        """Version of the tables in use, 0 before the first."""
        return self._calibration

    def directions(self, oldest_draft: int | None) -> Directions | None:
        """Numbers for a step whose oldest draft that is bound by the barrier has this number (None:
        it has none). None: plan by yourself."""
        plan = self.plan
        return None if plan is None else plan.directions(oldest_draft)

    def bypasses(self, tenant: str) -> bool:
        """Whether the plan wants no drafts for a tenant's requests."""
        plan = self.plan
        return plan is not None and plan.bypasses(tenant)

    @property
    def shares(self) -> Mapping[str, float]:
        """By tenant, of the tokens to admit while more wait than can run."""
        plan = self.plan
        return self.configured_shares if plan is None or not plan.shares else plan.shares

    def scaling(self, drafter_id: str, mode: SamplingMode, gamma: int) -> FloatArray:
        """[2, gamma] temperatures and offsets of confidence logits; of a drafter that was never
        calibrated 1 and 0. They outlive their plan: a calibration does not age in seconds."""
        table = self._scalings.get((drafter_id, mode))
        if table is None:
            table = self._shipped.get((drafter_id, mode))
        return stretched(UNSCALED[:, None] if table is None else table, gamma)

    def affordable(self, drafter: str, wanted: int, block: int) -> int:
        """How many draft tokens may be asked of a drafter replica now, of those wanted: its budget
        as a bucket that a second fills, and that holds the longest block of those who want in any
        case. Looks only: what is asked for is told with `spend`."""
        plan = self.plan
        rate = None if plan is None else plan.draft_budgets.get(drafter)
        if rate is None:
            return wanted
        if rate <= 0:
            return 0
        now = self._clock()
        bucket = self._buckets.setdefault(drafter, _Bucket(rate, now))
        filled = bucket.tokens + max(now - bucket.at, 0.0) * rate
        bucket.tokens, bucket.at = min(filled, max(rate, float(block))), now
        return min(wanted, int(bucket.tokens + ROUNDING))

    def spend(self, drafter: str, tokens: int) -> None:
        """So many of the tokens that were affordable have been asked for."""
        if (bucket := self._buckets.get(drafter)) is not None:
            bucket.tokens = max(bucket.tokens - tokens, 0.0)


@dataclass(slots=True)
class _Bucket:
    """Of a drafter's budget. tokens: in it at the moment `at`."""

    tokens: float
    at: float


def _by_drafter(tables: Iterable[CalibrationTable]) -> dict[tuple[str, SamplingMode], FloatArray]:
    return {(table.drafter_id, table.mode): scaling_of(table) for table in tables}
