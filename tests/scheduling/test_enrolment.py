"""Plans on their way to an engine whose steps take longer than plans are apart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from dspark.core.errors import Unavailable
from dspark.core.plans import Directions, Plan
from dspark.core.reports import Report
from dspark.scheduler.store import Store
from dspark.scheduling.client import SchedulingClient
from dspark.verifier.enrolment import newest

from ..verifier.toy import ToyBackend, greedy, request
from .cluster import RULE, V, an_engine, enrolled, scheduling, until


class Held(ToyBackend):
    """A target whose steps wait for a word, each."""

    def __init__(self) -> None:
        super().__init__(RULE, V)
        self.begun = 0
        self.go = threading.Semaphore(0)

    def forward(self, batch: Any) -> Any:
        self.begun += 1
        assert self.go.acquire(timeout=30.0)
        return super().forward(batch)


class Hurried(SchedulingClient):
    """Gives a hundred plans for one report."""

    plans = 100

    async def follow(self, reports: AsyncIterator[Report]) -> AsyncGenerator[Plan, None]:
        report = await anext(aiter(reports))
        for version in range(1, self.plans + 1):
            yield Plan(
                version=version,
                verifier=report.verifier,
                epoch=report.epoch,
                seen_through=report.seen_through,
                ttl_s=60.0,
                _directions=Directions(1.0, None),
            )
        await asyncio.Event().wait()


async def test_an_engine_with_long_steps_follows_the_newest_plan(store: Store) -> None:
    """Not the next one in line, or it would fall behind by more with each step."""
    backend = Held()
    async with (
        scheduling(store) as replica,
        enrolled(an_engine(backend), replica.address, client=Hurried) as verifier,
    ):
        saying = asyncio.create_task(verifier.say(request("r", [1], greedy(200))))
        for step in range(1, 11):
            await until(lambda step=step: backend.begun == step)
            backend.go.release()
        await until(lambda: backend.begun == 11)
        plan = verifier.guidance.plan
        assert plan is not None
        assert plan.version == Hurried.plans
        backend.go.release(1000)
        await saying


async def test_the_newest_is_given_and_the_end_passed_on() -> None:
    async def three_then_an_error() -> AsyncGenerator[int, None]:
        for item in (1, 2, 3):
            yield item
        raise Unavailable("over")

    items = newest(three_then_an_error())
    assert await anext(items) == 3
    with pytest.raises(Unavailable, match="over"):
        await anext(items)
    assert [item async for item in newest(_of(7))] == [7]


async def test_who_stops_listening_closes_what_is_read() -> None:
    closed = False

    async def never() -> AsyncGenerator[int, None]:
        nonlocal closed
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed = True

    items = newest(never())
    assert await anext(items) == 1
    await items.aclose()
    assert closed


async def _of(*items: int) -> AsyncGenerator[int, None]:
    for item in items:
        yield item
