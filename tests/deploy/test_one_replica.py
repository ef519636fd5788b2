"""What ends a replica in the foreground, and what its exit status then says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from dspark.core.errors import Unavailable
from dspark.deploy.one_replica import FENCED, one_replica
from dspark.deploy.roles import RunningRole


@dataclass
class Server:
    """Drains when it is let, or at once with no time left. graces: of each call."""

    graces: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def drain(self, grace_s: float) -> None:
        self.graces.append(grace_s)
        if not grace_s:
            self.done.set()
        await self.done.wait()


@dataclass
class Started:
    """One replica and what became of it."""

    role: RunningRole
    server: Server
    ended: bool = False
    told: list[RunningRole] = field(default_factory=list)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[RunningRole]:
        yield self.role
        self.ended = True

    def run(self, wait_s: float = 20.0) -> asyncio.Task[int]:
        return asyncio.create_task(
            one_replica(self.entered(), self.told.append, wait_s=wait_s, drain_s=7.0)
        )

    async def until_ready(self) -> None:
        while not self.told:
            await asyncio.sleep(0)

    async def until_draining(self) -> None:
        while not self.server.graces:
            await asyncio.sleep(0)


@pytest.fixture
def started() -> Started:
    server = Server()
    return Started(RunningRole("verifier", "v1", "127.0.0.1:1", (server,)), server)


def send(number: signal.Signals) -> None:
    """To ourselves, once the replica listens for it."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_it_and_that_is_a_good_end(
    started: Started, number: signal.Signals
) -> None:
    running = started.run()
    await started.until_ready()
    send(number)
    await started.until_draining()
    assert not running.done(), "what runs is waited for"
    assert not started.role.ready
    started.server.done.set()
    assert await running == 0
    assert started.server.graces == [7.0]
    assert started.ended


async def test_a_second_signal_ends_it_at_once(started: Started) -> None:
    running = started.run()
    await started.until_ready()
    send(signal.SIGTERM)
    await started.until_draining()
    send(signal.SIGINT)
    assert await running == 128 + signal.SIGINT
    assert started.server.graces == [7.0, 0.0]


async def test_an_operators_wish_drains_it_too(started: Started) -> None:
    running = started.run()
    await started.until_ready()
    started.role.drain_wanted.set()
    started.server.done.set()
    assert await running == 0


async def test_a_newer_life_ends_it_with_a_status_of_its_own(started: Started) -> None:
    running = started.run()
    await started.until_ready()
    started.role.fenced.set()
    assert await running == FENCED
    assert started.server.graces == [0.0], "its runs are another's by now"


async def test_a_signal_while_it_still_waits(started: Started) -> None:
    asked = asyncio.Event()

    def waits_for() -> str:
        asked.set()
        return "no verifier has registered yet"

    started.role.waits_for = waits_for
    running = started.run()
    await asked.wait()
    send(signal.SIGTERM)
    started.server.done.set()
    assert await running == 0
    assert not started.told, "it never was ready"


async def test_one_that_does_not_get_ready_says_why(started: Started) -> None:
    started.role.waits_for = lambda: "no verifier has registered yet"
    with pytest.raises(Unavailable, match=r"v1 is not ready after 0\.1 s: no verifier has"):
        await started.run(wait_s=0.1)


async def test_one_whose_work_has_ended_by_itself(started: Started) -> None:
    alive = [True]
    started.role.lives = lambda: alive[0]
    running = started.run()
    await started.until_ready()
    alive[0] = False
    with pytest.raises(Unavailable, match="v1: the thread that does its work has ended"):
        await running
