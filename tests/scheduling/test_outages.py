"""Nothing waits for the scheduler: whatever happens to it or to its store, what runs goes on, what
is new is served, all is as before when it is back, and the log says both once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import pytest
from redis.asyncio import Redis

from dspark.core.requests import Committed
from dspark.scheduler.store.redis_store import RedisStore
from dspark.scheduling.client import LEASE_S
from dspark.scheduling.membership import Membership

from ..verifier.served import begun, rest_of
from ..verifier.toy import greedy, request, target_only
from .cluster import (
    RULE,
    Enrolled,
    Gateway,
    Served,
    an_engine,
    gateway,
    scheduling,
    until,
    verifying,
)
from .conftest import OwnValkey, quick
from .door import Door, Mode

# Longer than the store's own timeouts, so that the scheduler answers what its store does not.
CALL_S = 1.0
PROMPT = [1, 2, 3]
# Far more than fits into the buffers of a reader that stands still, and an answer that is quick.
LONG, SHORT = 1500, 40


@cache
def text(tokens: int) -> list[int]:
    """What the target alone says."""
    return target_only(RULE, PROMPT, tokens)


@dataclass
class Scene:
    """A cluster whose parts can be taken out of it."""

    server: OwnValkey
    store_door: Door
    door: Door
    store: RedisStore
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    served: Served | None = None
    verifiers: tuple[Enrolled, ...] = ()
    front: Gateway | None = None
    asked: Any = field(default_factory=count)

    async def start_scheduler(self) -> None:
        self.stack = AsyncExitStack()
        port = 0 if self.served is None else self.served.port
        self.served = await self.stack.enter_async_context(
            scheduling(self.store, port=port, plan_ttl_s=0.3)
        )
        self.door.to = self.served.address

    async def stop_scheduler(self) -> None:
        await self.stack.aclose()

    @property
    def target(self) -> Any:
        assert self.front is not None
        return self.front.target

    @property
    def members(self) -> list[Membership]:
        assert self.front is not None
        return [self.front.membership, *(v.membership for v in self.verifiers)]

    async def serves(self) -> None:
        async with asyncio.timeout(20):
            assert self.front is not None
            asked = request(f"new {next(self.asked)}", PROMPT, greedy(SHORT))
            assert await self.front.say(asked) == text(SHORT)

    async def leases(self) -> None:
        """Until a request is placed by the scheduler again."""
        while (before := self.target.local) < self.target.local + 1:
            await self.serves()
            if self.target.local == before:
                return

    @property
    def planned(self) -> bool:
        """Every verifier follows plans of its life."""
        plans = [(v.guidance.plan, v.membership.epoch) for v in self.verifiers]
        return all(plan is not None and plan.epoch == epoch for plan, epoch in plans)


@asynccontextmanager
async def cluster(server: OwnValkey) -> AsyncIterator[Scene]:
    async with (
        Door(server.url) as store_door,
        Door("") as door,
        RedisStore(quick(f"redis://{store_door.address}")) as store,
    ):
        scene = Scene(server, store_door, door, store)
        await scene.start_scheduler()
        at = {"call_s": CALL_S}
        try:
            async with (
                verifying(an_engine(), door.address, name="v1", **at) as v1,
                verifying(an_engine(), door.address, name="v2", **at) as v2,
                gateway(door.address, lease_s=LEASE_S, **at) as front,
            ):
                scene.verifiers, scene.front = (v1, v2), front
                await until(lambda: len(front.target.members) == 2)
                yield scene
        finally:
            await scene.stop_scheduler()


# --- what goes wrong, and how it is put right


@asynccontextmanager
async def stopped(scene: Scene) -> AsyncIterator[None]:
    await scene.stop_scheduler()
    yield
    await scene.start_scheduler()


@asynccontextmanager
async def black_hole(scene: Scene) -> AsyncIterator[None]:
    scene.door.turn(Mode.SILENT)
    yield
    scene.door.turn(Mode.OPEN)


@asynccontextmanager
async def store_paused(scene: Scene) -> AsyncIterator[None]:
    os.kill(scene.server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(scene.server.pid, signal.SIGCONT)


@asynccontextmanager
async def store_black_hole(scene: Scene) -> AsyncIterator[None]:
    scene.store_door.turn(Mode.SILENT)
    yield
    scene.store_door.turn(Mode.OPEN)


@asynccontextmanager
async def store_loading(scene: Scene) -> AsyncIterator[None]:
    scene.store_door.turn(Mode.LOADING)
    yield
    scene.store_door.turn(Mode.OPEN)


@asynccontextmanager
async def store_replaced(scene: Scene) -> AsyncIterator[None]:
    """It is gone, and one that knows nothing comes in its place."""
    await scene.server.stop()
    scene.store_door.turn(Mode.OPEN)
    yield
    scene.store_door.to = await scene.server.__aenter__()


@asynccontextmanager
async def store_read_only(scene: Scene) -> AsyncIterator[None]:
    async with Redis.from_url(scene.server.url) as operator:
        await operator.execute_command("REPLICAOF", "127.0.0.1", "1")
        yield
        await operator.execute_command("REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def store_full(scene: Scene) -> AsyncIterator[None]:
    async with Redis.from_url(scene.server.url) as operator:
        await operator.config_set("maxmemory", "1")
        yield
        await operator.config_set("maxmemory", "0")


@asynccontextmanager
async def store_locked(scene: Scene) -> AsyncIterator[None]:
    """Its password was changed: an operator has to see to that, and nobody waits for them."""
    async with Redis.from_url(scene.server.url) as operator:
        await operator.config_set("requirepass", "hush")
        scene.store_door.turn(Mode.OPEN)
        yield
        await operator.config_set("requirepass", "")


STORE_WAYS = [
    store_paused,
    store_black_hole,
    store_loading,
    store_replaced,
    store_read_only,
    store_full,
    store_locked,
]


@pytest.mark.parametrize("wrong", [stopped, black_hole, *STORE_WAYS])
async def test_nothing_waits_and_all_heals(
    server: OwnValkey, wrong: Callable[[Scene], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dspark")
    long_text, _ = text(LONG), text(SHORT)  # now, or the event loop would stand still later
    async with cluster(server) as scene:
        await until(lambda: bool(scene.served and scene.served.scheduler.view.fleet.verifiers))
        await scene.leases()
        slow = scene.target.run(request("slow", PROMPT, greedy(LONG)))
        told: list[Committed] = [await begun(slow)]
        quick_ones = asyncio.gather(*(scene.serves() for _ in range(4)))
        await until(lambda: scene.planned)
        epochs = [member.epoch for member in scene.members]
        caplog.clear()
        async with wrong(scene):
            await until(lambda: all(m.outage.since is not None for m in scene.members))
            local = scene.target.local
            for _ in range(5):
                await scene.serves()
            assert scene.target.local >= local + 5
            await until(lambda: not any(v.guidance.plan for v in scene.verifiers))
            await scene.serves()
        await quick_ones
        await until(lambda: all(m.outage.since is None for m in scene.members))
        await until(lambda: scene.planned)
        await scene.leases()
        held = scene.target.leases()
        assert len(held) <= 1
        await until(lambda: claimed(scene.store, len(held)))
        whole = await rest_of(slow, told)
        assert whole.ids == long_text
        await until(lambda: claimed(scene.store, 0))
        await scene.store.check_integrity()
        if wrong is store_replaced:
            assert all(m.epoch > was for m, was in zip(scene.members, epochs, strict=True))
    check_log(caplog, of_the_store=wrong in STORE_WAYS)


async def claimed(store: RedisStore, runs: int) -> bool:
    return sum(claim.runs for claim in (await store.usage()).tenants.values()) == runs


def check_log(caplog: pytest.LogCaptureFixture, *, of_the_store: bool) -> None:
    """Once from each who noticed: three members, and the scheduler if it was its store. A machine
    that stands still for a heartbeat's deadline is an outage too, so there may be more than one;
    nobody is away twice before it is back."""
    away, most = Counter[str](), Counter[str]()
    for record in caplog.records:
        who, told = record.name.rpartition(".")[2], record.getMessage()
        if record.levelno >= logging.WARNING and ("is away" in told or "is back" in told):
            away[who] += 1 if "is away" in told else -1
            most[who] = max(most[who], away[who])
    assert most == {"membership": 3} | ({"scheduler": 1} if of_the_store else {})
    assert not any(away.values())
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
