"""An engine in its own thread, talked to from a real event loop (design.md §4, L7)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from dspark.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from dspark.core.requests import Committed, Finished, FinishReason, Request
from dspark.verifier.engine import Engine
from dspark.verifier.runner import FAILED_STEPS, EngineRunner

from .toy import (
    Answer,
    HandClock,
    ScriptedDrafter,
    ToyBackend,
    choices,
    greedy,
    history_rule,
    oracle,
    request,
    target_only,
    toy_engine,
)

V = 48
RULE = history_rule(V, seed=13, loop=9)
PROMPT = tuple(range(10))
# Seconds of work: only a request that is ended from outside asks for so many tokens.
FOR_EVER = 20_000
ROOM = 32_768


def engine(backend: ToyBackend | None = None, **config: Any) -> Engine:
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=4))
    backend = backend or ToyBackend(RULE, V, context_length=ROOM)
    return toy_engine(backend, drafter, kv_tokens=ROOM, **config)


async def answer(runner: EngineRunner, asked: Request) -> Answer:
    told = Answer()
    async for event in runner.run(asked):
        told.take(event)
    return told


def whole(told: Answer) -> bool:
    return told.reason is FinishReason.LENGTH and told.ids == target_only(
        RULE, PROMPT, len(told.ids)
    )


async def begun(events: AsyncIterator[Any]) -> Committed:
    """Wait until a request's first tokens are out."""
    event = await anext(events)
    assert isinstance(event, Committed)
    return event


async def test_a_request_is_streamed_to_its_end() -> None:
    async with EngineRunner(engine()) as runner:
        events = [event async for event in runner.run(request("a", PROMPT, greedy(20)))]
    assert all(isinstance(event, Committed) for event in events[:-1])
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.LENGTH
    ids = [token for event in events[:-1] for token in event.ids]
    assert ids == target_only(RULE, PROMPT, 20)


async def test_many_at_once_and_choices_of_one() -> None:
    async with EngineRunner(engine(max_sequences=4)) as runner:
        asked = [request(str(i), PROMPT, greedy(5 + i)) for i in range(9)]
        told = await asyncio.gather(*(answer(runner, a) for a in asked))
        assert all(map(whole, told))
        assert [len(a.ids) for a in told] == [5 + i for i in range(9)]
        one = request("n", PROMPT, replace(greedy(12), temperature=2.0, seed=4, n=4))
        four = await asyncio.gather(*(answer(runner, a) for a in choices(one, 4)))
        assert len({tuple(a.ids) for a in four}) == 4
        runner.engine.check_integrity()
        assert runner.engine.idle


async def test_a_reader_that_hangs_up_frees_what_the_request_held() -> None:
    running = engine()
    async with EngineRunner(running) as runner:
        events = runner.run(request("a", PROMPT, greedy(FOR_EVER)))
        await begun(events)
        await events.aclose()
        # Commands are done in order, so by now the cancel was.
        assert whole(await answer(runner, request("b", PROMPT, greedy(8))))
        assert running.idle
        assert running.cache.pool.owned == 0
        running.check_integrity()
    assert running.figures.committed_tokens < FOR_EVER


async def test_a_task_that_is_cancelled_is_a_reader_that_hangs_up() -> None:
    running = engine()
    async with EngineRunner(running) as runner:
        seen = asyncio.Event()

        async def read() -> None:
            async for _ in runner.run(request("a", PROMPT, greedy(FOR_EVER))):
                seen.set()

        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert whole(await answer(runner, request("b", PROMPT, greedy(8))))
        assert running.cache.pool.owned == 0


async def test_a_refusal_is_raised_to_its_caller() -> None:
    # "a" may run ahead of its reader: paused, it would make room for the others.
    running = engine(max_waiting=1, max_sequences=1, buffered_events=FOR_EVER)
    async with EngineRunner(running) as runner:
        with pytest.raises(InvalidRequest, match="max_tokens: 0"):
            await answer(runner, request("bad", PROMPT, greedy(0)))
        events = runner.run(request("a", PROMPT, greedy(FOR_EVER)))
        await begun(events)
        with pytest.raises(InvalidRequest, match="attempt: 0 is not newer"):
            await answer(runner, request("a", PROMPT, greedy(5)))
        waiting = asyncio.create_task(answer(runner, request("b", PROMPT, greedy(5))))
        await asyncio.sleep(0)  # let it be submitted; commands are done in order
        with pytest.raises(Overloaded):
            await answer(runner, request("c", PROMPT, greedy(5)))
        await events.aclose()
        assert whole(await waiting)


async def test_what_is_no_request_at_all_costs_its_caller_only() -> None:
    async with EngineRunner(engine()) as runner:
        events = runner.run(request("a", PROMPT, greedy(200)))
        await begun(events)
        with pytest.raises(TypeError):
            await answer(runner, Request("b", ("x", "y")))  # type: ignore[arg-type]
        rest = [event async for event in events]
        assert rest[-1].reason is FinishReason.LENGTH


async def test_a_newer_attempt_takes_over_and_both_readers_are_told() -> None:
    async with EngineRunner(engine()) as runner:
        old = runner.run(request("a", PROMPT, greedy(FOR_EVER)))
        first = await begun(old)
        new = request("a", PROMPT, greedy(30), attempt=1, committed_ids=first.ids)
        told = await answer(runner, new)
        assert [*first.ids, *told.ids] == target_only(RULE, PROMPT, 30)
        rest = [event async for event in old]
        assert isinstance(rest[-1], Finished)
        assert isinstance(rest[-1].error, Cancelled)


async def test_a_replay_that_was_whole_already_ends() -> None:
    ids = tuple(target_only(RULE, PROMPT, 6))
    async with EngineRunner(engine()) as runner:
        old = runner.run(request("a", PROMPT, greedy(FOR_EVER)))
        await begun(old)
        told = await answer(runner, request("a", PROMPT, greedy(6), attempt=1, committed_ids=ids))
        assert told.ids == []
        assert told.reason is FinishReason.LENGTH
        assert isinstance([event async for event in old][-1].error, Cancelled)


async def test_stopping_ends_what_runs_with_unavailable() -> None:
    running = engine(max_sequences=1, buffered_events=FOR_EVER)
    async with EngineRunner(running) as runner:
        events = runner.run(request("a", PROMPT, greedy(FOR_EVER)))
        await begun(events)
        waiting = asyncio.create_task(answer(runner, request("b", PROMPT, greedy(5))))
        await asyncio.sleep(0)
    rest = [event async for event in events]
    assert isinstance(rest[-1], Finished)
    assert isinstance(rest[-1].error, Unavailable)
    finished = (await waiting).finished
    assert finished is not None
    assert isinstance(finished.error, Unavailable)
    assert running.idle
    assert running.cache.pool.owned == 0


async def test_time_passes_while_all_stand_still_and_somebody_keeps_asking() -> None:
    """A scheduler asks many times a second; deadlines and signs of life may not wait for it to
    pause."""
    clock = HandClock()
    async with EngineRunner(engine(clock=clock, heartbeat_s=0.02)) as runner:
        line = runner.line()
        line.start(request("held", PROMPT, greedy(FOR_EVER), deadline=5.0))
        line.finish()
        assert await line.next() is not None
        line.hold(("held", 0, 0), True)
        asking = asyncio.create_task(_asking(runner))
        while (batch := await line.next()) is not None and batch.events:
            pass
        assert batch is not None  # a sign of life, all events before it being read
        clock.now = 5.0
        told = [event async for event in _events(line)]
        assert isinstance(told[-1], Finished)
        assert isinstance(told[-1].error, DeadlineExceeded)
        asking.cancel()


async def _asking(runner: EngineRunner) -> None:
    while True:
        await runner.between_steps(lambda engine: engine.active)


async def _events(line: Any) -> AsyncIterator[Any]:
    while (batch := await line.next()) is not None:
        for _, event in batch.events:
            yield event


async def test_a_request_after_the_stop_is_refused() -> None:
    async with EngineRunner(engine()) as runner:
        pass
    with pytest.raises(Unavailable):
        await answer(runner, request("a", PROMPT, greedy(5)))


async def test_commands_that_keep_coming_keep_no_step_from_being_done() -> None:
    async with EngineRunner(engine()) as runner:
        flooding = True

        def again() -> None:
            if flooding:
                runner._commands.put(again)  # as a caller does who is quicker than the thread

        again()
        try:
            async with asyncio.timeout(20):
                assert whole(await answer(runner, request("a", PROMPT, greedy(8))))
        finally:
            flooding = False


class BlockedBackend(ToyBackend):
    """Its forwards wait for a gate."""

    def __init__(self) -> None:
        super().__init__(RULE, V, context_length=ROOM)
        self.gate, self.entered = threading.Event(), threading.Event()

    def forward(self, batch: Any) -> Any:
        self.entered.set()
        assert self.gate.wait(60), "nobody opened the gate"
        return super().forward(batch)

    async def stuck(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 20)


async def test_an_engine_that_is_stuck_is_left_behind_and_everybody_is_told() -> None:
    """Leaving takes stop_s, whatever the step does."""
    backend = BlockedBackend()
    try:
        begin = time.monotonic()
        async with EngineRunner(engine(backend), stop_s=0.2) as runner:
            runs = [
                request("in the step", PROMPT, greedy(5)),
                request("not yet", PROMPT, greedy(5)),
            ]
            running = [asyncio.create_task(answer(runner, runs[0]))]
            await backend.stuck()
            running.append(asyncio.create_task(answer(runner, runs[1])))
            asking = asyncio.create_task(runner.between_steps(lambda e: e.active))
            await asyncio.sleep(0)
        assert time.monotonic() - begin < 10
        for told in await asyncio.gather(*running, asking, return_exceptions=True):
            assert isinstance(told, Unavailable)
        with pytest.raises(Unavailable):
            await runner.between_steps(lambda e: e.active)
    finally:
        backend.gate.set()


class StumblingBackend(ToyBackend):
    """Raises in some of its forwards."""

    def __init__(self, *stumbles: int) -> None:
        super().__init__(RULE, V, context_length=ROOM)
        self._stumbles = stumbles

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        if self.forwards in self._stumbles:
            raise RuntimeError("out of memory")
        return output


class BrokenBackend(BlockedBackend):
    """All its forwards raise while it is broken."""

    broken = True

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        if self.broken:
            raise RuntimeError("no kernel image")
        return output


async def test_an_engine_whose_steps_all_fail_gives_up_and_owes_nobody_anything() -> None:
    """Or it would be the emptiest verifier, and get every request."""
    backend = BrokenBackend()
    async with EngineRunner(engine(backend)) as runner:
        for i in range(FAILED_STEPS - 1):
            assert runner.alive
            backend.gate.set()
            told = await answer(runner, request(str(i), PROMPT, greedy(5)))
            assert told.finished is not None
            assert "no kernel image" in str(told.finished.error)
        backend.gate.clear()
        backend.entered.clear()
        last = asyncio.create_task(answer(runner, request("last", PROMPT, greedy(5))))
        await backend.stuck()
        late = asyncio.create_task(answer(runner, request("late", PROMPT, greedy(5))))
        asking = asyncio.create_task(runner.between_steps(lambda e: e.active))
        await asyncio.sleep(0)
        backend.gate.set()
        finished = (await last).finished
        assert finished is not None
        assert "no kernel image" in str(finished.error)
        for told in await asyncio.gather(late, asking, return_exceptions=True):
            assert isinstance(told, Unavailable)
        assert not runner.alive
        with pytest.raises(Unavailable):
            await answer(runner, request("too late", PROMPT, greedy(5)))


async def test_an_engine_that_works_now_and_then_goes_on() -> None:
    backend = BrokenBackend()
    backend.gate.set()
    async with EngineRunner(engine(backend)) as runner:
        for i in range(3 * FAILED_STEPS):
            backend.broken = bool(i % FAILED_STEPS)
            told = await answer(runner, request(str(i), PROMPT, greedy(5)))
            assert (told.reason is FinishReason.ERROR) == backend.broken
        assert runner.alive


async def test_a_step_that_takes_too_long_is_a_dead_engine() -> None:
    backend = BlockedBackend()
    async with EngineRunner(engine(backend), stuck_s=0.2) as runner:
        assert runner.alive
        running = asyncio.create_task(answer(runner, request("a", PROMPT, greedy(5))))
        await backend.stuck()
        async with asyncio.timeout(20):
            while runner.alive:
                await asyncio.sleep(0.01)
        backend.gate.set()
        assert whole(await running)
        assert runner.alive, "it was not dead after all"


async def test_a_step_that_raises_ends_its_requests_and_serving_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = engine(StumblingBackend(5))
    async with EngineRunner(running) as runner:
        asked = [request(str(i), PROMPT, greedy(FOR_EVER)) for i in range(3)]
        told = await asyncio.gather(*(answer(runner, a) for a in asked))
        for one in told:
            assert one.finished is not None
            assert isinstance(one.finished.error, Unavailable)
            assert "out of memory" in str(one.finished.error)
        assert whole(await answer(runner, request("next", PROMPT, greedy(9))))
        running.check_integrity()
    assert "a step failed" in caplog.text
