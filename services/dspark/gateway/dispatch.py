"""The verifiers of a cluster as one `Target`: a choice runs on a leased one, and goes on elsewhere
from the token it has reached if that one is lost (design.md §5)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from dspark.core.errors import DsparkError, Unavailable
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.replicas import Member, Pool, Replica, VerifierCard
from dspark.core.requests import Committed, Event, Finished, Request
from dspark.gateway.answers import Target
from dspark.scheduling.client import SchedulingClient
from dspark.verifier.blocks import ROOT, digest

log = logging.getLogger(__name__)

# A replay by another verifier outranks every earlier one of the same call (verification.proto).
REPLAYS_PER_ATTEMPT = 2**16
# How often one choice may lose its verifier; then something is wrong with it, or with all of them.
MOST_REPLAYS = 8
# Seconds between two looks for a verifier while there is none, and for how long that goes on: a
# replica that died is replaced within a few seconds.
SEARCH_EVERY_S, SEARCH_S = 0.2, 10.0
# Blocks of a prompt that name its home; a longer prefix in common is a rarer one.
AFFINITY_BLOCKS = 4
# Lease ids that wait for being given back together.
RELEASE_S = 0.05


class Connect(Protocol):
    """A way to a verifier: an async context that gives a Target."""

    def __call__(self, replica: Replica) -> VerifierLink: ...


class VerifierLink(Target, Protocol):
    async def __aenter__(self) -> Target: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Dispatch:
    """`async with Dispatch(scheduler, "g1", connect) as target: ... target.run(request)`.

    name: this gateway's replica id. epoch: of its membership, for its leases. members: verifiers
    that live, as last heard; they serve while no scheduler answers. local: choices that were placed
    without it; replays: that went on elsewhere.
    """

    def __init__(
        self,
        scheduler: SchedulingClient,
        name: str,
        connect: Connect,
        *,
        epoch: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.local = 0
        self.replays = 0
        self._scheduler = scheduler
        self._name = name
        self._connect = connect
        self._epoch = epoch
        self._clock = clock
        self._rng = rng or random.Random()
        self._leases: dict[str, Lease] = {}
        self._running: Counter[str] = Counter()
        self._links: dict[str, Target] = {}
        self._released: list[str] = []
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Dispatch:
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._give_back())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._stack.aclose()

    def leases(self) -> tuple[Lease, ...]:
        """Of choices in flight, for the gateway's heartbeats."""
        return tuple(self._leases.values())

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one choice, the last one `Finished`; a lost verifier shows in none of them.
        Raises what the scheduler says of a request that it does not take, and Unavailable."""
        committed = list(request.committed_ids)
        failed: list[str] = []
        for replay in range(MOST_REPLAYS):
            attempt = request.attempt * REPLAYS_PER_ATTEMPT + replay
            this = replace(request, attempt=attempt, committed_ids=tuple(committed))
            lost: DsparkError | None = None
            lease = await self._place(this, failed)
            try:
                target = await self._link(lease.verifier)
                leased = replace(this, lease=lease.lease_id, epoch=lease.verifier.epoch)
                async with aclosing(target.run(leased)) as events:
                    async for event in events:
                        if isinstance(event, Finished) and isinstance(event.error, Unavailable):
                            lost = event.error
                            break
                        if isinstance(event, Committed):
                            committed += event.ids
                        yield event
                        if isinstance(event, Finished):
                            return
            except Unavailable as error:
                lost = error
            finally:
                self._leave(lease)
            self.replays += 1
            failed.append(lease.verifier.replica_id)
            log.warning(
                "request %s goes on elsewhere after %d tokens: %s",
                request.request_id,
                len(committed),
                lost,
            )
        raise Unavailable(f"{MOST_REPLAYS} verifiers were lost, one after another")

    async def _place(self, request: Request, failed: Sequence[str]) -> Lease:
        """A lease, or a verifier of our own choice if no scheduler answers. Waits a while for the
        first to appear."""
        give_up = self._clock() + SEARCH_S
        while True:
            try:
                lease = await self._scheduler.acquire(self._asked(request, failed))
            except Unavailable as error:
                why: DsparkError = error
                chosen = self._choose(failed)
                if chosen is not None:
                    self.local += 1
                    lease = Lease("", request.request_id, request.tenant, chosen, 0, 0)
                    break
            else:
                self._leases[lease.lease_id] = lease
                break
            if self._clock() >= give_up:
                raise Unavailable(f"no verifier is there: {why}")
            failed = ()  # one that failed may be back
            await asyncio.sleep(SEARCH_EVERY_S)
        self._running[lease.verifier.replica_id] += 1
        return lease

    def _asked(self, request: Request, failed: Sequence[str]) -> LeaseRequest:
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

    def _choose(self, failed: Sequence[str]) -> Replica | None:
        """The less busy of two drawn from those that live; busy with what comes from here."""
        usable = [
            member.replica
            for member in self.members
            if not member.draining and member.replica.replica_id not in failed
        ]
        drawn = self._rng.sample(usable, min(2, len(usable)))
        return min(drawn, key=lambda replica: self._running[replica.replica_id], default=None)

    async def _link(self, replica: Replica) -> Target:
        if replica.address not in self._links:
            self._links[replica.address] = await self._stack.enter_async_context(
                self._connect(replica)
            )
        return self._links[replica.address]

    def _leave(self, lease: Lease) -> None:
        name = lease.verifier.replica_id
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
        if lease.lease_id:
            self._leases.pop(lease.lease_id, None)
            self._released.append(lease.lease_id)

    async def _give_back(self) -> None:
        while True:
            await asyncio.sleep(RELEASE_S)
            ids, self._released = self._released, []
            if ids:
                try:
                    await self._scheduler.release(ids)
                except DsparkError as error:  # they expire
                    log.debug("%d leases could not be given back: %s", len(ids), error)

    async def _watch(self) -> None:
        while True:
            try:
                async for members in self._scheduler.watch((Pool.VERIFIER,)):
                    self.members = members
            except DsparkError as error:  # what we have is the best there is
                log.debug("the list of verifiers is not told now: %s", error)
            await asyncio.sleep(SEARCH_EVERY_S)
