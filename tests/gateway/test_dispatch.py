"""The cluster's verifiers as one target: a lost one shows in no answer, a lost scheduler in none
either, and what is over leaves no lease, link or run behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

import pytest

from dspark.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DsparkError,
    Fenced,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    Unavailable,
)
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.replicas import Member, Pool, Replica, VerifierCard
from dspark.core.requests import (
    Committed,
    Event,
    Finished,
    FinishReason,
    Limits,
    Request,
    SpeculationFigures,
    Usage,
)
from dspark.core.sampling import SamplingParams
from dspark.gateway.dispatch import MOST_LOSSES, REPLAYS_PER_ATTEMPT, Dispatch
from dspark.scheduler.store import MemoryStore, Refusal, Store, lease_id
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership
from dspark.verifier.engine import Engine

from ..scheduling.cluster import (
    RULE,
    Enrolled,
    Gateway,
    Served,
    V,
    an_engine,
    card_of,
    gateway,
    ids_of,
    scheduling,
    until,
    verifying,
)
from ..scheduling.door import Door, Mode
from ..verifier.served import begun, error_of, rest_of
from ..verifier.toy import Answer, ToyBackend, greedy, history_rule, request, target_only
from .test_verifier_client import free_port

PROMPT = (1, 2, 3)
LONG = 800
SEEDED = SamplingParams(temperature=1.2, seed=99, max_tokens=LONG)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def roomy(backend: ToyBackend | None = None, **config: Any) -> Engine:
    """An engine that has room for all of a test's leases."""
    return an_engine(backend, kv_tokens=32_768, **config)


def text(asked: Request, tokens: int) -> list[int]:
    """What the target alone says. Long ones are worked out before there is a cluster, as its event
    loop would stand still."""
    return _text(asked.prompt_ids, tokens, asked.sampling.temperature, asked.sampling.seed or 0)


@cache
def _text(prompt: tuple[int, ...], tokens: int, temperature: float, seed: int) -> list[int]:
    return target_only(RULE, prompt, tokens, temperature=temperature, seed=seed)


async def claimed(store: Store) -> int:
    """Runs that hold a lease."""
    return sum(claim.runs for claim in (await store.usage()).tenants.values())


async def all_known(front: Gateway, served: Served, verifiers: int) -> None:
    await until(lambda: len(front.target.members) == verifiers)
    await until(lambda: len(served.scheduler.view.fleet.verifiers) == verifiers)


async def nothing_left(store: Store, front: Gateway, *verifiers: Enrolled) -> None:
    await until(lambda: all(v.engine.idle for v in verifiers))
    assert front.target.leases() == ()
    assert not front.target._running
    assert all(v.engine.cache.pool.owned == 0 for v in verifiers)

    async def none() -> bool:
        return not await claimed(store)

    await until(none)
    await store.check_integrity()


# --- leases ---------------------------------------------------------------------------------------


async def test_a_lease_is_held_as_long_as_its_run_and_kept_by_heartbeats(
    store: MemoryStore,
) -> None:
    asked = request("a", PROMPT, greedy(LONG), tenant="t")
    whole = text(asked, LONG)
    async with (
        scheduling(store) as served,
        verifying(an_engine(), served.address) as v1,
        gateway(served.address) as front,
    ):
        await all_known(front, served, 1)
        events = front.target.run(asked)
        first = await begun(events)
        (lease,) = front.target.leases()
        assert (lease.verifier.replica_id, lease.tenant) == ("v1", "t")
        assert lease.lease_id == lease_id("a/0", 0)

        async def expires() -> float:
            return (await store.snapshot()).zsets["lease_expiry"][lease.lease_id]

        given = await expires()
        later = given + 1000 * 0.5  # a time to live later than it would be over by itself

        async def renewed() -> bool:
            return await expires() > later

        await until(renewed)
        assert (await rest_of(events, [first])).ids == whole
        await nothing_left(store, front, v1)


async def test_a_hundred_that_hang_up_leave_nothing(store: MemoryStore) -> None:
    """At any moment: before the lease, with it, at the first token, in the middle."""
    async with (
        scheduling(store, lease_ttl_s=500.0) as served,
        verifying(an_engine(), served.address, name="v1") as v1,
        verifying(an_engine(), served.address, name="v2") as v2,
        gateway(served.address) as front,
    ):
        await all_known(front, served, 2)
        rng = random.Random(3)

        async def hangs_up(number: int) -> None:
            events = front.target.run(request(f"{number}", PROMPT, greedy(LONG)))
            reading = asyncio.ensure_future(anext(events))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            if number % 3:
                await asyncio.wait((reading,), timeout=rng.uniform(0.0, 0.05))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await events.aclose()

        await asyncio.gather(*map(hangs_up, range(100)))
        await nothing_left(store, front, v1, v2)


class SlowStore(MemoryStore):
    """Takes as long for a lease as a test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.go_on = asyncio.Event()

    async def acquire(self, *arguments: Any, **rest: Any) -> Lease | Refusal:
        self.asked += 1
        await self.go_on.wait()
        return await super().acquire(*arguments, **rest)


async def test_a_scheduler_that_is_slow_is_not_waited_for() -> None:
    store = SlowStore()
    async with (
        scheduling(store, lease_ttl_s=500.0) as served,
        verifying(an_engine(), served.address) as v1,
        gateway(served.address, lease_s=0.05) as front,
    ):
        await all_known(front, served, 1)
        asked = request("a", PROMPT, greedy(20))
        assert await front.say(asked) == text(asked, 20)
        assert (front.target.local, store.asked) == (1, 1)
        store.go_on.set()
        await nothing_left(store, front, v1)


# --- verifiers that are lost ----------------------------------------------------------------------


async def test_what_ran_on_a_killed_verifier_goes_on_elsewhere(store: MemoryStore) -> None:
    """Greedy and seeded text is what it would have been, no token twice and none left out."""
    asked = [request(f"{i}", (i, 2, 3), greedy(LONG) if i % 2 else SEEDED) for i in range(9)]
    wanted = [text(one, LONG) for one in asked]
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(scheduling(store))
        doors, verifiers = [], []
        for name in ("v1", "v2", "v3"):
            door = await stack.enter_async_context(Door(""))
            of = await stack.enter_async_context(
                verifying(roomy(), served.address, name=name, reached_at=door.address)
            )
            assert of.server is not None
            door.to = of.server.address
            doors.append(door)
            verifiers.append(of)
        front = await stack.enter_async_context(gateway(served.address))
        await all_known(front, served, 3)
        runs = [front.target.run(one) for one in asked]
        told = [[await begun(events)] for events in runs]
        assert all(on(front, name) for name in ("v1", "v2", "v3"))
        cut(doors[0])
        while on(front, "v1"):
            for events, commits in zip(runs, told, strict=True):
                commits.append(await begun(events))
        cut(doors[1])
        whole = await asyncio.gather(
            *(rest_of(events, commits) for events, commits in zip(runs, told, strict=True))
        )
        for ids, answer in zip(wanted, whole, strict=True):
            assert answer.ids == ids
            assert error_of(answer) is None
            check_sequence(answer)
        assert front.target.replays >= 6
        await nothing_left(store, front, *verifiers)


async def ids_into(told: list[Committed], events: AsyncGenerator[Event, None]) -> None:
    async for event in events:
        assert isinstance(event, Committed)
        told.append(event)


def on(front: Gateway, verifier: str) -> int:
    """How many runs are on a verifier."""
    return sum(lease.verifier.replica_id == verifier for lease in front.target.leases())


def cut(door: Door) -> None:
    """What it was is lost, and nobody gets through any more."""
    door._server.close()
    door.turn(Mode.OPEN)


def check_sequence(answer: Answer) -> None:
    """Positions follow each other, and the totals are those of all attempts together."""
    at, figures = 0, SpeculationFigures()
    for commit in answer.commits:
        assert commit.index == at
        at += len(commit.ids)
        figures += commit.speculation
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == at
    assert answer.finished.speculation == figures


class Hanging(ToyBackend):
    """Stands still in its fifth forward until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(RULE, V)
        self.go_on = threading.Event()

    def forward(self, batch: Any) -> Any:
        if self.forwards == 4:
            self.go_on.wait()
        return super().forward(batch)


async def test_a_newer_attempt_ends_the_one_that_was_given_up(store: MemoryStore) -> None:
    """Two ways lead to one engine. The first falls silent, so the gateway goes on by the second,
    and the engine, which was told nothing of that, has the older attempt still."""
    asked = request("a", PROMPT, SEEDED)
    wanted = text(asked, LONG)
    hanging = Hanging()
    engine = roomy(hanging, heartbeat_s=0.1)
    async with Door("") as door, scheduling(store) as served, AsyncExitStack() as stack:
        v1 = await stack.enter_async_context(
            verifying(engine, served.address, reached_at=door.address)
        )
        stack.callback(hanging.go_on.set)
        assert v1.server is not None
        door.to = v1.server.address
        front = await stack.enter_async_context(gateway(served.address))
        await all_known(front, served, 1)
        events = front.target.run(asked)
        told = [await begun(events)]
        door.turn(Mode.SILENT)
        client = await stack.enter_async_context(SchedulingClient([served.address]))
        again = Member(Pool.VERIFIER, Replica("again", v1.server.address), card_of(engine))
        await stack.enter_async_context(Membership(client, again))
        reading = asyncio.create_task(rest_of(events, told))
        await until(lambda: on(front, "again") == 1)
        assert engine.active == 1
        hanging.go_on.set()
        whole = await reading
        assert whole.ids == wanted
        check_sequence(whole)
        # Had the older attempt gone on, it would have made as many once more.
        assert engine.figures.committed_tokens < 1.5 * LONG
        await nothing_left(store, front, v1)
        door.turn(Mode.OPEN)


async def test_a_replay_waits_its_turn_where_all_are_full(store: MemoryStore) -> None:
    """Both have room for one. A new request is told to come again; one that was accepted already
    goes on in the queue of the other."""
    asked = [request(f"{i}", (i, 2, 3), greedy(LONG)) for i in range(2)]
    wanted = [text(one, LONG) for one in asked]
    async with Door("") as door, scheduling(store) as served, AsyncExitStack() as stack:
        places = (("v1", door.address), ("v2", ""))
        v1, v2 = [
            await stack.enter_async_context(
                verifying(an_engine(kv_tokens=1024), served.address, name=name, reached_at=place)
            )
            for name, place in places
        ]
        assert v1.server is not None
        door.to = v1.server.address
        front = await stack.enter_async_context(gateway(served.address))
        await all_known(front, served, 2)
        runs = [front.target.run(one) for one in asked]
        told = [[await begun(events)] for events in runs]
        with pytest.raises(Overloaded, match="full"):
            await front.say(request("third", PROMPT, greedy(LONG)))
        cut(door)
        whole = await asyncio.gather(*map(rest_of, runs, told))
        assert [answer.ids for answer in whole] == wanted
        await nothing_left(store, front, v2)


async def test_a_verifier_that_comes_back_as_another_process_is_found_again(
    store: MemoryStore,
) -> None:
    """Same name, same port, a newer epoch: what was known of it is refused, and then is true."""
    port = await free_port()
    async with scheduling(store) as served, gateway(served.address) as front:
        for number in range(2):
            async with verifying(roomy(), served.address, port=port) as v1:
                asked = request(f"{number}", PROMPT, greedy(20))
                assert await front.say(asked) == text(asked, 20)
                await nothing_left(store, front, v1)
        assert len(front.target.links) == 1


async def test_links_to_verifiers_that_are_gone_are_closed(store: MemoryStore) -> None:
    async with scheduling(store) as served, gateway(served.address) as front:
        for number in range(4):
            async with verifying(roomy(), served.address, name=f"v{number}"):
                asked = request(f"{number}", PROMPT, greedy(20))
                assert await front.say(asked) == text(asked, 20)
                await until(lambda: len(front.target.links) == 1)


# --- nobody there ---------------------------------------------------------------------------------


async def test_without_a_verifier_a_request_ends_in_bounded_time(store: MemoryStore) -> None:
    async with scheduling(store) as served, gateway(served.address, search_s=0.5) as front:
        begin = time.monotonic()
        with pytest.raises(Unavailable, match="no verifier is there"):
            await front.say(request("a", PROMPT, greedy(20)))
        assert time.monotonic() - begin >= 0.5
        with pytest.raises(DeadlineExceeded):
            await front.say(request("b", PROMPT, greedy(20), deadline=time.monotonic() + 0.2))
    async with gateway(served.address, search_s=0.5) as front:  # nor a scheduler
        with pytest.raises(Unavailable, match="no verifier is there"):
            await front.say(request("a", PROMPT, greedy(20)))


async def test_the_first_verifier_to_come_is_waited_for(store: MemoryStore) -> None:
    async with scheduling(store) as served, gateway(served.address) as front:
        asked = request("a", PROMPT, greedy(20))
        waiting = asyncio.create_task(front.say(asked))
        await until(lambda: bool(front.membership.epoch))
        async with verifying(roomy(), served.address):
            assert await waiting == text(asked, 20)


async def test_a_gateway_that_stops_ends_its_runs_and_gives_back_its_leases(
    store: MemoryStore,
) -> None:
    async with (
        scheduling(store, lease_ttl_s=500.0) as served,
        verifying(roomy(), served.address) as v1,
    ):
        async with gateway(served.address) as front:
            await all_known(front, served, 1)
            events = front.target.run(request("a", PROMPT, greedy(LONG)))
            first = await begun(events)
        with pytest.raises(Unavailable, match="stopping"):
            await rest_of(events, [first])
        await nothing_left(store, front, v1)


# --- what the scheduler says, word for word -------------------------------------------------------


class Scripted:
    """A scheduler that answers as it is told, and verifiers that do. Each is "v1", or "v1:int8"
    with the backend that it has."""

    def __init__(self, *verifiers: str) -> None:
        self.lists: asyncio.Queue[tuple[Member, ...]] = asyncio.Queue()
        self.lists.put_nowait(tuple(map(scripted_member, verifiers)))
        self.says: Callable[[LeaseRequest], Lease] = granted
        self.asked: list[LeaseRequest] = []
        self.released: list[str] = []
        self.runs: list[tuple[str, Request]] = []
        self.script: Callable[[str, Request], list[Event]] = lambda name, asked: [finished(asked)]

    async def watch(self, pools: Collection[Pool] = ()) -> AsyncGenerator[tuple[Member, ...], None]:
        while True:
            yield await self.lists.get()

    async def acquire(self, asked: LeaseRequest, timeout_s: float, traceparent: str) -> Lease:
        self.asked.append(asked)
        return self.says(asked)

    async def release(self, ids: Collection[str]) -> None:
        self.released += ids

    def connect(self, replica: Replica) -> Verifier:
        return Verifier(self, replica.replica_id)


def scripted_member(name: str) -> Member:
    name, _, backend = name.partition(":")
    card = VerifierCard("toy", "toy", "t", backend or "toy", Limits(V, 4096, 4096), 16, 8, 8)
    return Member(Pool.VERIFIER, Replica(name, name, 1), card)


class Verifier:
    def __init__(self, of: Scripted, name: str) -> None:
        self._of, self._name = of, name

    async def __aenter__(self) -> Verifier:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, asked: Request) -> AsyncGenerator[Event, None]:
        self._of.runs.append((self._name, asked))
        for event in self._of.script(self._name, asked):
            yield event


def granted(asked: LeaseRequest) -> Lease:
    """The first that has not just failed."""
    names = [n for n in ("v1", "v2", "v3") if n not in asked.exclude]
    if not names:
        raise Unavailable("every verifier has just failed the request")
    name = names[0]
    lease = lease_id(asked.request_id, asked.attempt)
    return Lease(lease, asked.request_id, asked.tenant, Replica(name, name, 1), 10, 500)


def finished(asked: Request, error: DsparkError | None = None) -> Finished:
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    usage = Usage(len(asked.prompt_ids), len(asked.committed_ids))
    return Finished(reason, usage, SpeculationFigures(1, 1, 1, 1), error)


def commit(index: int, *ids: int) -> Committed:
    return Committed(index, ids, (), SpeculationFigures(1, 4, 3, 2))


async def scripted(
    stack: AsyncExitStack, *verifiers: str, **config: Any
) -> tuple[Scripted, Dispatch]:
    of = Scripted(*verifiers)
    target = Dispatch(of, "g1", of.connect, **config)  # type: ignore[arg-type]
    await stack.enter_async_context(target)
    await until(lambda: len(target.members) == len(verifiers))
    return of, target


def refusing(error: DsparkError) -> Callable[[LeaseRequest], Lease]:
    def says(asked: LeaseRequest) -> Lease:
        raise error

    return says


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full", 2.0),
        DeadlineExceeded("too late"),
        InvalidRequest("prompt", 9, "is too long"),
        NotFound("no such model"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_its_word_on_a_request_is_told_as_it_is(error: DsparkError) -> None:
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1")
        of.says = refusing(error)
        with pytest.raises(type(error)) as told:
            await ids_of(target, request("a", PROMPT, greedy(5)))
        assert told.value is error
        assert not of.runs


@pytest.mark.parametrize("left_s", [1000.0, -1000.0])
@pytest.mark.parametrize("error", [Overloaded("full", 2.0), DeadlineExceeded("too late")])
async def test_a_stream_that_was_accepted_goes_on_while_time_is_left(
    error: DsparkError, left_s: float
) -> None:
    """Its verifier is lost, and the scheduler would not take it as a new request."""
    late = isinstance(error, DeadlineExceeded) and left_s < 0
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1", "v2")

        def script(name: str, asked: Request) -> list[Event]:
            of.says = refusing(error)
            lost = None if asked.committed_ids else Unavailable("lost")
            return [commit(len(asked.committed_ids), 5, 6), finished(asked, lost)]

        of.script = script
        asked = request("a", PROMPT, greedy(9), deadline=time.monotonic() + left_s)
        if late:
            with pytest.raises(DeadlineExceeded):
                await ids_of(target, asked)
        else:
            assert await ids_of(target, asked) == [5, 6, 5, 6]
        assert target.local == (0 if late else 1)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("its store is away"),
        Fenced("g1 has registered again"),  # as it does when the store was emptied
        Cancelled("it was stopped"),
        ModelError("odd"),
        DsparkError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_any_other_trouble_of_it_is_no_requests_trouble(error: DsparkError) -> None:
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1")
        of.says = refusing(error)
        assert await ids_of(target, request("a", PROMPT, greedy(5))) == []
        assert [name for name, _ in of.runs] == ["v1"]
        assert target.local == 1
        # What it may have given all the same, to nobody, is given back.
        await until(lambda: of.released == [lease_id("a/0", 0)])


async def test_a_store_that_was_emptied_does_not_make_the_gateway_forget() -> None:
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1")
        of.says = refusing(Unavailable("no verifier is registered"))
        of.lists.put_nowait(())
        await until(of.lists.empty)
        assert await ids_of(target, request("a", PROMPT, greedy(5))) == []
        assert target.local == 1


# --- what is asked for, and what goes on ----------------------------------------------------------


async def test_each_attempt_asks_for_what_is_left_and_names_who_failed() -> None:
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1", "v2")

        def script(name: str, asked: Request) -> list[Event]:
            if not asked.committed_ids:
                return [commit(0, 5, 6), finished(asked, Unavailable("lost"))]
            return [commit(2, 7), finished(asked)]

        of.script = script
        asked = request("a", PROMPT, greedy(9), attempt=3, tenant="t")
        events = [event async for event in target.run(asked)]
        last = events.pop()
        assert isinstance(last, Finished)
        assert last.speculation == SpeculationFigures(2, 5, 4, 3)  # of both attempts
        assert [e.ids for e in events if isinstance(e, Committed)] == [(5, 6), (7,)]
        first, second = of.asked
        assert (first.attempt, first.prompt_tokens, first.max_tokens) == (
            3 * REPLAYS_PER_ATTEMPT,
            3,
            9,
        )
        assert (second.attempt, second.prompt_tokens, second.max_tokens) == (
            first.attempt + 1,
            5,
            7,
        )
        assert (first.exclude, second.exclude) == ((), ("v1",))
        (_, one), (_, two) = of.runs
        assert (one.lease, one.epoch) == (lease_id("a/0", first.attempt), 1)
        assert two.committed_ids == (5, 6)
        await until(lambda: len(of.released) == 2)


async def test_only_the_target_that_an_answer_began_on_goes_on_with_it() -> None:
    """In what it computes too: v2 has the same weights and rounds them otherwise."""
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1:int8", "v2:float32", "v3:int8")
        of.script = lambda name, asked: (
            [commit(0, 5), finished(asked, Unavailable("lost"))]
            if name == "v1"
            else [commit(1, 6), finished(asked)]
        )
        assert await ids_of(target, request("a", PROMPT, greedy(9))) == [5, 6]
        assert [name for name, _ in of.runs] == ["v1", "v3"]
        of.says = refusing(Unavailable("its store is away"))  # and where we choose
        of.runs.clear()
        of.script = lambda name, asked: [
            commit(len(asked.committed_ids), 7),
            finished(asked, Unavailable("lost") if len(asked.committed_ids) < 9 else None),
        ]
        await ids_of(target, request("b", PROMPT, greedy(10)))
        assert {name for name, _ in of.runs} in ({"v1", "v3"}, {"v2"})


async def test_a_verifier_that_we_have_not_heard_of_does_not_go_on_with_an_answer() -> None:
    """The scheduler may name one before it is in the list: nothing says what it serves."""
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1")
        of.script = lambda name, asked: (
            [commit(0, 5), finished(asked, Unavailable("lost"))]
            if name == "v1"
            else [commit(1, 6), finished(asked)]
        )
        events = target.run(request("a", PROMPT, greedy(9)))
        first = await begun(events)
        of.lists.put_nowait((scripted_member("v9:other"),))
        await until(of.lists.empty)
        rest = asyncio.create_task(rest_of(events, [first]))
        await until(lambda: len(of.asked) > 2)
        assert [name for name, _ in of.runs] == ["v1"]
        await until(lambda: len(of.released) > 1)  # nobody keeps a lease on it
        of.lists.put_nowait((scripted_member("v2"),))
        assert (await rest).ids == [5, 6]
        assert [name for name, _ in of.runs] == ["v1", "v2"]


async def test_an_answer_ends_where_only_other_weights_are_left(store: MemoryStore) -> None:
    """As after `dspark up -f` with new weights under the same name: what was said stays, and
    nothing of another target follows it. No status that a client would come again for."""
    asked = request("a", PROMPT, greedy(LONG))
    whole = text(asked, LONG)
    other = ToyBackend(history_rule(V, seed=1), V)
    other.target_id = "other"
    async with Door("") as door, scheduling(store) as served, AsyncExitStack() as stack:
        v1 = await stack.enter_async_context(
            verifying(roomy(), served.address, name="v1", reached_at=door.address)
        )
        assert v1.server is not None
        door.to = v1.server.address
        front = await stack.enter_async_context(gateway(served.address, search_s=0.5))
        await all_known(front, served, 1)
        events = front.target.run(asked)
        told = [await begun(events)]
        await stack.enter_async_context(verifying(roomy(other), served.address, name="v2"))
        await all_known(front, served, 2)
        cut(door)
        with pytest.raises(ModelError, match="who serves the target that the answer began on"):
            await ids_into(told, events)
        said = [id for commit in told for id in commit.ids]
        assert said == whole[: len(said)] != whole


async def test_a_token_out_of_its_place_never_reaches_the_reader() -> None:
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1", "v2")
        of.script = lambda name, asked: (
            [commit(0, 5), commit(2, 7), finished(asked)]
            if name == "v1"
            else [commit(1, 6), commit(2, 7), finished(asked)]
        )
        assert await ids_of(target, request("a", PROMPT, greedy(9))) == [5, 6, 7]


async def test_a_replay_that_a_full_verifier_refuses_goes_on_at_another() -> None:
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1", "v2", "v3")

        def script(name: str, asked: Request) -> list[Event]:
            if name == "v1":
                return [commit(0, 5), finished(asked, Unavailable("lost"))]
            if name == "v2":
                return [finished(asked, Overloaded("4 runs wait", 1.0))]
            return [commit(1, 6), finished(asked)]

        of.script = script
        assert await ids_of(target, request("a", PROMPT, greedy(9))) == [5, 6]
        assert [name for name, _ in of.runs] == ["v1", "v2", "v3"]
        assert target.replays == 1


async def test_a_replay_that_all_refuse_ends_in_bounded_time() -> None:
    """With what a client comes again for; one that did not begin is told at once."""
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1", "v2", search_s=0.5)
        full = Overloaded("4 runs wait", 1.0)
        of.script = lambda name, asked: (
            [finished(asked, full)]
            if len(of.runs) > 1
            else [commit(0, 5), finished(asked, Unavailable("lost"))]
        )
        with pytest.raises(Unavailable, match="no verifier is there"):
            await ids_of(target, request("a", PROMPT, greedy(9)))
        assert len(of.runs) > MOST_LOSSES
        with pytest.raises(Overloaded, match="4 runs wait"):
            await ids_of(target, request("b", PROMPT, greedy(9)))


async def test_what_kills_every_verifier_is_given_up() -> None:
    """A request that is the death of each, and one that is only unlucky: it gets on each time."""
    async with AsyncExitStack() as stack:
        of, target = await scripted(stack, "v1", "v2")
        of.script = lambda name, asked: [finished(asked, Unavailable("the step failed"))]
        with pytest.raises(Unavailable, match=f"{MOST_LOSSES} verifiers were lost.*step failed"):
            await ids_of(target, request("a", PROMPT, greedy(99)))
        assert len(of.runs) == MOST_LOSSES

        def unlucky(name: str, asked: Request) -> list[Event]:
            at = len(asked.committed_ids)
            lost = Unavailable("lost") if at < 3 * MOST_LOSSES else None
            return [commit(at, at), finished(asked, lost)]

        of.script = unlucky
        ids = await ids_of(target, request("b", PROMPT, greedy(99)))
        assert ids == [*range(3 * MOST_LOSSES + 1)]
