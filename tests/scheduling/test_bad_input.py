"""What comes over the wire is not trusted: it is refused or absorbed with one clear line and a
counter, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from dspark.core.drafts import DrafterCard
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Member, Pool, Replica
from dspark.core.reports import Report
from dspark.core.sampling import SamplingMode
from dspark.scheduler.store import Store
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.wire_client import member_from_wire, register_to_wire
from dspark.v1 import scheduling_pb2 as pb
from dspark.v1 import scheduling_pb2_grpc as pb_grpc

from ..verifier.toy import greedy, request, target_only
from .cluster import COST, RULE, Enrolled, Served, an_engine, card_of, enrolled, scheduling, until

NAN, INF = float("nan"), float("inf")
BIG = 2**64 - 1
BINS = [0] * 20


@dataclass
class Scene:
    """A verifier that behaves, v1, and one whose words are made up, v2."""

    store: Store
    served: Served
    good: Enrolled
    stub: Any
    epoch: int

    def report(self, seen: int = 1, **fields: Any) -> pb.Report:
        """A sound one of v2, but for `fields`."""
        sound = {"verifier": "v2", "epoch": self.epoch, "seen_through": seen, "interval_s": 0.05}
        return pb.Report(**{**sound, **fields})

    async def undisturbed(self) -> None:
        """v1 gets newer plans still, a request through it is right, and the store is whole."""
        before = self.served.scheduler.planner.made
        await until(lambda: self.served.scheduler.planner.made > before)
        plan = self.good.guidance.plan
        await until(lambda: self.good.guidance.plan not in (None, plan))
        assert await self.good.say(request("r", [1, 2], greedy(9))) == target_only(RULE, [1, 2], 9)
        await self.store.check_integrity()

    @property
    def refused(self) -> dict[str, int]:
        return self.served.scheduler.refused


@asynccontextmanager
async def scene(store: Store, **config: Any) -> AsyncIterator[Scene]:
    engine = an_engine()
    async with (
        scheduling(store, **config) as served,
        enrolled(engine, served.address) as good,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        stub: Any = pb_grpc.SchedulingStub(channel)
        member = Member(Pool.VERIFIER, Replica("v2", "h:1"), card_of(engine))
        told = await stub.Register(register_to_wire(member, COST))
        assert await good.say(request("first", [1, 2], greedy(40)))
        await until(lambda: good.guidance.plan is not None)
        yield Scene(store, served, good, stub, told.epoch)


# --- reports --------------------------------------------------------------------------------------


def tenant(**fields: Any) -> dict[str, Any]:
    return {"tenants": [pb.TenantReport(**fields)]}


def verdicts(**fields: Any) -> dict[str, Any]:
    sound = {"drafter_id": "d", "mode": 1, "bins": 20, "reached": BINS, "accepted": BINS}
    return tenant(tenant="t", verdicts=[pb.VerdictCounts(**{**sound, **fields})])


# What is wrong with a report, and the field that it is refused for.
BAD_REPORTS: list[tuple[dict[str, Any], str]] = [
    ({"interval_s": NAN}, "interval_s"),
    ({"interval_s": -1.0}, "interval_s"),
    ({"interval_s": 1e12}, "interval_s"),  # a clock that jumped
    ({"requests": NAN}, "requests"),
    ({"context": INF}, "context"),
    ({"prefill_tokens": -3.0}, "prefill_tokens"),
    ({"step_residual_s": NAN}, "step_residual_s"),
    ({"seen_through": BIG}, "seen_through"),
    ({"verdicts_through": 99}, "verdicts_through"),  # beyond what it has seen
    ({"epoch": BIG}, "epoch"),
    (tenant(tenant="t", survivals=[1] * 63), "tenants[].survivals"),
    (tenant(tenant="t", floor_tps=NAN), "tenants[].floor_tps"),
    (tenant(tenant="t" * 300), "tenants[].tenant"),
    ({"tenants": [pb.TenantReport(tenant="t")] * 2}, "tenants[].tenant"),
    ({"tenants": [pb.TenantReport(tenant=f"{i}") for i in range(300)]}, "tenants"),
    ({"drafters": [pb.DrafterUse(drafter="d", exposed_s=INF)]}, "drafters[].exposed_s"),
    (verdicts(bins=0), "verdicts"),
    (verdicts(bins=3), "verdicts"),
    (verdicts(accepted=[1] * 19), "verdicts"),
    (verdicts(bins=10), "tenants[].verdicts[].reached[]"),
    (verdicts(accepted=[1] * 20), "tenants[].verdicts[].accepted[][]"),
    (verdicts(mode=9), "mode"),
    (verdicts(drafter_id=""), "tenants[].verdicts[].drafter_id"),
    (verdicts(reached=BINS * 65, accepted=BINS * 65), "tenants[].verdicts[].reached"),
]


async def test_bad_reports_cost_their_own_interval_and_are_named_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(store) as of:
        call = of.stub.Follow()
        await call.write(of.report(1))
        caplog.clear()
        wanted: dict[str, int] = {}
        for fields, field in BAD_REPORTS:
            for _ in range(2):
                await call.write(of.report(2, **fields))
                wanted[field] = wanted.get(field, 0) + 1
        await call.write(of.report(3, requests=2.0, steps=1))
        await until(lambda: sum(of.refused.values()) == sum(wanted.values()))
        assert of.refused == wanted
        lines = [r.getMessage() for r in caplog.records if "are refused" in r.getMessage()]
        assert len(lines) == len(wanted)
        assert all(line.startswith("reports of verifier 'v2'") for line in lines)
        await until(lambda: seen_of(of, "v2") == 3)  # the stream lives, and the last one is in
        await of.undisturbed()
        call.cancel()


def seen_of(of: Scene, verifier: str) -> int:
    report = of.served.scheduler.view.reports.get(verifier)
    return -1 if report is None else report.seen_through


async def test_late_repeated_and_foreign_reports_change_nothing(store: Store) -> None:
    async with scene(store) as of:
        call = of.stub.Follow()
        for _ in range(3):
            await call.write(of.report(7))
        await until(lambda: seen_of(of, "v2") == 7)
        assert not of.refused
        await call.write(of.report(5))  # reordered
        await until(lambda: of.refused.get("old", 0) == 1)
        await call.write(of.report(9, epoch=of.epoch - 1))
        await until(lambda: of.refused.get("fenced", 0) == 1)
        await call.write(of.report(9, epoch=of.epoch + 1))
        await until(lambda: of.refused.get("unknown", 0) == 1)
        assert seen_of(of, "v2") == 7
        stranger = of.stub.Follow()
        await stranger.write(of.report(1, verifier="nobody"))
        await until(lambda: of.refused.get("unknown", 0) == 2)
        await of.undisturbed()
        call.cancel()
        stranger.cancel()


async def test_a_fenced_life_does_not_push_out_what_the_new_one_says(store: Store) -> None:
    """Both report through the same replica within one interval."""
    async with scene(store) as of:
        calls = [of.stub.Follow() for _ in range(2)]
        for number in range(1, 30):
            await calls[0].write(of.report(number))
            await calls[1].write(of.report(1000 + number, epoch=of.epoch - 1))
        await until(lambda: seen_of(of, "v2") == 29)
        for call in calls:
            call.cancel()


async def test_a_report_that_the_store_would_not_take_keeps_nobody_out(store: Store) -> None:
    """It is too large: the others' of the same interval go in."""
    counts = [4_000_000_000] * 20 * 64
    table = pb.VerdictCounts(drafter_id="d", mode=1, bins=20, reached=counts, accepted=counts)
    large = [pb.TenantReport(tenant=f"{i}", verdicts=[table]) for i in range(100)]
    async with scene(store, ttl_s=60.0, report_ttl_s=60.0) as of:
        call, other = of.stub.Follow(), of.stub.Follow()
        for number in range(20):
            await call.write(of.report(number, tenants=large))
            await other.write(of.report(100 + number))
        await until(lambda: of.refused["report"] == 20)
        await until(lambda: seen_of(of, "v2") == 119)
        await of.undisturbed()
        call.cancel()
        other.cancel()


async def last_of(call: Any) -> None:
    async for _ in call:
        pass


ENDS: dict[str, tuple[Callable[[Scene], list[pb.Report]], str, str]] = {
    "another's name": (
        lambda of: [of.report(1), of.report(2, verifier="v1")],
        "INVALID_ARGUMENT",
        "must stay",
    ),
    "nobody's name": (
        lambda of: [of.report(1, verifier="v\n2")],
        "INVALID_ARGUMENT",
        "must be printable",
    ),
    "too large a message": (
        lambda of: [of.report(1, tenants=[pb.TenantReport(tenant="x" * 5 * 2**20)])],
        "RESOURCE_EXHAUSTED",
        "larger than max",
    ),
}


@pytest.mark.parametrize("wrong", ENDS)
async def test_what_ends_a_stream_ends_this_one_only(store: Store, wrong: str) -> None:
    messages, status, says = ENDS[wrong]
    async with scene(store) as of:
        call = of.stub.Follow()
        for message in messages(of):
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError, match=says) as told:
            await last_of(call)
        assert told.value.code().name == status
        await of.undisturbed()


# --- calls ----------------------------------------------------------------------------------------


def joining(**fields: Any) -> pb.RegisterRequest:
    wire = register_to_wire(Member(Pool.VERIFIER, Replica("v3", "h:1"), card_of(an_engine())), COST)
    for name, value in fields.items():
        if isinstance(value, int):
            setattr(wire, name, value)
        else:
            wire.ClearField(name)  # type: ignore[arg-type]
            if value is not None:
                getattr(wire, name).CopyFrom(value)
    return wire


def drafter(*tables: CalibrationTable, **fields: Any) -> pb.RegisterRequest:
    card = DrafterCard(**{"drafter_id": "d", "kind": "dspark", "gamma": 7, **fields})
    member = Member(Pool.DRAFTER, Replica("d1", "h:1"), card, calibration=tables)
    return register_to_wire(member, None)


def table(*temperatures: float, drafter_id: str = "d") -> CalibrationTable:
    return CalibrationTable(drafter_id, SamplingMode.GREEDY, temperatures)


def lease(**fields: Any) -> pb.AcquireLeaseRequest:
    sound = {"request_id": "r", "owner": "g", "prompt_tokens": 5}
    return pb.AcquireLeaseRequest(**{**sound, **fields})


def beat(**fields: Any) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(**{"replica_id": "v2", "epoch": 1, **fields})


def verifier(limits: dict[str, int] | None = None, **fields: Any) -> pb.RegisterRequest:
    card = card_of(an_engine())
    card = replace(card, limits=replace(card.limits, **(limits or {})), **fields)
    return register_to_wire(Member(Pool.VERIFIER, Replica("v3", "h:1"), card), COST)


BAD_CARDS: dict[str, tuple[pb.RegisterRequest, int]] = {
    "verifier.limits.vocab_size": (verifier({"vocab_size": 0}), 0),
    "verifier.limits.context_length": (verifier({"context_length": 0}), 0),
    "verifier.limits.kv_tokens": (verifier({"kv_tokens": 0}), 0),
    "verifier.block_size": (verifier(block_size=0), 0),
    "verifier.max_sequences": (verifier(max_sequences=0), 0),
    "drafter.gamma": (drafter(gamma=1000), 1000),
}


async def test_cards_that_nothing_can_be_planned_with_are_refused_at_the_door(
    store: Store,
) -> None:
    async with scene(store) as of:
        for field, (message, value) in BAD_CARDS.items():
            says = rf"{field}: {value} must be a whole number in \[[01], \d+\]"
            with pytest.raises(grpc.aio.AioRpcError, match=says) as told:
                await of.stub.Register(message)
            assert told.value.code().name == "INVALID_ARGUMENT"
        await of.undisturbed()


async def test_a_card_that_another_scheduler_let_in_costs_nobody_else(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(store) as of:
        for number, (message, _) in enumerate(BAD_CARDS.values()):
            member = member_from_wire(message)
            name = replace(member.replica, replica_id=f"odd{number}")
            await store.register(member.pool, name, member.card, COST, 60.0)
        view = of.served.scheduler.view
        await until(lambda: len(view.members.members) == 2 + len(BAD_CARDS))
        assert {v.replica.replica_id for v in view.fleet.verifiers} == {"v1", "v2"}
        assert not view.fleet.drafters
        assert view.refused.keys() == BAD_CARDS.keys()
        assert len(of.served.scheduler.status().members) == 2 + len(BAD_CARDS)
        await of.undisturbed()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


BAD_CALLS: dict[str, tuple[str, Any, str, str]] = {
    "step cost of zeros": (
        "Register",
        joining(step_cost=pb.StepCost(tokens=[1, 2], table_s=[0.0, 0.0])),
        "INVALID_ARGUMENT",
        "step_cost.*table_s",
    ),
    "falling step cost": (
        "Register",
        joining(step_cost=pb.StepCost(tokens=[1, 2], table_s=[0.2, 0.1])),
        "INVALID_ARGUMENT",
        "must not be below",
    ),
    "step cost of nan": (
        "Register",
        joining(step_cost=pb.StepCost(tokens=[1], table_s=[NAN])),
        "INVALID_ARGUMENT",
        "table_s",
    ),
    "empty step cost": (
        "Register",
        joining(step_cost=pb.StepCost()),
        "INVALID_ARGUMENT",
        "at least 1 grid point",
    ),
    "no pool": ("Register", joining(pool=0), "INVALID_ARGUMENT", "pool: 0 is not one of"),
    "unknown pool": ("Register", joining(pool=9), "INVALID_ARGUMENT", "pool: 9 is not one of"),
    "no card": ("Register", joining(verifier=None), "INVALID_ARGUMENT", "card"),
    "no name": ("Register", joining(replica=pb.Member().replica), "INVALID_ARGUMENT", "replica_id"),
    "a drafter of another target": (
        "Register",
        drafter(target_id="other"),
        "FAILED_PRECONDITION",
        "target_id is 'other', of the verifiers 'toy'",
    ),
    "a table of another drafter": (
        "Register",
        drafter(table(1.0, drafter_id="e")),
        "INVALID_ARGUMENT",
        r"calibration\[0\].drafter_id: 'e' must be the drafter's own",
    ),
    "two tables of a mode": (
        "Register",
        drafter(table(1.0), table(2.0)),
        "INVALID_ARGUMENT",
        r"calibration\[1\].mode.*named twice",
    ),
    "a table of nothing": (
        "Register",
        drafter(table()),
        "INVALID_ARGUMENT",
        r"calibration\[0\].temperatures: 0 must be 1 to 64 numbers",
    ),
    "a temperature of 0": (
        "Register",
        drafter(table(1.0, 0.0)),
        "INVALID_ARGUMENT",
        r"calibration\[0\].temperatures\[1\]: 0.0 must be above 0 and finite",
    ),
    "a beat of nobody": ("Heartbeat", beat(replica_id="x"), "NOT_FOUND", "must register again"),
    "a beat of before": ("Heartbeat", beat(), "ABORTED", "epoch 1 is over"),
    "a beat of never": ("Heartbeat", beat(epoch=BIG), "INVALID_ARGUMENT", "epoch"),
    "a load of nan": (
        "Heartbeat",
        beat(drafter_load=pb.DrafterLoad(tokens_per_s=NAN)),
        "INVALID_ARGUMENT",
        "tokens_per_s",
    ),
    "unknown model": ("AcquireLease", lease(model="x"), "NOT_FOUND", "no verifier serves"),
    "no request": ("AcquireLease", lease(request_id=""), "INVALID_ARGUMENT", "request_id"),
    "no owner": ("AcquireLease", lease(owner=""), "INVALID_ARGUMENT", "owner"),
    "a floor of nan": ("AcquireLease", lease(floor_tps=NAN), "INVALID_ARGUMENT", "floor_tps"),
    "a floor below 0": ("AcquireLease", lease(floor_tps=-1.0), "INVALID_ARGUMENT", "floor_tps"),
    "a deadline of nan": ("AcquireLease", lease(deadline_s=NAN), "INVALID_ARGUMENT", "deadline_s"),
    "too long": ("AcquireLease", lease(prompt_tokens=2**32 - 1), "INVALID_ARGUMENT", "at most"),
    "too many": ("AcquireLease", lease(choices=2**32 - 1), "RESOURCE_EXHAUSTED", "full"),
    "odd tenant": ("AcquireLease", lease(tenant="a\nb"), "INVALID_ARGUMENT", "tenant"),
    "odd lease": (
        "ReleaseLeases",
        pb.ReleaseLeasesRequest(lease_ids=["a\nb"]),
        "INVALID_ARGUMENT",
        "lease_id",
    ),
}


async def test_bad_calls_end_with_what_is_wrong(store: Store, caplog: Any) -> None:
    async with scene(store) as of:
        await until(lambda: len(of.served.scheduler.view.fleet.verifiers) == 2)
        for name, (method, message, status, says) in BAD_CALLS.items():
            with pytest.raises(grpc.aio.AioRpcError, match=says) as told:
                await getattr(of.stub, method)(message)
            assert told.value.code().name == status, name
        lease_of_nan = pb.Lease(lease_id="a:0", request_id="", tokens=1)
        with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
            await of.stub.Heartbeat(beat(epoch=of.epoch, leases=[lease_of_nan]))
        watch = of.stub.Watch(pb.WatchRequest(pools=[7]))
        with pytest.raises(grpc.aio.AioRpcError, match="pool: 7"):
            await watch.read()
        await of.undisturbed()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_an_unknown_tenant_and_an_unknown_lease_are_fine(store: Store) -> None:
    async with scene(store) as of:
        await until(lambda: len(of.served.scheduler.view.fleet.verifiers) == 2)
        told = await of.stub.AcquireLease(lease(tenant="never seen"))
        assert told.lease.verifier.replica_id in ("v1", "v2")
        await of.stub.ReleaseLeases(pb.ReleaseLeasesRequest(lease_ids=["never:0", "r:0"]))
        await of.stub.Leave(pb.LeaveRequest(replica_id="nobody", epoch=3))
        await of.undisturbed()


async def one_of(verifier: str) -> AsyncIterator[Report]:
    """One report, and the stream stays open."""
    yield Report(verifier, 1, 1, 0.05)
    await asyncio.Event().wait()


async def test_a_plan_that_cannot_be_read_costs_its_verifier_only(store: Store) -> None:
    """Of a planning replica of another version."""
    async with (
        scheduling(store) as served,
        enrolled(an_engine(), served.address) as good,
        SchedulingClient([served.address]) as client,
    ):
        await until(lambda: good.guidance.plan is not None)
        odd = client.follow(one_of("v9"))
        waiting = asyncio.ensure_future(anext(odd))
        term = served.scheduler.planner.term
        assert term is not None
        while not served.scheduler.refused["plan.Plan"]:  # until it is read before the next plan is
            plans = await store.plans(["v1"])
            assert plans is not None
            await store.publish(term, {**plans.plans, "v9": b"\xff\xff"}, 5.0)
            await asyncio.sleep(0)
        plan = good.guidance.plan
        await until(lambda: good.guidance.plan not in (None, plan))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
