"""What a replica sees of the cluster, and how little it reads for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dspark.core.errors import Overloaded
from dspark.core.leases import LeaseRequest
from dspark.core.replicas import Pool, Replica, VerifierCard
from dspark.core.reports import Report, TenantReport
from dspark.core.requests import Limits
from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.central.view import View
from dspark.scheduler.store import Store, StoredReport
from dspark.scheduling.servicer import WireCodec

from .cluster import until

TTL_S = 60.0
CARD = VerifierCard("m", "m", "t", "toy", Limits(100, 1000, 10_000), 16, 1, 1)


class Reading(WireCodec):
    """Counts what is read."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()

    def read_report(self, data: bytes) -> Report:
        report = super().read_report(data)
        self.read[report.verifier] += 1
        return report


async def put(store: Store, codec: WireCodec, report: Report) -> StoredReport:
    stored = StoredReport(report.verifier, report.epoch, report.seen_through, codec.report(report))
    await store.put_reports([stored], TTL_S)
    return stored


async def joined(store: Store, name: str) -> Report:
    epoch = await store.register(Pool.VERIFIER, Replica(name, f"{name}:1"), CARD, None, TTL_S)
    return Report(name, epoch, 1, 0.05, tenants=(TenantReport("t", 1),))


async def test_only_news_is_read(memory: Store) -> None:
    codec, view = Reading(), View()
    first, other = await joined(memory, "v1"), await joined(memory, "v2")
    await put(memory, codec, first)
    await put(memory, codec, other)
    for _ in range(3):
        await view.look(memory, codec)
    assert codec.read == {"v1": 1, "v2": 1}
    newer = replace(first, seen_through=2, queue=7)
    await put(memory, codec, newer)
    await view.look(memory, codec)
    assert codec.read == {"v1": 2, "v2": 1}
    assert view.reports == {"v1": newer, "v2": other}


async def test_a_report_of_the_same_sequence_that_says_something_else_is_news(
    memory: Store,
) -> None:
    """Without drafts nothing new is seen through, and a queue grows all the same."""
    codec, view = Reading(), View()
    first = await joined(memory, "v1")
    for queue in range(3):
        await put(memory, codec, replace(first, queue=queue))
        await view.look(memory, codec)
        assert view.reports["v1"].queue == queue


async def test_what_this_replica_has_checked_is_not_read_again(memory: Store) -> None:
    codec, view = Reading(), View()
    report = await joined(memory, "v1")
    view.took(await put(memory, codec, report), report)
    await view.look(memory, codec)
    assert view.reports == {"v1": report}
    assert not codec.read
    # Somebody else's is newer than the one that it took.
    view.took(StoredReport("v1", report.epoch, 2, b"older"), replace(report, seen_through=2))
    newest = replace(report, seen_through=3)
    await put(memory, codec, newest)
    await view.look(memory, codec)
    assert view.reports == {"v1": newest}


class Counted:
    """A store that counts looks at it, and questions for its members."""

    def __init__(self, store: Store) -> None:
        self.looks = self.lists = 0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def usage(self) -> Any:
        self.looks += 1
        return await self._store.usage()

    async def members(self, *args: Any, **rest: Any) -> Any:
        self.lists += 1
        return await self._store.members(*args, **rest)


async def test_many_that_watch_ask_the_store_no_more_than_one(memory: Store) -> None:
    counted: Any = Counted(memory)
    heard: Counter[tuple[str, ...]] = Counter()

    async def watch(of: Scheduler, pool: Pool) -> None:
        async for members in of.watch((pool,)):
            heard[pool, *(m.replica.replica_id for m in members)] += 1

    config = SchedulerConfig(plan_interval_s=0.01, plan_ttl_s=1.0, look_s=0.01)
    async with Scheduler(counted, WireCodec(), config, "s1") as scheduler:
        tasks = [
            asyncio.create_task(watch(scheduler, pool))
            for pool in (Pool.VERIFIER, Pool.GATEWAY)
            for _ in range(25)
        ]
        await until(lambda: heard.total() == 50)  # now: nobody
        await joined(memory, "v1")
        await until(lambda: heard[Pool.VERIFIER, "v1"] == 25)
        seen = counted.looks
        await until(lambda: counted.looks > seen + 20)
        assert counted.lists <= counted.looks + 1  # a look begins with the list
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert heard.total() == 75  # the gateways' have not changed


async def test_requests_that_find_all_full_share_a_look(memory: Store) -> None:
    """What this replica saw is old: another has leased all there was."""
    counted: Any = Counted(memory)
    config = SchedulerConfig(plan_interval_s=500.0, plan_ttl_s=1000.0, look_s=500.0)
    here = Scheduler(counted, WireCodec(), config, "s1")
    elsewhere = Scheduler(memory, WireCodec(), config, "s2")
    await joined(memory, "v1")
    for replica in (here, elsewhere):
        await replica.view.look(memory, WireCodec())

    def lease(of: Scheduler, number: int) -> Any:
        return of.acquire(LeaseRequest(f"{number}", 0, "g", 0, 10, max_tokens=10))

    await asyncio.gather(*(lease(elsewhere, number) for number in range(2)))
    refused = await asyncio.gather(
        *(lease(here, number) for number in range(10, 40)), return_exceptions=True
    )
    assert all(isinstance(error, Overloaded) for error in refused)
    assert 1 <= counted.looks <= 2
    with pytest.raises(Overloaded):
        await lease(here, 50)
