"""The drafters of a real cluster in a real engine: scheduler, drafting service and link over gRPC
on loopback (design.md §5, §6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dspark.core.errors import Unavailable
from dspark.core.replicas import Member, Pool, Replica
from dspark.core.requests import Request
from dspark.drafter import (
    BatchingConfig,
    DrafterOffer,
    DraftingServicer,
    DraftRunner,
    RemoteDrafter,
    VerifierFacts,
)
from dspark.scheduler.store import MemoryStore, Store
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership
from dspark.serving import serve_grpc
from dspark.verifier.adoption import Adoption
from dspark.verifier.enrolment import enrol
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer
from dspark.verifier.sources import Bell

from ..scheduling.cluster import COST, PATIENT_S, card_of, gateway, ids_of, scheduling, until
from .remote import FEATURES, PROJECTION
from .test_runner import BlockedBackend
from .toy import (
    ScriptedDrafter,
    ToyBackend,
    greedy,
    history_rule,
    oracle,
    request,
    target_only,
    toy_engine,
)

V, LAYERS, TOKENS = 50, 4, 60
RULE = history_rule(V)
PROMPT = tuple(range(20))


def a_drafter(**card: Any) -> ScriptedDrafter:
    """It reads features and checks each of them."""
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=5), feature_id=FEATURES)
    drafter.card = replace(drafter.card, kind="dspark", **{"layer_ids": (1,), **card})
    drafter.projection = PROJECTION  # type: ignore[attr-defined]
    return drafter


@dataclass
class Drafting:
    """A drafter replica of the cluster."""

    drafter: ScriptedDrafter
    runner: DraftRunner
    address: str

    @property
    def sessions(self) -> int:
        return len(self.drafter.sessions)


@asynccontextmanager
async def drafting(
    scheduler: str, name: str, drafter: ScriptedDrafter | None = None
) -> AsyncIterator[Drafting]:
    drafter = drafter or a_drafter()
    offer = DrafterOffer.of(drafter, feature_dtype="float32")  # exact: the toy compares
    async with DraftRunner(drafter, BatchingConfig(window_s=0.0)) as runner:
        servicer = DraftingServicer(runner, offer, Replica(name))
        async with (
            serve_grpc(servicer, drain_s=0.0) as server,
            SchedulingClient([scheduler], call_s=PATIENT_S) as client,
            Membership(client, Member(Pool.DRAFTER, Replica(name, server.address), drafter.card)),
        ):
            yield Drafting(drafter, runner, server.address)


def patiently(replica: Replica, facts: VerifierFacts, bell: Bell) -> RemoteDrafter:
    """A busy machine may keep a drafter from its processor for longer than a link usually bears."""
    return RemoteDrafter(replica, facts, bell, silent_s=PATIENT_S, connect_s=PATIENT_S)


@dataclass
class Verifying:
    runner: EngineRunner
    adoption: Adoption

    @property
    def links(self) -> set[str]:
        return set(self.adoption.links)

    async def say(self, asked: Request) -> list[int]:
        return await ids_of(self.runner, asked)

    async def sources(self) -> set[str]:
        return await self.runner.between_steps(lambda e: {s.source for s in e.running})


@asynccontextmanager
async def verifying(scheduler: str, **config: Any) -> AsyncIterator[Verifying]:
    engine = toy_engine(ToyBackend(RULE, V), verify="fixed:7", clock=time.monotonic, **config)
    async with EngineRunner(engine) as runner:
        servicer = VerificationServicer(runner, card_of(engine), Replica("v1"))
        async with (
            serve_grpc(servicer, drain_s=0.0) as server,
            SchedulingClient([scheduler], call_s=PATIENT_S) as client,
            Adoption(client, runner, card_of(engine), "v1", LAYERS, connect=patiently) as adoption,
        ):

            def on_life(epoch: int) -> None:
                servicer.begin_life(epoch)
                adoption.begin_life(epoch)

            member = Member(Pool.VERIFIER, Replica("v1", server.address), card_of(engine))
            async with enrol(client, runner, member, COST, on_life=on_life):
                yield Verifying(runner, adoption)
        engine.check_integrity()


@pytest.fixture
def store() -> Store:
    return MemoryStore()


def ask(name: str, tokens: int = TOKENS, **rest: Any) -> Request:
    return request(name, PROMPT, greedy(tokens), **rest)


EXPECTED = target_only(RULE, PROMPT, TOKENS)


async def test_drafters_are_adopted_as_they_come_and_dismissed_as_they_go(store: Store) -> None:
    async with scheduling(store) as at, verifying(at.address) as v:
        engine = v.runner.engine
        assert await v.say(ask("alone")) == EXPECTED
        assert engine.figures.speculation.drafted == 0
        async with drafting(at.address, "d1") as one:
            await until(lambda: v.links == {"d1"})
            assert await v.say(ask("one")) == EXPECTED
            assert engine.figures.speculation.accepted > TOKENS / 2
            assert not engine.desk.faults
            await until(lambda: one.sessions == 0)
            async with drafting(at.address, "d2"):
                await until(lambda: v.links == {"d1", "d2"})
                said = await asyncio.gather(*(v.say(ask(f"two{i}")) for i in range(4)))
                assert said == [EXPECTED] * 4
            await until(lambda: v.links == {"d1"})
            assert [source.name for source in engine.drafters.values()] == ["d1"]
        await until(lambda: not v.links)
        assert not await v.runner.between_steps(lambda e: e.versions.made(FEATURES))
        assert await v.say(ask("alone again")) == EXPECTED
        assert not engine.desk.faults


async def test_a_drafter_that_dies_under_a_request_is_replaced_by_another(store: Store) -> None:
    """It leaves in the middle of texts that are being drafted; they go on, with the other."""
    async with (
        scheduling(store) as at,
        verifying(at.address) as v,
        drafting(at.address, "d2") as other,
    ):
        async with drafting(at.address, "d1") as one:
            await until(lambda: v.links == {"d1", "d2"})
            long = target_only(RULE, PROMPT, 400)
            running = [
                asyncio.create_task(v.say(ask(f"r{i}", 400, drafter="d1"))) for i in range(3)
            ]
            await until(lambda: one.sessions == 3)
            before = len(other.drafter.asked)
        assert await asyncio.gather(*running) == [long] * 3
        assert len(other.drafter.asked) > before
        assert not v.runner.engine.desk.faults


async def test_links_outlive_the_scheduler_and_what_it_knew(store: Store) -> None:
    async with AsyncExitStack() as first, AsyncExitStack() as rest:
        at = await first.enter_async_context(scheduling(store))
        await rest.enter_async_context(drafting(at.address, "d1"))
        v = await rest.enter_async_context(verifying(at.address))
        await until(lambda: v.links == {"d1"})
        link, figures = v.adoption.links["d1"], v.runner.engine.figures
        await first.aclose()
        before = figures.speculation.accepted
        assert await v.say(ask("a")) == EXPECTED
        assert figures.speculation.accepted > before
        # The next one begins with an empty list; who comes back to it is still the same.
        at = await rest.enter_async_context(scheduling(MemoryStore(), name="s2", port=at.port))
        await rest.enter_async_context(drafting(at.address, "d2"))
        await until(lambda: v.links == {"d1", "d2"})
        assert v.adoption.links["d1"] is link
        assert link.figures.connected == 1
        assert await v.say(ask("b")) == EXPECTED


class Told(SchedulingClient):
    """A scheduler that lists what a test says."""

    def __init__(self) -> None:
        super().__init__(["nowhere:1"])
        self.lists: asyncio.Queue[tuple[Member, ...]] = asyncio.Queue()

    async def watch(self, pools: Any = ()) -> AsyncGenerator[tuple[Member, ...], None]:
        while True:
            yield await self.lists.get()


async def test_of_those_that_are_listed_no_more_only_dead_ones_are_dismissed(store: Store) -> None:
    engine = toy_engine(ToyBackend(RULE, V), clock=time.monotonic)
    told = Told()
    async with (
        scheduling(store) as at,
        drafting(at.address, "d1") as one,
        EngineRunner(engine) as runner,
        Adoption(told, runner, card_of(engine), "v1", LAYERS, connect=patiently) as adoption,
    ):
        adoption.begin_life(1)
        async with drafting(at.address, "d2") as two:
            members = tuple(
                Member(Pool.DRAFTER, Replica(name, replica.address, 1), replica.drafter.card)
                for name, replica in (("d1", one), ("d2", two))
            )
            told.lists.put_nowait(members)
            await until(lambda: set(adoption.links) == {"d1", "d2"})
            link = adoption.links["d1"]
            told.lists.put_nowait(())
        await until(lambda: "d2" not in adoption.links)  # its server has ended
        assert adoption.links["d1"] is link
        assert set(engine.drafters) == {"d1"}


async def test_one_that_does_not_fit_is_left_out(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scheduling(store) as at,
        drafting(at.address, "wide", a_drafter(layer_ids=(3,))),
        drafting(at.address, "d1"),
        verifying(at.address) as v,
    ):
        await until(lambda: v.links == {"d1"})
        await until(lambda: "reads [3], the verifier 'v1' has 4 layers" in caplog.text)
        assert await v.say(ask("a")) == EXPECTED
        assert v.links == {"d1"}


async def test_an_engine_that_is_stuck_keeps_no_drafter(store: Store) -> None:
    """Its link is left in a second, whether the engine hears of it or not."""
    backend = BlockedBackend()
    engine = toy_engine(backend, clock=time.monotonic)
    card = card_of(engine)
    try:
        async with (
            scheduling(store) as at,
            drafting(at.address, "d1"),
            SchedulingClient([at.address], call_s=PATIENT_S) as client,
        ):
            async with (
                EngineRunner(engine, stop_s=0.2) as runner,
                Adoption(client, runner, card, "v1", LAYERS, connect=patiently) as adoption,
            ):
                adoption.begin_life(1)
                await until(lambda: set(adoption.links) == {"d1"})
                running = asyncio.create_task(ids_of(runner, ask("a")))
                await backend.stuck()
                begin = time.monotonic()
            assert time.monotonic() - begin < 10
            with pytest.raises(Unavailable):
                await running
    finally:
        backend.gate.set()


async def test_a_bug_in_following_the_list_costs_one_list() -> None:
    class Stumbling:
        lists = 0

        async def watch(self, pools: Any) -> AsyncIterator[list[Member]]:
            self.lists += 1
            if self.lists == 1:
                raise ZeroDivisionError("a bug")
            yield [Member(Pool.DRAFTER, Replica("d1", "127.0.0.1:9"), a_drafter().card)]
            await asyncio.Event().wait()

    met = asyncio.Event()

    def connect(replica: Replica, facts: VerifierFacts, bell: Bell) -> RemoteDrafter:
        met.set()
        return patiently(replica, facts, bell)

    engine = toy_engine(ToyBackend(RULE, V))
    scheduler: Any = Stumbling()
    async with (
        EngineRunner(engine) as runner,
        Adoption(scheduler, runner, card_of(engine), "v1", LAYERS, connect=connect) as adoption,
    ):
        adoption.begin_life(1)
        async with asyncio.timeout(PATIENT_S):
            await met.wait()


async def test_a_lease_names_the_drafter_that_drafts(store: Store) -> None:
    """From the scheduler's choice through gateway and verifier to the one replica."""
    async with (
        scheduling(store) as at,
        drafting(at.address, "d1") as one,
        drafting(at.address, "d2") as two,
        verifying(at.address) as v,
        gateway(at.address) as g,
    ):
        await until(lambda: v.links == {"d1", "d2"} and bool(g.target.members))
        for i in range(6):
            before = len(one.drafter.asked), len(two.drafter.asked)
            running = asyncio.create_task(g.say(ask(f"a{i}")))
            lease = await _lease(g.target)
            assert await running == EXPECTED
            asked = len(one.drafter.asked), len(two.drafter.asked)
            grew = {n for n, a, b in zip(("d1", "d2"), before, asked, strict=True) if b > a}
            assert grew == {lease}


async def _lease(target: Any) -> str:
    """Name of the drafter of the one lease that is held."""
    await until(lambda: bool(target.leases()))
    (lease,) = target.leases()
    assert lease.drafter is not None
    return str(lease.drafter.replica_id)
