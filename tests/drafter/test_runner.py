"""A drafter's thread: verifiers share its passes, none waits for nobody, and nothing ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from dspark.core.drafts import Draft, DraftRequest, NeedContext
from dspark.core.replicas import DrafterLoad
from dspark.core.traces import Drafted
from dspark.drafter import BatchingConfig, DraftRunner
from dspark.drafter.batching import Context, Line, Reply
from dspark.drafter.runner import STUCK_S

from ..verifier.toy import HandClock
from .wire import PATIENT_S, ToyDrafter, asking, eventually


@dataclass(eq=False)
class Verifier:
    """One line of a runner, and what came down it."""

    runner: DraftRunner
    told: list[Reply] = field(default_factory=list)
    beats: int = 0

    def __post_init__(self) -> None:
        self.line: Line = self.runner.open(self._put)

    def _put(self, replies: Sequence[Reply]) -> None:
        self.told += replies
        self.beats += not replies

    def ask(self, *requests: DraftRequest) -> None:
        self.runner.submit(self.line, (), requests)

    async def answers(self, count: int) -> list[Reply]:
        await eventually(lambda: len(self.told) >= count)
        return self.told


@asynccontextmanager
async def running(
    drafter: ToyDrafter, clock: HandClock | None = None, **config: float
) -> AsyncIterator[DraftRunner]:
    async with DraftRunner(drafter, BatchingConfig(**config), clock=clock or HandClock()) as runner:
        try:
            yield runner
        finally:
            drafter.gate.set()


async def test_verifiers_share_a_pass() -> None:
    """What comes while a pass runs is in the next one, whoever it is from."""
    toy = ToyDrafter()
    async with running(toy) as runner:
        a, b = Verifier(runner), Verifier(runner)
        toy.gate.clear()
        a.ask(asking("x"))
        await toy.passing()
        a.ask(asking("y"), asking("z"))
        b.ask(asking("x"))
        toy.gate.set()
        assert [reply.session for reply in await a.answers(3)] == ["x", "y", "z"]
        assert [reply.session for reply in await b.answers(1)] == ["x"]
    assert [len(sessions) for sessions in toy.passes] == [1, 3]
    assert len({session for sessions in toy.passes for session in sessions}) == 4


async def test_a_pass_waits_for_a_verifier_that_asks_too() -> None:
    """The clock stands, so the window never ends: only the other's request can end the wait."""
    toy = ToyDrafter()
    async with running(toy, window_s=0.5) as runner:
        a, b = Verifier(runner), Verifier(runner)
        a.ask(asking("x"))
        await a.answers(1)  # nobody has asked yet but this one: no wait
        b.ask(asking("x"))
        await asyncio.sleep(0.05)  # a chance for a pass that does not wait
        assert len(toy.passes) == 1
        a.ask(asking("x", 1))
        await a.answers(2)
        await b.answers(1)
    assert [len(sessions) for sessions in toy.passes] == [1, 2]


async def test_a_pass_waits_no_longer_than_its_window() -> None:
    clock, toy = HandClock(), ToyDrafter()
    async with running(toy, clock, window_s=0.01) as runner:
        a, b = Verifier(runner), Verifier(runner)
        a.ask(asking("x"))
        await a.answers(1)
        b.ask(asking("x"))
        clock.now += 0.02
        await b.answers(1)
    assert len(toy.passes) == 2


async def test_a_lone_verifier_is_not_kept_waiting() -> None:
    """With a clock that stands a wait would be for ever."""
    async with running(ToyDrafter(), window_s=1.0) as runner:
        a = Verifier(runner)
        for n in range(3):
            a.ask(asking("x", n))
            await a.answers(n + 1)


async def test_verifiers_that_ask_nothing_keep_nobody_waiting() -> None:
    """One that never asked, and one that has not for a while."""
    clock = HandClock()
    async with running(ToyDrafter(), clock, window_s=1.0) as runner:
        a, idle = Verifier(runner), Verifier(runner)
        Verifier(runner)
        idle.ask(asking("x"))
        await idle.answers(1)
        clock.now += 2.0
        a.ask(asking("x"))
        await a.answers(1)


async def test_a_full_pass_waits_for_nobody() -> None:
    toy = ToyDrafter()
    async with running(toy, window_s=1.0, max_batch=2) as runner:
        a, b = Verifier(runner), Verifier(runner)
        b.ask(asking("x"))
        await b.answers(1)
        a.ask(asking("x"), asking("y"))
        await a.answers(2)


async def test_a_flood_of_one_verifier_leaves_room_for_another() -> None:
    toy = ToyDrafter()
    async with running(toy, window_s=0, max_batch=4, max_queue=100) as runner:
        flood, other = Verifier(runner), Verifier(runner)
        toy.gate.clear()
        flood.ask(asking("first"))
        await toy.passing()
        flood.ask(*[asking(str(i)) for i in range(100)])
        other.ask(asking("x"))
        toy.gate.set()
        await other.answers(1)
        await flood.answers(101)
    assert sum(other.line.key("x") in sessions for sessions in toy.passes[:2]) == 1


async def test_verifiers_come_first_in_turn() -> None:
    """Where a pass has no room for one of each."""
    toy = ToyDrafter()
    async with running(toy, window_s=0, max_batch=1) as runner:
        a, b = Verifier(runner), Verifier(runner)
        toy.gate.clear()
        a.ask(asking("first"))
        await toy.passing()
        a.ask(*[asking(session) for session in "xyz"])
        b.ask(*[asking(session) for session in "xyz"])
        toy.gate.set()
        await a.answers(4)
        await b.answers(3)
    served = [session[0] for (session,) in toy.passes[1:]]
    assert served in (["1", "2"] * 3, ["2", "1"] * 3)


async def test_beyond_the_queue_a_round_gets_an_empty_draft_at_once() -> None:
    toy = ToyDrafter()
    async with running(toy, max_queue=2) as runner:
        a, b = Verifier(runner), Verifier(runner)
        toy.gate.clear()
        a.ask(asking("first"))
        await toy.passing()
        a.ask(asking("x"), asking("y"), asking("z", 7))
        (empty,) = a.told  # while the pass still runs
        assert isinstance(empty, Draft)
        assert (empty.session, empty.round, empty.ids) == ("z", 7, ())
        assert runner.figures.refused == {"queue full": 1}
        b.ask(asking("x"))
        assert b.told == [], "another verifier's queue is its own"
        toy.gate.set()
        await a.answers(4)
        await b.answers(1)


async def test_a_request_that_breaks_the_drafter_costs_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its mates of the same pass are drafted, the thread goes on, and one line is logged."""
    toy = ToyDrafter()
    toy.fail = lambda request: request.tokens == (66,)
    async with running(toy) as runner:
        a, b = Verifier(runner), Verifier(runner)
        for n in range(3):
            toy.gate.clear()
            a.ask(asking("first", n))
            await toy.passing()
            a.ask(asking("bad", n, (66,)))
            b.ask(asking("good", n))
            toy.gate.set()
            while toy.entered.acquire(blocking=False):
                pass
            await a.answers(2 * n + 2)
            await b.answers(n + 1)
        bad = [reply for reply in a.told if reply.session == "bad"]
        assert all(isinstance(reply, Draft) and reply.ids == () for reply in bad)
        assert all(isinstance(reply, Draft) and len(reply.ids) == 4 for reply in b.told)
        assert runner.figures.refused == {"drafter failed: RuntimeError": 3}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("said", [[], [None], ["nonsense"]])
async def test_what_is_no_reply_is_no_draft(said: list[object]) -> None:
    toy = ToyDrafter()
    toy.propose = lambda requests: said  # type: ignore[method-assign,assignment,return-value]
    async with running(toy) as runner:
        a = Verifier(runner)
        a.ask(asking("x", 3))
        (empty,) = await a.answers(1)
        assert isinstance(empty, Draft)
        assert (empty.round, empty.ids) == (3, ())


async def test_a_newer_round_is_the_only_one_answered() -> None:
    toy = ToyDrafter()
    async with running(toy) as runner:
        a = Verifier(runner)
        toy.gate.clear()
        a.ask(asking("x", 1))
        await toy.passing()
        a.ask(asking("x", 2))
        a.ask(asking("x", 3))
        toy.gate.set()
        (reply,) = await a.answers(1)
        await eventually(lambda: runner.figures.requests == 2)
    assert isinstance(reply, Draft)
    assert reply.round == 3
    assert a.told == [reply]
    assert [request.round for request in toy.requests] == [1, 3]


async def test_sessions_go_when_they_are_closed_and_with_their_verifier() -> None:
    toy = ToyDrafter()
    async with running(toy) as runner:
        a, b = Verifier(runner), Verifier(runner)
        a.ask(asking("x"), asking("y"))
        b.ask(asking("x"))
        await a.answers(2)
        await b.answers(1)
        runner.submit(a.line, (), (), ("x", "nobody"))
        await eventually(lambda: len(toy.held) == 2)
        assert runner.sessions == 2
        runner.close(a.line)
        runner.close(a.line)
        runner.submit(a.line, (), [asking("x")])
        await eventually(lambda: set(toy.held) == {b.line.key("x")})
        assert (runner.sessions, runner.lines, runner.queue) == (1, 1, 0)


async def test_a_verifier_that_goes_during_its_pass_leaves_no_session() -> None:
    toy = ToyDrafter()
    async with running(toy) as runner:
        a = Verifier(runner)
        toy.gate.clear()
        a.ask(asking("x"))
        await toy.passing()
        a.ask(asking("y"))
        runner.close(a.line)
        toy.gate.set()
        await eventually(lambda: runner.figures.requests == 1 and not toy.held)
        assert a.told == []


async def test_a_session_above_the_bound_is_forgotten_and_asks_again() -> None:
    toy = ToyDrafter()
    async with running(toy, max_sessions=2) as runner:
        a = Verifier(runner)
        for n, session in enumerate("abc"):
            a.ask(asking(session))
            await a.answers(n + 1)
        assert runner.sessions == 2
        a.ask(asking("a", 1, (3, 4), 2))
        assert (await a.answers(4))[3] == NeedContext("a", 0)


async def test_context_that_does_not_fit_is_told() -> None:
    async with running(ToyDrafter()) as runner:
        a = Verifier(runner)
        runner.submit(a.line, [Context("x", 0, (1, 2), None)])
        runner.submit(a.line, [Context("x", 5, (1, 2), None)])
        assert await a.answers(1) == [NeedContext("x", 2)]


async def test_who_waits_hears_that_the_drafter_lives_until_it_hangs() -> None:
    """A long pass is not a dead drafter; one that takes for ever is."""
    clock, toy = HandClock(), ToyDrafter()
    async with running(toy, clock) as runner:
        a, idle = Verifier(runner), Verifier(runner)
        toy.gate.clear()
        a.ask(asking("x"))
        await eventually(lambda: a.beats >= 2)
        clock.now += STUCK_S + 1
        seen = a.beats
        await asyncio.sleep(0.3)  # three beats that do not come
        assert a.beats <= seen + 1
        toy.gate.set()
        await a.answers(1)
        assert idle.beats == 0


async def test_load_is_measured() -> None:
    clock, toy = HandClock(), ToyDrafter()
    async with running(toy, clock) as runner:
        a = Verifier(runner)
        assert runner.load() == DrafterLoad()
        toy.gate.clear()
        a.ask(asking("x"))
        await toy.passing()
        a.ask(asking("y"), asking("z"))
        clock.now = 2.0  # this pass takes two seconds for 4 tokens, the next one none for 8
        assert runner.load() == DrafterLoad(sessions=3, queue=2)
        toy.gate.set()
        await a.answers(3)
        clock.now = 8.0
        assert runner.load() == DrafterLoad(
            sessions=3, queue=0, tokens_per_s=2.0, capacity_tokens_per_s=6.0
        )
        clock.now = 9.0
        assert runner.load() == DrafterLoad(sessions=3, capacity_tokens_per_s=6.0)


async def test_traced_requests_are_told_once_a_pass() -> None:
    seen: list[list[Drafted]] = []
    clock, toy = HandClock(), ToyDrafter()
    async with DraftRunner(toy, clock=clock, watch=seen.append) as runner:
        a = Verifier(runner)
        toy.gate.clear()
        a.ask(asking("first"))
        await toy.passing()
        clock.now = 1.0
        a.ask(asking("x", 2, traceparent="00-aa-bb-01"), asking("y"))
        clock.now = 3.0
        toy.gate.set()
        await a.answers(3)
    assert seen == [[Drafted("00-aa-bb-01", 2, 1.0, 3.0, 3.0, 2, 4)]]


async def test_leaving_ends_the_thread() -> None:
    async with asyncio.timeout(PATIENT_S):
        async with running(ToyDrafter()) as runner:
            a = Verifier(runner)
            a.ask(asking("x"))
            await a.answers(1)
            thread = runner._thread
        assert not thread.is_alive()


async def test_a_drafter_that_is_stuck_is_left_behind() -> None:
    toy = ToyDrafter()
    try:
        async with asyncio.timeout(PATIENT_S):
            async with DraftRunner(toy, stop_s=0.2) as runner:
                toy.gate.clear()
                Verifier(runner).ask(asking("x"))
                await toy.passing()
    finally:
        toy.gate.set()
