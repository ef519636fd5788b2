"""Live calibration through the whole path: verdicts go up in reports, temperatures come down in
plans, and they outlive the replica that found them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import numpy as np
import pytest

from dspark.core.drafts import DrafterCard, DraftRequest
from dspark.core.plans import Calibration, CalibrationTable
from dspark.core.replicas import Member, Pool, Replica
from dspark.core.reports import CONFIDENCE_BINS, Report, TenantReport, VerdictCounts
from dspark.core.sampling import SamplingMode
from dspark.scheduler.central import SchedulerConfig
from dspark.scheduler.central.planning import MAX_STREAMS, VERDICTS_S, Planner
from dspark.scheduler.central.view import View
from dspark.scheduler.store import MemoryStore, Store, StoredReport
from dspark.scheduler.sts import BIN_LOGITS
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership
from dspark.scheduling.servicer import WireCodec
from dspark.verifier.engine import Engine
from dspark.verifier.tally import Crowd, FinishedDraft, Reporter, Tally

from ..scheduler.store.cluster import Clock
from ..verifier.toy import (
    Proposal,
    Script,
    ScriptedDrafter,
    ToyBackend,
    greedy,
    request,
    toy_engine,
)
from .cluster import COST, RULE, Enrolled, Served, V, card_of, enrolled, scheduling, until

# It says σ(4) = 0.98 of every token, and three in four stand.
LOGIT, STANDS = 4.0, 0.75
RIGHT = LOGIT / np.log(STANDS / (1 - STANDS))
CODEC = WireCodec()


def overconfident() -> Script:
    rng = np.random.default_rng(2)

    def script(history: tuple[int, ...], asked: DraftRequest) -> Proposal:
        ids = list(history)
        for _ in range(asked.gamma):
            token = int(RULE(np.array(ids, np.int32), len(ids) - 1)[0].argmax())
            ids.append(token if rng.random() < STANDS else (token + 1) % V)
        drafted = tuple(ids[len(history) :])
        return Proposal(drafted, [LOGIT] * len(drafted))

    return script


def an_engine() -> Engine:
    return toy_engine(
        ToyBackend(RULE, V),
        ScriptedDrafter(overconfident(), gamma=3),
        verify="fixed:3",
        clock=time.monotonic,
        max_sequences=24,
    )


def temperatures(of: Enrolled) -> np.ndarray:
    """Without offsets: this head is wrong by a factor."""
    temperatures, offsets = of.guidance.scaling("scripted", SamplingMode.GREEDY, 3)
    assert not offsets.any()
    return temperatures


@asynccontextmanager
async def busy(of: Enrolled) -> AsyncIterator[None]:
    async def user(name: int) -> None:
        for number in count():
            await of.say(request(f"{name} {number}", [name, 1], greedy(60)))

    users = [asyncio.create_task(user(name)) for name in range(24)]
    yield
    for one in users:
        one.cancel()
    await asyncio.gather(*users, return_exceptions=True)


async def test_a_miscalibrated_drafter_is_put_right_and_stays_so(store: Store) -> None:
    async with AsyncExitStack() as stack:
        s1, s2 = [
            await stack.enter_async_context(scheduling(store, name, calibration_s=0.3))
            for name in ("s1", "s2")
        ]
        v1 = await stack.enter_async_context(enrolled(an_engine(), s1.address, s2.address))
        await until(lambda: planning(s1, s2) is not None)
        first = planning(s1, s2)
        assert first is not None
        assert temperatures(v1).tolist() == [1.0, 1.0, 1.0]
        async with busy(v1):
            await until(lambda: bool(temperatures(v1).min() > 2.0))
            np.testing.assert_allclose(temperatures(v1), RIGHT, rtol=0.2)
            (drift,) = first.scheduler.planner.drift()
            assert drift.error < 0.05  # it was 0.23
        found = temperatures(v1)
        second = s2 if first is s1 else s1
        await first.stop()
        await until(lambda: second.scheduler.planner.made > 0)
        # One that never drafted is told by the other replica.
        v2 = await stack.enter_async_context(enrolled(an_engine(), second.address, name="v2"))
        await until(lambda: bool(temperatures(v2).min() > 2.0))
        np.testing.assert_allclose(temperatures(v2), found, rtol=0.2)


async def test_a_table_that_a_drafter_ships_reaches_whoever_plans(store: Store) -> None:
    """It registers with the other replica; positions that nothing was heard of keep what it says,
    in the plans of the one that plans."""
    shipped = CalibrationTable("d", SamplingMode.GREEDY, (2.0,) * 7, (0.25,) * 7)
    card = DrafterCard("d", "dspark", 7)
    member = Member(Pool.DRAFTER, Replica("d1", "h:1"), card, calibration=(shipped,))
    async with AsyncExitStack() as stack:
        s1, s2 = [
            await stack.enter_async_context(scheduling(store, name, calibration_s=0.05))
            for name in ("s1", "s2")
        ]
        await until(lambda: planning(s1, s2) is not None)
        first = planning(s1, s2)
        other = s2 if first is s1 else s1
        assert first is not None
        client = await stack.enter_async_context(SchedulingClient([other.address]))
        await stack.enter_async_context(Membership(client, member))
        planner = first.scheduler.planner
        await until(lambda: planner.shipped == (shipped,))
        logit = round(2 * np.log(3))  # three in four stand where it is right
        reached, accepted = [[0] * CONFIDENCE_BINS for _ in range(2)]
        at = int(np.abs(BIN_LOGITS - logit).argmin())
        reached[at], accepted[at] = 4000, 2200
        counts = VerdictCounts("d", SamplingMode.GREEDY, (tuple(reached),), (tuple(accepted),))
        epoch = await store.register(
            Pool.VERIFIER, Replica("v1", "h:2"), card_of(an_engine()), None, 60.0
        )
        seen = count(1)

        def told() -> bool:  # as long as it takes: each second of verdicts is one half or the other
            tenants = (TenantReport("t", verdicts=(counts,)),)
            other.scheduler.take(Report("v1", epoch, next(seen), 0.05, tenants=tenants))
            return planner.calibration.version > 0

        await until(told)
        (table,) = planner.calibration.tables
        assert table.temperatures[0] > 2.5
        assert table.temperatures[1:] == (2.0,) * 6
        assert table.offsets[1:] == (0.25,) * 6


def planning(*replicas: Served) -> Served | None:
    return next((r for r in replicas if r.scheduler.planner.term is not None), None)


# --- the planning replica's own care of it --------------------------------------------------------


HOT = Calibration(3, (CalibrationTable("d", SamplingMode.GREEDY, (2.0, 3.0), (-0.5, 1 / 3)),))


async def leading(store: Store, name: str, clock: Clock) -> Planner:
    planner = Planner(store, CODEC, SchedulerConfig(), name, clock)
    assert await planner.lead()
    return planner


async def test_who_plans_next_begins_with_what_is_stored(twin: Store, clock: Clock) -> None:
    first = await leading(twin, "a", clock)
    assert first.term is not None
    await twin.set_calibration(first.term, HOT.version, CODEC.calibration(HOT))
    clock.now += 1.5
    assert (await leading(twin, "b", clock)).calibration == HOT


async def test_one_that_cannot_be_read_keeps_nobody_from_planning(
    twin: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first = await leading(twin, "a", clock)
    assert first.term is not None
    await twin.set_calibration(first.term, 9, b"\xff\xff")
    clock.now += 1.5
    assert (await leading(twin, "b", clock)).calibration == Calibration(9)
    assert [r.getMessage()[:28] for r in caplog.records] == ["calibration 9 cannot be read"]


async def test_a_store_that_lost_it_is_told_again(clock: Clock) -> None:
    store = MemoryStore(clock)
    first = await leading(store, "a", clock)
    assert first.term is not None
    await store.set_calibration(first.term, HOT.version, CODEC.calibration(HOT))
    clock.now += 1.5
    second = await leading(store, "b", clock)
    clock.now += 0.1
    store.__init__(clock)  # type: ignore[misc]
    assert await second.lead()
    clock.now += SchedulerConfig().calibration_s
    await second.plan(View())
    stored = await store.calibration()
    assert stored is not None
    assert CODEC.read_calibration(stored.data) == HOT


def report_with(seen: int, *drafters: str) -> Report:
    """1,000 verdicts of each, all of them good."""
    counts = ((1000, *[0] * 19),)
    tables = [VerdictCounts(name, SamplingMode.GREEDY, counts, counts) for name in drafters]
    tenants = [
        TenantReport(f"{i}", verdicts=tuple(tables[i : i + 64])) for i in range(0, len(tables), 64)
    ]
    return Report("v1", 1, seen, 0.05, tenants=tuple(tenants))


async def test_each_verdict_counts_once_however_often_its_report_is_read(clock: Clock) -> None:
    planner = await leading(MemoryStore(clock), "a", clock)
    view = View()
    for seen, drafters in ((1, ("d",)), (1, ("d",)), (2, ()), (3, ("d",)), (3, ("d",))):
        view.reports = {"v1": report_with(seen, *drafters)}
        await planner.plan(view)
    clock.now += VERDICTS_S
    await planner.plan(view)
    (drift,) = planner.drift()
    assert drift.verdicts == 2000


async def test_verdicts_that_the_next_report_replaces_are_heard_and_count_once(
    memory: MemoryStore, clock: Clock
) -> None:
    """Of a verifier's reports the store keeps the last."""
    planner, view = await leading(memory, "a", clock), View()
    card = card_of(an_engine())
    epoch = await memory.register(Pool.VERIFIER, Replica("v1", "h:1"), card, COST, 600.0)
    reporter = Reporter("v1", epoch)
    z, a = np.full(2, LOGIT, np.float32), np.array([0.9, 0.8])
    kinds = "t", "d", SamplingMode.GREEDY, z, a
    told = []
    for number in range(1, 5):
        tally = Tally(0.05 * number, steps=1, requests=1)
        tally.drafts.append(FinishedDraft(number, *kinds, judged=2, accepted=1))
        report = reporter.report(tally, Crowd(0.05 * (number + 1), number, 10))
        assert report is not None
        told.append(bool(report.tenants[0].verdicts))
        stored = StoredReport("v1", epoch, report.seen_through, CODEC.report(report))
        await memory.put_reports([stored], 600.0)
        if number == 1:
            continue  # the next one comes first
        await view.look(memory, CODEC)
        await planner.plan(view)
        plans = await memory.plans(["v1"])
        assert plans is not None
        if number == 3:  # the plan of the second report was lost
            reporter.heard(CODEC.read_plan(plans.plans["v1"]).seen_through)
    assert told == [True, True, True, False]
    clock.now += VERDICTS_S
    await planner.lead()
    await planner.plan(view)
    (drift,) = planner.drift()
    assert drift.verdicts == 2


async def test_made_up_drafters_do_not_fill_the_memory(clock: Clock) -> None:
    planner = await leading(MemoryStore(clock), "a", clock)
    view = View()
    for seen in range(1, 4):
        names = [f"{seen} {i}" for i in range(MAX_STREAMS // 2)]
        view.reports = {"v1": report_with(seen, "known", *names)}
        clock.now += VERDICTS_S
        await planner.plan(view)
    assert len(planner.drift()) == MAX_STREAMS
    assert planner.left_out > 0
    assert "known" in {drift.drafter_id for drift in planner.drift()}
