"""Several scheduler replicas on one store: one plans, another does when it is gone, and one that
wakes up again changes nothing."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from dspark.core.reports import Report, TenantReport
from dspark.scheduler.central import SchedulerConfig
from dspark.scheduler.central.planning import Planner
from dspark.scheduler.central.view import View
from dspark.scheduler.store import Store, StoredReport
from dspark.scheduler.store.redis_store import RedisStore
from dspark.scheduling.servicer import WireCodec

from ..scheduler.store.cluster import COST, Clock, join
from ..scheduler.store.conftest import patient
from ..verifier.toy import greedy, request, target_only
from .cluster import QUICK, RULE, Enrolled, an_engine, enrolled, scheduling, until

CODEC = WireCodec()


@contextmanager
def process(url: str, cluster: str, name: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A replica and its address."""
    script = Path(__file__).with_name("replica_process.py")
    command = [sys.executable, str(script), url, cluster, name]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    try:
        yield running, running.stdout.readline().strip()
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


async def test_another_plans_within_two_seconds_of_a_kill(valkey: str) -> None:
    """Default settings, and a process that gets no chance to say good-bye."""
    config = patient(valkey, uuid.uuid4().hex)
    default = {name: getattr(SchedulerConfig(), name) for name in QUICK}
    with process(valkey, config.cluster, "first") as (first, address):
        async with (
            RedisStore(config) as store,
            scheduling(store, "second", **default) as second,
            enrolled(an_engine(), address, second.address) as verifier,
        ):
            asking = asyncio.create_task(keep_busy(verifier))
            await until(lambda: verifier.guidance.plan is not None)
            assert second.scheduler.planner.term is None
            first.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            await until(lambda: second.scheduler.planner.made > 0)
            assert time.monotonic() - killed < 2.0
            before = verifier.guidance.plan
            await until(
                lambda: (
                    (plan := verifier.guidance.plan) is not None
                    and (before is None or plan.version > before.version)
                )
            )
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await store.check_integrity()


async def keep_busy(verifier: Enrolled) -> None:
    for number in count():
        ids = await verifier.say(request(f"busy {number}", [1, 2], greedy(60)))
        assert ids == target_only(RULE, [1, 2], 60)


async def test_one_that_stops_lets_another_plan_at_once(memory: Store) -> None:
    """Though the lease that it had would be good for much longer."""
    async with scheduling(memory, "second", lead_ttl_s=500.0) as second:
        await until(lambda: second.scheduler.planner.term is not None)
        async with scheduling(memory, "first", lead_ttl_s=500.0) as first:
            await second.stop()
            await until(lambda: first.scheduler.planner.term is not None)


def planner(store: Store, name: str, clock: Clock) -> Planner:
    return Planner(store, CODEC, SchedulerConfig(), name, clock)


async def seen(store: Store) -> View:
    view = View()
    await view.look(store, CODEC)
    return view


async def test_one_that_wakes_up_publishes_nothing(twin: Store, clock: Clock) -> None:
    """It stood still between having the lease and publishing what it planned under it."""
    a, b = planner(twin, "a", clock), planner(twin, "b", clock)
    v = await join(twin, "v1", cost=COST)
    report = Report("v1", v.epoch, 1, 0.05, 3, 2.0, tenants=(TenantReport("t", 2),))
    assert await a.lead()
    await twin.put_reports([StoredReport("v1", v.epoch, 1, CODEC.report(report))], 3.0)
    await a.plan(await seen(twin))
    first = await twin.plans(["v1"])
    assert first is not None
    assert not await b.lead()
    clock.now += 1.5
    assert await b.lead()
    await b.plan(await seen(twin))
    second = await twin.plans(["v1"])
    assert second is not None
    assert second.version > first.version
    await a.plan(await seen(twin))
    assert await twin.plans(["v1"]) == second
    assert (a.term, a.made) == (None, 1)
    assert not await a.lead()
    assert await b.lead()
