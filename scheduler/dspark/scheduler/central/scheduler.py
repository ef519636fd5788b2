"""What gateways, verifiers and drafters ask of a scheduler replica; its state is in the store.

Nobody waits for it to serve (design.md §8): each method may raise `Unavailable`, and then its
caller goes on by itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from dspark.core.drafts import DrafterCard
from dspark.core.errors import (
    ConfigError,
    DsparkError,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
)
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import Plan
from dspark.core.replicas import DrafterLoad, Member, Pool, VerifierCard
from dspark.core.reports import Report
from dspark.core.status import CalibrationDrift, ClusterStatus
from dspark.scheduler.admission import RETRY_S, check_room
from dspark.scheduler.central.codec import Codec
from dspark.scheduler.central.config import SchedulerConfig
from dspark.scheduler.central.outage import Outage
from dspark.scheduler.central.planning import Planner
from dspark.scheduler.central.status import members_of
from dspark.scheduler.central.view import View
from dspark.scheduler.intake import check_lease_request, check_load, check_member, check_report
from dspark.scheduler.routing import Candidate as Choice
from dspark.scheduler.routing import in_time, route
from dspark.scheduler.step_cost import StepCost
from dspark.scheduler.store import Candidate, Refusal, Store, StoredReport, Taken, checks

log = logging.getLogger(__name__)

# Warnings of what is wrong with reports that a scheduler gives in its life.
MAX_TOLD = 1000


@dataclass(frozen=True, slots=True)
class Registration:
    """What a replica is told when it joins. Seconds."""

    epoch: int
    heartbeat_s: float
    ttl_s: float
    plan_interval_s: float


class Scheduler:
    """`async with Scheduler(store, codec, config, name) as scheduler: ...`

    name: this replica's, for the planning lease. clock: seconds. refused: reports, and plans of
    other replicas, by what was wrong with them. granted, turned_away: leases, the second by why.
    outage: of the store.
    """

    def __init__(
        self,
        store: Store,
        codec: Codec,
        config: SchedulerConfig,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config
        self.name = name
        self.refused: Counter[str] = Counter()
        self.granted = 0
        self.turned_away: Counter[str] = Counter()
        self.outage = Outage("the store", log)
        self.view = View()
        self.planner = Planner(store, codec, config, name, clock)
        self._store = store
        self._codec = codec
        self._clock = clock
        self._rng = rng or random.Random()
        self._reports: dict[tuple[str, int], StoredReport] = {}
        self._followers: dict[str, set[asyncio.Queue[Plan]]] = {}
        self._told: set[tuple[str, str]] = set()
        self._plans_seen = -1
        self._looked_at = -1e9
        self._looks = 0  # that have begun
        self._looking = asyncio.Lock()
        self._changed = asyncio.Condition()  # the list of members in view
        self._failed = ""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Scheduler:
        await self._store.ping()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self.planner.resign()
        except DsparkError:
            log.debug("the store is away: the planning lease runs out by itself")

    # --- members ----------------------------------------------------------------------------------

    async def register(self, member: Member, step_cost: StepCost | None) -> Registration:
        """A replica joins its pool. Raises InvalidRequest, and ModelError for a drafter that was
        made for another target than every verifier here, with both values."""
        check_member(member)
        self._check_fit(member)
        epoch = await self._store.register(
            member.pool,
            member.replica,
            member.card,
            step_cost,
            self.config.ttl_s,
            member.calibration,
        )
        config = self.config
        return Registration(epoch, config.heartbeat_s, config.ttl_s, config.plan_interval_s)

    def _check_fit(self, member: Member) -> None:
        if not isinstance(member.card, DrafterCard):
            return
        targets = [card for m in self.view.sound if isinstance(card := m.card, VerifierCard)]
        drafter = member.card
        for name, own, theirs in (
            ("target_id", drafter.target_id, {card.target_id for card in targets}),
            ("vocab_size", drafter.vocab_size, {card.limits.vocab_size for card in targets}),
            ("tokenizer_hash", drafter.tokenizer_hash, {card.tokenizer_hash for card in targets}),
        ):
            if own and theirs and own not in theirs:
                known = ", ".join(map(repr, sorted(theirs, key=str)))
                raise ModelError(
                    f"drafter {drafter.drafter_id}: {name} is {own!r}, of the verifiers {known}"
                )

    async def heartbeat(
        self,
        replica_id: str,
        epoch: int,
        draining: bool,
        leases: Sequence[Lease],
        load: DrafterLoad | None,
    ) -> bool:
        """Whether it is wanted to drain. Raises NotFound (register again) and Fenced (stop)."""
        if load is not None:
            check_load(load)
        drain = await self._store.heartbeat(replica_id, epoch, draining, load, self.config.ttl_s)
        if leases:
            renewed = await self._store.renew(leases, self.config.lease_ttl_s)
            if renewed.remade:
                log.info("%d leases of %s were made again", renewed.remade, replica_id)
        return drain

    async def leave(self, replica_id: str, epoch: int) -> None:
        await self._store.leave(replica_id, epoch)

    async def drain(self, replica_id: str) -> None:
        """Want a replica to drain: it hears with its next heartbeat. Raises NotFound."""
        checks.text("replica_id", replica_id)
        await self._store.want_drain(replica_id, True)

    async def watch(self, pools: Collection[Pool]) -> AsyncGenerator[tuple[Member, ...], None]:
        """The members of pools (none named: all) now, and again after each change, as this replica
        sees them: however many watch, the store is asked once a look."""
        known, last = -1, None
        while True:
            async with self._changed:
                while self.view.members.version == known:
                    await self._changed.wait()
            seen = self.view.members
            known = seen.version
            found = tuple(m for m in seen.members if not pools or m.pool in pools)
            if found != last:
                last = found
                yield found

    # --- leases -----------------------------------------------------------------------------------

    async def acquire(self, request: LeaseRequest) -> Lease:
        """A verifier for a request, and a drafter for its drafts. Raises Overloaded with the time
        to come again, DeadlineExceeded, NotFound, InvalidRequest, Unavailable."""
        try:
            lease = await self._acquire(request)
        except DsparkError as error:
            self.turned_away[type(error).__name__] += 1
            raise
        self.granted += 1
        return lease

    async def _acquire(self, request: LeaseRequest) -> Lease:
        check_lease_request(request)
        lease = await self._lease(request)
        if lease is Refusal.FULL:  # or none of them lives any more: they were seen a while ago
            await self._look()
            lease = await self._lease(request)
        if lease is Refusal.TENANT:
            limit = self.config.tenant_tokens
            raise Overloaded(
                f"tenant {request.tenant}: its requests may hold {limit} tokens of KV together",
                RETRY_S,
            )
        if isinstance(lease, Refusal):
            raise Overloaded("all verifiers are full", RETRY_S)
        self.view.fleet.claim(lease.verifier.replica_id, lease.tokens, request.choices)
        return lease

    async def _lease(self, request: LeaseRequest) -> Lease | Refusal:
        fleet = self.view.fleet
        choices = route(fleet, request, self._rng)
        choices = in_time(fleet, choices, request, self.config.prefill_chunk)
        self._check_room(request, choices[0].tokens)
        return await self._store.acquire(
            request,
            choices[0].tokens,
            [self._candidate(choice) for choice in choices],
            self.config.lease_ttl_s,
            self.config.tenant_tokens or None,
        )

    def _check_room(self, request: LeaseRequest, tokens: int) -> None:
        held = {name: claim.tokens for name, claim in self.view.usage.tenants.items()}
        room = int(self.view.fleet.kv_tokens.sum())
        check_room(request.tenant, tokens, held, room, self.config.shares)

    def _candidate(self, choice: Choice) -> Candidate:
        fleet = self.view.fleet
        at = fleet.index[choice.verifier.replica_id]
        return Candidate(
            choice.verifier, int(fleet.kv_tokens[at]), int(fleet.max_runs[at]), choice.drafter
        )

    async def release(self, lease_ids: Collection[str]) -> None:
        await self._store.release(lease_ids)

    # --- reports and plans ------------------------------------------------------------------------

    def take(self, report: Report) -> None:
        """A verifier's report, for the store at the next interval; a later one of the same life
        replaces it. Raises InvalidRequest naming what is wrong with it."""
        check_report(report)
        stored = StoredReport(
            report.verifier, report.epoch, report.seen_through, self._codec.report(report)
        )
        checks.report(stored)  # here, or it would cost others theirs
        life = report.verifier, report.epoch
        if life in self._reports and self._reports[life].sequence > stored.sequence:
            self.refused[Taken.OLD] += 1
        else:
            self._reports[life] = stored
            self.view.took(stored, report)

    def refuse(self, verifier: str, error: InvalidRequest) -> None:
        """Count a report that cannot be taken. The log hears once from each verifier what is wrong
        with its reports."""
        field = re.sub(r"\[\d+\]", "[]", error.field)
        self.refused[field] += 1
        if (verifier, field) not in self._told and len(self._told) < MAX_TOLD:
            self._told.add((verifier, field))
            log.warning("reports of verifier %.80r are refused: %s", verifier, error)

    @property
    def following(self) -> int:
        """Verifiers that get their plans from here."""
        return len(self._followers)

    async def follow(self, verifier: str) -> AsyncGenerator[Plan, None]:
        """A verifier's plans, the newest at once. A reader that lags gets the newest only. Raises
        InvalidRequest for what can be nobody's name."""
        checks.text("verifier", verifier)
        queue: asyncio.Queue[Plan] = asyncio.Queue(1)
        self._followers.setdefault(verifier, set()).add(queue)
        self._plans_seen = -1  # what is published already is news to it
        try:
            while True:
                yield await queue.get()
        finally:
            self._followers[verifier].discard(queue)
            if not self._followers[verifier]:
                del self._followers[verifier]

    def status(self) -> ClusterStatus:
        """The cluster as this replica sees it now. Nobody is asked for it."""
        now = self._clock()
        since = self.outage.since
        drift = self.planner.drift() if self.planner.term is not None else []
        return ClusterStatus(
            scheduler=self.name,
            leads=self.planner.term is not None,
            members=tuple(members_of(self.view)),
            seen_s=max(now - self._looked_at, 0.0) if self.view.members.version >= 0 else None,
            store_away_s=None if since is None else max(now - since, 0.0),
            plans=self.planner.made,
            following=self.following,
            calibration=self.planner.calibration.version,
            drift=tuple(CalibrationDrift(d.drafter_id, d.mode, d.error, d.noise) for d in drift),
        )

    # --- its own work -----------------------------------------------------------------------------

    async def _run(self) -> None:
        """One round each plan interval: reports in, look, plan if it is ours to plan, plans out."""
        while True:
            begin = self._clock()
            try:
                await self._flush_reports()
                leads = await self.planner.lead()
                if leads or begin - self._looked_at >= self.config.look_s:
                    await self._look()
                if leads:
                    await self.planner.plan(self.view)
                await self._hand_out()
            except (Unavailable, ConfigError) as error:
                self.outage.away(self._clock(), error)
            except Exception as error:  # a bug, told once; the next round starts afresh
                if repr(error) != self._failed:
                    log.exception("a round of the scheduler failed")
                self._failed = repr(error)
            else:
                self._failed = ""
                self.outage.back(self._clock())
            spent = self._clock() - begin
            await asyncio.sleep(max(self.config.plan_interval_s - spent, 0.0))

    async def _look(self) -> None:
        """See what is in the store now; whoever wants that meanwhile shares the next look."""
        begun = self._looks
        async with self._looking:
            if self._looks == begun:
                self._looks += 1
                self._looked_at = self._clock()
                known = self.view.members
                await self.view.look(self._store, self._codec)
                if self.view.members is not known:
                    async with self._changed:
                        self._changed.notify_all()

    async def _flush_reports(self) -> None:
        reports, self._reports = self._reports, {}
        if reports:
            taken = await self._store.put_reports(list(reports.values()), self.config.report_ttl_s)
            self.refused.update(answer for answer in taken if answer is not Taken.TAKEN)

    async def _hand_out(self) -> None:
        if not self._followers:
            return
        found = await self._store.plans([*self._followers], self._plans_seen)
        if found is None:
            return
        self._plans_seen = found.version
        for verifier, data in found.plans.items():
            try:
                plan = replace(self._codec.read_plan(data), version=found.version)
            except InvalidRequest as error:  # of a planning replica of another version
                self.refused[f"plan.{error.field}"] += 1
                continue
            for queue in self._followers.get(verifier, ()):
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(plan)
