"""The verifiers of a cluster as one `Target`: a choice runs on a leased one, and goes on elsewhere
from the token it has reached if that one is lost (design.md §5)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from types import TracebackType

from dspark.core.errors import (
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    Unavailable,
)
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.replicas import Member, Pool, Replica, VerifierCard
from dspark.core.requests import Event, Finished, Request, SpeculationFigures
from dspark.core.traces import TraceContext, sampled
from dspark.gateway.links import Connect, Links
from dspark.scheduler.store import lease_id
from dspark.scheduling.client import LEASE_S, SchedulingClient
from dspark.telemetry.tracing import Kind, Part, Tracer, error_type, part
from dspark.verifier.blocks import ROOT, digest

log = logging.getLogger(__name__)

# A replay by another verifier outranks every earlier one of the same call (verification.proto).
REPLAYS_PER_ATTEMPT = 2**16
# Verifiers that a choice may lose in a row without a new token: it may be what kills them.
MOST_LOSSES = 4
# Seconds without a new token in which another verifier is looked for, and between two looks while
# there is none: a replica that died is replaced within a few seconds.
SEARCH_S, SEARCH_EVERY_S = 10.0, 0.2
# Blocks of a prompt that name its home; a longer prefix in common is a rarer one.
AFFINITY_BLOCKS = 4
# Seconds that what is over waits to be given back together.
TIDY_S = 0.05

# The scheduler's word on a request; any other error says something of the scheduler only.
REFUSALS = (Overloaded, DeadlineExceeded, InvalidRequest, NotFound)

# (target_id, backend): verifiers that agree in both go on as if they had begun.
Maker = tuple[str, str]


class Dispatch:
    """`async with Dispatch(scheduler, "g1", connect) as target: ... target.run(request)`.

    name: this gateway's replica id. epoch: of its membership, for its leases. lease_s: seconds that
    the scheduler has for a lease; then this chooses by itself. search_s: see SEARCH_S. clock:
    seconds; deadlines are points on it. tracer: for requests that are traced.

    members: verifiers that live, as last heard; they serve while no scheduler answers. leased,
    local: choices that were placed by it and without it; replays: that went on elsewhere.
    """

    def __init__(
        self,
        scheduler: SchedulingClient,
        name: str,
        connect: Connect,
        *,
        epoch: Callable[[], int] = lambda: 0,
        lease_s: float = LEASE_S,
        search_s: float = SEARCH_S,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.links = Links(connect)
        self.leased = 0
        self.local = 0
        self.replays = 0
        self._scheduler = scheduler
        self._name = name
        self._epoch = epoch
        self._lease_s = lease_s
        self._search_s = search_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._tracer = tracer
        self._leases: dict[str, Lease] = {}
        self._running: Counter[str] = Counter()
        self._over: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def __aenter__(self) -> Dispatch:
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._tidy())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.links.close()
        self._over += self._leases
        await self._give_back()

    @property
    def running(self) -> int:
        """Choices in flight."""
        return self._running.total()

    def leases(self) -> tuple[Lease, ...]:
        """Of choices in flight, for the gateway's heartbeats."""
        return tuple(self._leases.values())

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one choice, the last one `Finished`; a lost verifier shows in none of them.
        Raises what the scheduler says of a request that it does not take, Unavailable, and
        ModelError where nobody serves any more what the answer began on."""
        committed = list(request.committed_ids)
        earlier = SpeculationFigures()
        failed: set[str] = set()
        replay = losses = 0
        made_by: Maker | None = None
        since = self._clock()
        trace = sampled(request.traceparent) if self._tracer is not None else None
        while losses < MOST_LOSSES:
            attempt = request.attempt * REPLAYS_PER_ATTEMPT + replay
            this = replace(request, attempt=attempt, committed_ids=tuple(committed))
            give_up = since + self._search_s
            lease = await self._place(this, failed, give_up, trace, made_by, first=not replay)
            lost = Unavailable("it did not say how its run ended")
            figures, sent, had = SpeculationFigures(), False, len(committed)
            with self._span("run", this, trace) as span:
                span.attributes["dspark.verifier"] = lease.verifier.replica_id
                span.attributes["dspark.resumed_tokens"] = had
                if span.traceparent:
                    this = replace(this, traceparent=span.traceparent)
                try:
                    target = await asyncio.shield(self.links.use(lease.verifier))
                    async with aclosing(target.run(_leased(this, lease))) as events:
                        async for event in events:
                            sent = True
                            if isinstance(event, Finished):
                                if isinstance(event.error, Unavailable):
                                    lost = event.error
                                    break
                                # Its reader has part of it: it is not for them to come again.
                                if replay and _refused_full(event, had):
                                    lost, sent = Unavailable(f"full: {event.error}"), False
                                    break
                                if event.error is not None:
                                    span.error = error_type(event.error)
                                yield replace(event, speculation=earlier + event.speculation)
                                return
                            if event.index != len(committed):
                                lost = Unavailable(f"token {event.index} came for {len(committed)}")
                                break
                            made_by = made_by or self._maker(lease.verifier.replica_id)
                            committed += event.ids
                            figures += event.speculation
                            yield event
                except Unavailable as error:
                    lost = error
                finally:
                    self.links.leave(lease.verifier)
                    self._leave(lease)
                span.error = error_type(lost)
            if len(committed) > had:
                made_by = made_by or self._maker(lease.verifier.replica_id)
                if made_by is None:  # it came and went before we were told of it
                    raise ModelError(f"what the answer began on is lost, and not known: {lost}")
                since, losses = self._clock(), 0
                failed.clear()
            earlier += figures
            failed.add(lease.verifier.replica_id)
            replay += 1
            if sent:
                losses += 1
                self.replays += 1
                told = "request %s goes on elsewhere after %d tokens: %s"
                log.warning(told, request.request_id, len(committed), lost)
        raise Unavailable(f"{losses} verifiers were lost, one after another; the last: {lost}")

    def _span(
        self, what: str, request: Request, above: TraceContext | None
    ) -> AbstractContextManager[Part]:
        key = f"{what}/{request.choice}/{request.attempt}"
        return part(self._tracer, above, f"dspark.{what}", key, Kind.CLIENT)

    async def _place(
        self,
        request: Request,
        failed: set[str],
        give_up: float,
        trace: TraceContext | None,
        made_by: Maker | None,
        *,
        first: bool,
    ) -> Lease:
        """A lease, or a verifier of our own choice if no scheduler answers. Waits a while for the
        first to appear. made_by: what the answer began on, which alone may go on with it; None if
        it did not begin. first: it was not accepted yet."""
        with self._span("lease", request, trace) as span:
            above = span.traceparent
            lease = await self._found(request, failed, give_up, above, made_by, first=first)
            span.attributes["dspark.verifier"] = lease.verifier.replica_id
            span.attributes["dspark.by_scheduler"] = bool(lease.lease_id)
        self._running[lease.verifier.replica_id] += 1
        return lease

    async def _found(
        self,
        request: Request,
        failed: set[str],
        give_up: float,
        traceparent: str,
        made_by: Maker | None,
        *,
        first: bool,
    ) -> Lease:
        while True:
            if self._closed:
                raise Unavailable("this gateway is stopping")
            others = self._others(made_by)
            try:
                lease = await self._acquire(request, failed | others, traceparent)
                self._check(lease, made_by)
                self._leases[lease.lease_id] = lease
                self.leased += 1
                return lease
            except DsparkError as error:
                if isinstance(error, REFUSALS) and (first or not self._goes_on(request, error)):
                    raise
                why = error
            chosen = self._choose(failed | others)
            if chosen is not None:
                self.local += 1
                return Lease("", request.request_id, request.tenant, chosen, 0, 0)
            if self._clock() >= give_up:
                if others:  # where a client that came again with what it has might get to
                    told = "nobody takes it who serves the target that the answer began on"
                    raise ModelError(f"{told}: {why}")
                raise Unavailable(f"no verifier is there: {why}")
            if request.deadline is not None and self._clock() >= request.deadline:
                raise DeadlineExceeded("the deadline passed before a verifier was there")
            failed.clear()  # one that failed may be back
            await asyncio.sleep(SEARCH_EVERY_S)

    def _goes_on(self, request: Request, error: DsparkError) -> bool:
        """Whether a request that was accepted already is served for all that the scheduler says: it
        may wait where it goes on, and be quicker than is expected of it while time is left."""
        if isinstance(error, DeadlineExceeded):
            return request.deadline is not None and self._clock() < request.deadline
        return isinstance(error, Overloaded)

    async def _acquire(self, request: Request, failed: Collection[str], traceparent: str) -> Lease:
        asked = self._asked(request, failed)
        try:
            return await self._scheduler.acquire(asked, self._lease_s, traceparent)
        except BaseException:  # it may have been given all the same, to nobody
            self._over.append(lease_id(asked.request_id, asked.attempt))
            raise

    def _check(self, lease: Lease, made_by: Maker | None) -> None:
        """Raises Unavailable for one that may not go on: the scheduler knows of verifiers that we
        have not heard of yet."""
        name = lease.verifier.replica_id
        if made_by is not None and self._maker(name) != made_by:
            self._over.append(lease.lease_id)
            raise Unavailable(f"verifier {name} is not known to serve what the answer began on")

    def _maker(self, replica_id: str) -> Maker | None:
        """None while it is not known."""
        for member in self.members:
            card = member.card
            if member.replica.replica_id == replica_id and isinstance(card, VerifierCard):
                return card.target_id, card.backend
        return None

    def _others(self, made_by: Maker | None) -> set[str]:
        """Verifiers that would not go on as if they had begun."""
        if made_by is None:
            return set()
        names = (member.replica.replica_id for member in self.members)
        return {name for name in names if self._maker(name) != made_by}

    def _asked(self, request: Request, failed: Collection[str]) -> LeaseRequest:
        room = request.sampling.max_tokens
        done = len(request.committed_ids)
        return LeaseRequest(
            request_id=f"{request.request_id}/{request.choice}",
            attempt=request.attempt,
            owner=self._name,
            owner_epoch=self._epoch(),
            prompt_tokens=len(request.prompt_ids) + done,
            tenant=request.tenant,
            priority=request.priority,
            max_tokens=None if room is None else max(room - done, 1),
            prefix_hashes=self._prefix(request.prompt_ids),
            speculation=request.speculation,
            floor_tps=request.floor_tps,
            deadline_s=None if request.deadline is None else request.deadline - self._clock(),
            exclude=tuple(failed),
        )

    def _prefix(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        """Digests of the prompt's first whole blocks, as verifiers make them."""
        sizes = [m.card.block_size for m in self.members if isinstance(m.card, VerifierCard)]
        if not sizes:
            return ()
        names, parent = [], ROOT
        for block in range(min(len(ids) // sizes[0], AFFINITY_BLOCKS)):
            parent = digest(parent, ids[block * sizes[0] : (block + 1) * sizes[0]])
            names.append(parent)
        return tuple(names)

    def _choose(self, failed: Collection[str]) -> Replica | None:
        """The less busy of two drawn from those that live; busy with what comes from here."""
        usable = [
            member.replica
            for member in self.members
            if not member.draining and member.replica.replica_id not in failed
        ]
        drawn = self._rng.sample(usable, min(2, len(usable)))
        return min(drawn, key=lambda replica: self._running[replica.replica_id], default=None)

    def _leave(self, lease: Lease) -> None:
        name = lease.verifier.replica_id
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
        if lease.lease_id:
            self._leases.pop(lease.lease_id, None)
            self._over.append(lease.lease_id)

    # --- beside the runs --------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                async with aclosing(self._scheduler.watch((Pool.VERIFIER,))) as lists:
                    async for members in lists:
                        # None at all: a store that was emptied and waits for them to come back.
                        self.members = members or self.members
            except DsparkError as error:  # what we have is the best there is
                log.debug("the list of verifiers is not told now: %s", error)
            await asyncio.sleep(SEARCH_EVERY_S)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                await self.links.keep({member.replica.address for member in self.members})
            except Exception:  # of a link that does not close well: the rest goes on
                log.exception("a link to a verifier could not be closed")
            await self._give_back()

    async def _give_back(self) -> None:
        ids, self._over = self._over, []
        if ids:
            try:
                await self._scheduler.release(ids)
            except DsparkError as error:  # they expire
                log.debug("%d leases could not be given back: %s", len(ids), error)


def _refused_full(event: Finished, had: int) -> bool:
    return isinstance(event.error, Overloaded) and event.usage.completion_tokens <= had


def _leased(request: Request, lease: Lease) -> Request:
    drafter = "" if lease.drafter is None else lease.drafter.replica_id
    return replace(request, lease=lease.lease_id, epoch=lease.verifier.epoch, drafter=drafter)
