"""The one replica that plans: it takes the lease, plans from what all see, and publishes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from dspark.core.errors import InvalidRequest
from dspark.core.plans import Calibration, CalibrationTable, Plan
from dspark.core.reports import VerdictCounts
from dspark.scheduler.calibration import CalibrationState, Drift, absorb, drift, refit, ship
from dspark.scheduler.central.codec import Codec
from dspark.scheduler.central.config import SchedulerConfig
from dspark.scheduler.central.view import View
from dspark.scheduler.joint import (
    Cluster,
    JointPlan,
    Outlook,
    VerifierPlan,
    VerifierView,
    plan_jointly,
)
from dspark.scheduler.store import Store

log = logging.getLogger(__name__)

# Seconds of verdicts that are taken in together: verifiers send theirs about so often.
VERDICTS_S = 1.0
# Drafter checkpoints in a mode that verdicts are kept of. A cluster has a handful; names come from
# reports, so there has to be a bound.
MAX_STREAMS = 256


class Planner:
    """term: of the planning lease, None while another replica has it. made: plans published.
    left_out: verdict tables that found no place."""

    def __init__(
        self,
        store: Store,
        codec: Codec,
        config: SchedulerConfig,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self.term: int | None = None
        self.made = 0
        self.left_out = 0
        self.last: JointPlan | None = None
        self._store = store
        self._codec = codec
        self._config = config
        self._name = name
        self._clock = clock
        self._outlook = Outlook()
        self._calibration = CalibrationState()
        self._saved = -1  # version in the store
        self._members = -1  # version of the list that shipped tables were read off
        self._heard: dict[str, tuple[int, int]] = {}
        self._verdicts: list[VerdictCounts] = []
        self._absorbed_at = clock()
        self._fitted_at = clock()

    async def lead(self) -> bool:
        """Whether this replica plans now. The lease is kept by asking each round."""
        term = await self._store.lead(self._name, self._config.lead_ttl_s)
        if term is not None and term != self.term:
            log.info("%s plans for the cluster (term %d)", self._name, term)
            await self._take_over()
        if term is None and self.term is not None:
            log.warning("%s has lost the planning lease", self._name)
        self.term = term
        return term is not None

    async def resign(self) -> None:
        if self.term is not None:
            await self._store.resign(self.term)
            self.term = None

    async def _take_over(self) -> None:
        """Begin with the calibration in use; what drafts are worth is seen anew within seconds."""
        if self.term is None:  # else the store has lost who plans: nobody else did
            self._outlook = Outlook()
        stored = await self._store.calibration()
        self._saved = -1 if stored is None else stored.version
        if stored is None or stored.version <= self.calibration.version:
            return
        try:
            calibration = self._codec.read_calibration(stored.data)
        except InvalidRequest as error:
            log.error("calibration %d cannot be read, all begin anew: %s", stored.version, error)
            calibration = Calibration(stored.version)
        calibration = replace(calibration, version=stored.version)
        self._calibration = CalibrationState(calibration, shipped=self._calibration.shipped)

    async def plan(self, view: View) -> None:
        """Plan for all verifiers and publish it. In a thread: of many it takes a while."""
        cluster = self._cluster(view)
        joint, outlook = await asyncio.to_thread(plan_jointly, cluster, self._outlook)
        self._outlook = outlook
        await self._calibrate(view)
        plans = await asyncio.to_thread(self._written, joint)
        assert self.term is not None, "only the planning replica plans"
        if await self._store.publish(self.term, plans, self._config.plan_ttl_s) is None:
            log.warning("%s is fenced: another replica plans", self._name)
            self.term = None
            return
        self.made += 1
        self.last = joint

    def _cluster(self, view: View) -> Cluster:
        fleet = view.fleet
        verifiers = {}
        for state in fleet.verifiers:
            if state.step_cost is None:  # not profiled yet: it plans by itself
                continue
            gamma = fleet.longest_block(state.card) or self._config.gamma
            # Which drafters it uses, and how much, the outlook remembers from its reports.
            view_of = VerifierView(state.step_cost, gamma, state.report)
            verifiers[state.replica.replica_id] = view_of
        return Cluster(
            verifiers,
            {d.replica.replica_id: d.load.capacity_tokens_per_s for d in fleet.drafters},
            self._config.shares,
        )

    def _written(self, joint: JointPlan) -> dict[str, bytes]:
        return {
            name: self._codec.plan(self._plan(name, mine))
            for name, mine in joint.verifiers.items()
            if mine.epoch >= 0  # else it has not reported yet
        }

    def _plan(self, name: str, mine: VerifierPlan) -> Plan:
        return Plan(
            version=0,  # whoever hands it out knows what the store counted
            verifier=name,
            epoch=mine.epoch,
            seen_through=mine.seen_through,
            ttl_s=self._config.plan_ttl_s,
            _directions=mine.directions,
            draft_budgets=mine.draft_budgets,
            shares=mine.shares,
            calibration=self.calibration if self.calibration.version else None,
        )

    async def _calibrate(self, view: View) -> None:
        self._take_shipped(view)
        self._hear(view)
        now = self._clock()
        if self._verdicts and now - self._absorbed_at >= VERDICTS_S:
            verdicts, self._verdicts = self._known(self._verdicts), []
            elapsed_s, self._absorbed_at = now - self._absorbed_at, now
            self._calibration = await asyncio.to_thread(
                absorb, self._calibration, verdicts, elapsed_s
            )
        if now - self._fitted_at < self._config.calibration_s:
            return
        self._fitted_at = now
        self._calibration = await asyncio.to_thread(refit, self._calibration)
        calibration = self.calibration
        if calibration.version > max(self._saved, 0) and self.term is not None:
            data = self._codec.calibration(calibration)
            if await self._store.set_calibration(self.term, calibration.version, data):
                self._saved = calibration.version
                log.info("calibration %d is in use", calibration.version)

    def _take_shipped(self, view: View) -> None:
        """Of the newest drafters last."""
        if view.members.version == self._members:
            return
        self._members = view.members.version
        by_age = sorted(view.sound, key=lambda member: member.replica.epoch)
        tables = [table for member in by_age for table in member.calibration]
        self._calibration = ship(self._calibration, tables)

    def _hear(self, view: View) -> None:
        """Keep verdicts that are new: the same are told until a plan has seen them."""
        heard = {}
        for name, report in view.reports.items():
            before = self._heard.get(name, (-1, -1))
            verdicts = [counts for tenant in report.tenants for counts in tenant.verdicts]
            mark = report.epoch, report.verdicts_through or report.seen_through
            if verdicts and mark > before:
                self._verdicts += verdicts
                before = mark
            heard[name] = before
        self._heard = heard

    def _known(self, verdicts: list[VerdictCounts]) -> list[VerdictCounts]:
        """Those of the first MAX_STREAMS drafters and modes."""
        streams = dict.fromkeys(self._calibration.streams)
        for counts in verdicts:
            if len(streams) < MAX_STREAMS:
                streams[counts.drafter_id, counts.mode] = None
        kept = [counts for counts in verdicts if (counts.drafter_id, counts.mode) in streams]
        self.left_out += len(verdicts) - len(kept)
        return kept

    @property
    def calibration(self) -> Calibration:
        """In use."""
        return self._calibration.calibration

    @property
    def shipped(self) -> tuple[CalibrationTable, ...]:
        """Of drafters' checkpoints, in use where the calibration has no table."""
        return self._calibration.shipped

    def drift(self) -> list[Drift]:
        """How far confidences are from their newest verdicts, by drafter and mode."""
        return drift(self._calibration)
