"""A replica's place in the cluster: it registers, beats, and begins again whenever it is forgotten.

All of it may fail for any length of time: who is a member serves on, and this tries again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from dspark.core.errors import DsparkError, Fenced, NotFound, Unavailable
from dspark.core.leases import Lease
from dspark.core.replicas import DrafterLoad, Member
from dspark.scheduler import StepCost
from dspark.scheduler.central import Registration
from dspark.scheduler.central.outage import Outage
from dspark.scheduling.client import SchedulingClient

log = logging.getLogger(__name__)

# Seconds between two tries to reach a scheduler: doubled each time, with chance, up to the last.
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0


# Heartbeats that fit into the time to live after the last one that was heard: all but the last may
# go unanswered, each at another replica.
TRIES = 3


class _Failed(Exception):
    """What a member does while it lives has failed; the cause says how."""


async def _nothing(_: Registration) -> None:
    return


class Membership:
    """`async with Membership(scheduler, member): ...`

    member: its epoch is not read. step_cost: a verifier's profile. alive: runs for as long as one
    life lasts, and is cancelled with it; if it fails, another life begins. leases: a gateway's.
    load: a drafter's. on_drain: called once when an operator wants this replica to drain.
    on_fenced: called when a newer life of this replica has registered; then this one is over.
    epoch: of this life, 0 before the first. refusal: why it is not let in, "" if nobody says so.
    """

    def __init__(
        self,
        scheduler: SchedulingClient,
        member: Member,
        step_cost: StepCost | None = None,
        *,
        alive: Callable[[Registration], Awaitable[None]] = _nothing,
        leases: Callable[[], Sequence[Lease]] = tuple,
        load: Callable[[], DrafterLoad | None] = lambda: None,
        on_drain: Callable[[], None] = lambda: None,
        on_fenced: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = 0
        self.draining = False
        self.refusal = ""
        self.outage = Outage("the scheduler", log)
        self._scheduler = scheduler
        self._member = member
        self._step_cost = step_cost
        self._alive = alive
        self._leases = leases
        self._load = load
        self._on_drain = on_drain
        self._on_fenced = on_fenced
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    @property
    def replica_id(self) -> str:
        return self._member.replica.replica_id

    async def __aenter__(self) -> Membership:
        self._task = asyncio.create_task(self._live())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self.epoch:
            try:
                await self._scheduler.leave(self.replica_id, self.epoch)
            except DsparkError as gone:
                log.debug("could not leave, the time to live will: %s", gone)

    async def drain(self) -> None:
        """Say that nothing new is taken any more, now and with every heartbeat."""
        self.draining = True
        if self.epoch:
            try:
                await self._beat()
            except DsparkError as gone:  # its own heartbeat sees to that
                log.debug("could not say that it drains: %s", gone)

    async def _live(self) -> None:
        """One life after another, until one is fenced."""
        wait_s, failed, now = FIRST_RETRY_S, "", asyncio.get_running_loop().time
        while True:
            begin = now()
            try:
                told = await self._scheduler.register(self._member, self._step_cost)
                self.epoch = told.epoch
                self.outage.back(self._clock())
                log.info("%s is registered, epoch %d", self.replica_id, told.epoch)
                self.refusal = ""
                await self._one_life(told)
            except Fenced as error:
                log.error("%s: %s", self.replica_id, error)
                self._on_fenced()
                return
            except NotFound:
                log.info("%s is not known any more: it registers again", self.replica_id)
            except Unavailable as error:
                self.outage.away(self._clock(), error)
            except DsparkError as error:
                if str(error) != self.refusal:
                    log.error("%s is not let in: %s", self.replica_id, error)
                self.refusal = str(error)
            except Exception as error:  # a bug, told once; another life starts afresh
                why = error.__cause__ or error
                if repr(why) != failed:
                    log.error("a life of %s has failed", self.replica_id, exc_info=why)
                failed = repr(why)
            if now() - begin > LAST_RETRY_S:  # it did last
                wait_s, failed = FIRST_RETRY_S, ""
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, LAST_RETRY_S)

    async def _one_life(self, told: Registration) -> None:
        """Until the scheduler does not know this life any more, or what is done in it fails."""
        work = asyncio.ensure_future(self._alive(told))
        beats = asyncio.create_task(self._beats(told))
        try:
            await asyncio.wait((work, beats), return_when=asyncio.FIRST_COMPLETED)
            if not (beats.done() or work.cancelled()) and (error := work.exception()) is not None:
                raise _Failed from error
            await beats
        finally:
            for task in (work, beats):
                task.cancel()
            await asyncio.gather(work, beats, return_exceptions=True)

    async def _beats(self, told: Registration) -> None:
        """One each heartbeat_s, whatever its answer takes; after one that failed the next comes
        sooner, and goes to another replica."""
        answer_s = (told.ttl_s - told.heartbeat_s) / TRIES
        now, retry_s = asyncio.get_running_loop().time, FIRST_RETRY_S
        while True:
            begin = now()
            if await self._beat(answer_s):
                due, retry_s = begin + told.heartbeat_s, FIRST_RETRY_S
            else:
                due, retry_s = begin + min(retry_s, told.heartbeat_s), 2 * retry_s
            await asyncio.sleep(max(due - now(), 0.0))

    async def _beat(self, timeout_s: float | None = None) -> bool:
        """Whether it was heard."""
        try:
            drain = await self._scheduler.heartbeat(
                self.replica_id,
                self.epoch,
                draining=self.draining,
                leases=self._leases(),
                load=self._load(),
                timeout_s=timeout_s,
            )
        except Unavailable as error:  # the next one tells whether it was forgotten meanwhile
            self.outage.away(self._clock(), error)
            return False
        self.outage.back(self._clock())
        if drain and not self.draining:
            self.draining = True
            self._on_drain()
        return True
