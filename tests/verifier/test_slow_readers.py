"""Readers that cannot keep up (design.md §5.8): first their buffer fills, then their sequence
pauses, then they get one clear status. Nobody else waits for them, and nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.errors import ConfigError, DeadlineExceeded, Overloaded, Unavailable
from dspark.core.requests import Committed, Finished, FinishReason
from dspark.core.sampling import SamplingParams
from dspark.verifier.runner import EngineRunner

from .served import answer, begun, error_of, rest_of
from .toy import (
    Answer,
    HandClock,
    Scene,
    ScriptedDrafter,
    ToyBackend,
    greedy,
    history_rule,
    nothing,
    oracle,
    request,
    target_only,
    toy_engine,
)

V = 48
RULE = history_rule(V, seed=21, loop=10)
FOR_EVER = 20_000


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 7 * i + i * i // 5) % V for i in range(length))


def scene(*drafters: Any, **config: Any) -> Scene:
    backend = ToyBackend(RULE, V, context_length=32_768)
    return Scene(toy_engine(backend, *(drafters or (nothing(),)), **config))


def ids(of: Scene, name: str) -> list[int]:
    return of.answers[name, 0].ids


# --- a sequence that is paused --------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [greedy(60), greedy(60, frequency_penalty=0.5), SamplingParams(seed=3, max_tokens=60)],
    ids=["greedy", "penalized", "seeded"],
)
def test_a_pause_changes_nothing_but_the_time(params: SamplingParams) -> None:
    (whole,) = scene(ScriptedDrafter(oracle(RULE, wrong_every=4))).ask(
        request("a", prompt(30), params)
    )
    of = scene(ScriptedDrafter(oracle(RULE, wrong_every=4)), prefill_chunk=16)
    of.submit(request("a", prompt(30), params), request("b", prompt(9, 3), greedy(100)))
    for _ in range(4):
        of.step(2)  # the first pause is amid the prefill
        before = len(ids(of, "a"))
        of.engine.pause("a", 0, True)
        of.step(3)
        assert len(ids(of, "a")) == before
        of.engine.pause("a", 0, False)
    of.drain()
    assert ids(of, "a") == whole.ids
    assert ids(of, "b") == target_only(RULE, prompt(9, 3), 100)


def test_a_draft_in_hand_stays_valid() -> None:
    drafter = ScriptedDrafter(oracle(RULE))
    of = scene(drafter)
    of.submit(request("a", prompt(9), greedy(60)))
    of.step(3)
    (sequence,) = of.engine.running
    draft, blocks, asked = sequence.draft, list(sequence.blocks), len(drafter.asked)
    assert draft is not None
    of.engine.pause("a", 0, True)
    of.step(5)
    assert (sequence.draft, sequence.blocks, len(drafter.asked)) == (draft, blocks, asked)
    of.engine.pause("a", 0, False)
    of.step()
    assert of.answers["a", 0].commits[-1].speculation.accepted == 7
    of.drain()
    assert not drafter.sessions


def test_who_is_paused_too_long_ends_with_one_clear_error() -> None:
    clock = HandClock(100.0)
    of = scene(clock=clock, stall_timeout_s=30.0, retry_after_s=4.0)
    of.submit(*(request(name, prompt(9), greedy(500)) for name in ("stuck", "back", "well")))
    of.step(2)
    for name in ("stuck", "back", "unknown"):
        of.engine.pause(name, 0, True)
    clock.now = 120.0
    of.engine.pause("stuck", 0, True)  # again: it counts from the first time
    of.engine.pause("back", 0, False)
    of.step()
    of.engine.pause("back", 0, True)
    clock.now = 129.999
    of.step()
    assert of.answers["stuck", 0].finished is None
    clock.now = 130.0
    of.step()
    error = error_of(of.answers["stuck", 0])
    assert isinstance(error, Overloaded)
    assert str(error) == "the reader took nothing for 30 s, and its buffer is full"
    assert error.retry_after_s == 4.0
    assert of.answers["back", 0].finished is None
    of.engine.pause("back", 0, False)
    of.drain()
    assert len(ids(of, "back")) == len(ids(of, "well")) == 500
    assert of.engine.cache.pool.owned == 0


def test_a_deadline_ends_a_paused_one_too() -> None:
    clock = HandClock()
    of = scene(clock=clock)
    of.submit(request("a", prompt(9), greedy(500), deadline=5.0))
    of.step(2)
    of.engine.pause("a", 0, True)
    assert of.engine.stalled
    clock.now = 5.0
    of.step()
    assert isinstance(error_of(of.answers["a", 0]), DeadlineExceeded)
    assert of.engine.idle


def test_a_paused_one_can_be_cancelled_and_superseded() -> None:
    of = scene()
    first = request("a", prompt(9), greedy(50))
    of.submit(first, request("b", prompt(8), greedy(50)))
    of.step(2)
    for name in "ab":
        of.engine.pause(name, 0, True)
    of.engine.cancel("b")
    of.engine.submit(replace(first, attempt=1, committed_ids=tuple(ids(of, "a"))))
    of.take(of.engine.take_events())
    had, of.answers["a", 0] = ids(of, "a"), Answer()
    of.drain()  # the new attempt is not paused
    assert had + ids(of, "a") == target_only(RULE, prompt(9), 50)


# --- who waits for whom ---------------------------------------------------------------------------


def test_a_paused_one_is_the_first_to_give_its_blocks_away() -> None:
    """It is the most important here, and the other one grows into the whole pool."""
    of = scene(kv_tokens=96)
    of.submit(request("paused", prompt(20, 1), greedy(40), priority=9))
    of.step(3)
    of.engine.pause("paused", 0, True)
    of.submit(request("grows", prompt(20, 2), greedy(70)))
    while of.answers["grows", 0].finished is None:
        of.step()
    assert of.engine.preemptions == 1
    assert ids(of, "grows") == target_only(RULE, prompt(20, 2), 70)
    of.step(3)
    assert len(ids(of, "paused")) < 40
    of.engine.pause("paused", 0, False)
    of.drain()
    assert ids(of, "paused") == target_only(RULE, prompt(20, 1), 40)


def test_paused_ones_give_way_to_who_has_not_begun() -> None:
    of = scene(kv_tokens=96, max_sequences=3)
    of.submit(*(request(f"p{i}", prompt(20, i), greedy(10)) for i in range(2)))
    of.step(2)
    for i in range(2):
        of.engine.pause(f"p{i}", 0, True)
    of.submit(request("large", prompt(80, 5), greedy(10)))
    while of.answers["large", 0].finished is None:
        of.step()
    for i in range(2):
        of.engine.pause(f"p{i}", 0, False)
    of.drain()
    assert ids(of, "large") == target_only(RULE, prompt(80, 5), 10)
    for i in range(2):
        assert ids(of, f"p{i}") == target_only(RULE, prompt(20, i), 10)


def test_readers_that_stand_still_keep_nobody_out() -> None:
    """More of them than a step holds and than the batcher looks past, running and waiting."""
    of = scene(max_sequences=4, max_step_tokens=4, kv_tokens=32_768)
    names = [f"p{i}" for i in range(40)]
    for name in names:
        of.submit(request(name, prompt(9), greedy(30)))
        of.step(2)
        of.engine.pause(name, 0, True)
    stuck = [f"w{i}" for i in range(40)]
    of.submit(*(request(name, prompt(9), greedy(30)) for name in stuck))
    for name in stuck:
        of.engine.pause(name, 0, True)
    of.submit(request("well", prompt(9), greedy(30)))
    while of.answers["well", 0].finished is None:
        of.step()
    assert of.engine.stalled
    for name in names + stuck:
        of.engine.pause(name, 0, False)
    while not of.engine.idle:
        before = of.engine.figures.steps
        told = of.step()
        assert of.engine.figures.steps == before + 1
        assert len([event for _, event in told if isinstance(event, Committed)]) <= 4
    text = target_only(RULE, prompt(9), 30)
    assert all(ids(of, name) == text for name in (*names, *stuck, "well"))


def test_a_paused_one_keeps_its_blocks_where_they_would_not_help() -> None:
    """20 blocks: 10 of one that runs, 4 of the paused one; 17 are asked for."""
    of = scene(kv_tokens=320)
    of.submit(request("runs", prompt(150), greedy(8)), request("paused", prompt(60, 7), greedy(8)))
    of.step(2)
    of.engine.pause("paused", 0, True)
    of.submit(request("large", prompt(270, 11), greedy(8)))
    of.step(2)
    assert {s.state.request.request_id for s in of.engine.running} == {"runs", "paused"}
    assert of.engine.preemptions == 0
    while of.answers["large", 0].finished is None:  # as soon as they do help, they are taken
        of.step()
    assert of.engine.preemptions == 1
    of.engine.pause("paused", 0, False)
    of.drain()
    assert ids(of, "paused") == target_only(RULE, prompt(60, 7), 8)


def test_who_was_paused_and_lost_its_blocks_is_not_charged_again() -> None:
    """Both tenants have had about as much, so both are served next."""
    of = scene(kv_tokens=320, max_sequences=1)
    of.submit(request("a", prompt(200), greedy(4), tenant="a"))
    of.step(2)
    of.engine.pause("a", 0, True)
    of.submit(request("b", prompt(200, 7), greedy(4), tenant="b"))
    while of.answers["b", 0].finished is None:
        of.step()
    assert of.engine.preemptions == 1
    of.engine.pause("a", 0, False)
    later = [f"{tenant}{i}" for i in range(10) for tenant in "ab"]
    of.submit(*(request(name, prompt(4, i), greedy(4), tenant=name[0]) for i, name in
                enumerate(later)))  # fmt: skip
    while sum(of.answers[name, 0].finished is not None for name in later) < 10:
        of.step()
    served = [name[0] for name in later if of.answers[name, 0].finished is not None]
    assert 4 <= served.count("a") <= 6


def test_a_prefix_that_a_paused_one_was_computing_is_not_waited_for() -> None:
    of = scene(prefill_chunk=32)
    of.submit(request("first", prompt(200), greedy(5)))
    of.step()
    of.engine.pause("first", 0, True)
    of.submit(request("second", (*prompt(200), 1), greedy(5)))
    while of.answers["second", 0].finished is None:
        of.step()
    assert ids(of, "second") == target_only(RULE, (*prompt(200), 1), 5)
    of.engine.pause("first", 0, False)
    of.drain()
    assert ids(of, "first") == target_only(RULE, prompt(200), 5)


def test_many_pauses_at_random_change_no_text() -> None:
    rng = np.random.default_rng(5)
    of = scene(
        ScriptedDrafter(oracle(RULE, wrong_every=4)), kv_tokens=320, max_sequences=5,
        max_step_tokens=40, prefill_chunk=24, verify="top-k",
    )  # fmt: skip
    wanted = {f"r{i}": (prompt(int(rng.integers(1, 60)), i % 5), 40) for i in range(40)}
    of.submit(*(request(n, p, greedy(tokens)) for n, (p, tokens) in wanted.items()))
    paused: set[str] = set()
    while not of.engine.idle:
        for name in rng.choice(list(wanted), 3).tolist():
            paused ^= {name}
            of.engine.pause(name, 0, name in paused)
        of.step()
    assert of.engine.preemptions > 10
    for name, (start, tokens) in wanted.items():
        assert ids(of, name) == target_only(RULE, start, tokens)


@pytest.mark.parametrize("name", ["stall_timeout_s", "buffered_events", "heartbeat_s"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        scene(**{name: 0})


# --- the buffer between engine and reader ---------------------------------------------------------


def runner_of(buffered_events: int = 8, **config: Any) -> EngineRunner:
    return EngineRunner(scene(kv_tokens=32_768, buffered_events=buffered_events, **config).engine)


async def ahead(runner: EngineRunner, steps: int, name: str = "other") -> None:
    """Run another request, for so many steps."""
    told = await answer(runner, request(name, prompt(5), greedy(steps)))
    assert told.reason is FinishReason.LENGTH


@pytest.mark.parametrize("size", [1, 2, 8])
async def test_a_buffer_holds_what_it_may_and_no_more(size: int) -> None:
    async with runner_of(size) as runner:
        events = runner.run(request("slow", prompt(9), greedy(100)))
        commits = [await begun(events)]
        await ahead(runner, 3 * size + 3)
        (slow,) = runner.engine.running
        assert slow.paused
        held = slow.state.outputs
        assert size <= held <= size + 1  # one more if the first was read before the buffer was full
        while slow.state.outputs == held:  # it goes on when half of them are read
            commits.append(await begun(events))
            await ahead(runner, 2, f"other {len(commits)}")
        assert len(commits) == held - size // 2
        told = await rest_of(events, commits)
        assert told.ids == target_only(RULE, prompt(9), 100)
        assert told.reason is FinishReason.LENGTH


async def test_the_end_fits_into_a_full_buffer() -> None:
    """The last token fills it, and then comes the word that it was the last. Nothing is read before
    that, so the buffer is full whoever is faster."""
    async with runner_of(8) as runner:
        line = runner.line()
        line.start(request("slow", prompt(9), greedy(8)))
        line.finish()
        await ahead(runner, 20)
        assert runner.engine.idle
        told = Answer()
        while (batch := await line.next()) is not None:
            for _, event in batch.events:
                assert isinstance(event, Committed | Finished)
                told.take(event)
        line.close()
        assert told.ids == target_only(RULE, prompt(9), 8)
        assert told.reason is FinishReason.LENGTH


async def test_who_never_reads_is_told_why_it_ended() -> None:
    clock = HandClock()
    async with runner_of(8, clock=clock) as runner:
        slow = runner.run(request("slow", prompt(9), greedy(FOR_EVER)))
        late = runner.run(request("late", prompt(9), greedy(FOR_EVER), deadline=12.0))
        firsts = [[await begun(slow)], [await begun(late)]]
        await ahead(runner, 30)
        clock.now = 12.0  # nothing but the paused are left: time alone ends them
        await ahead(runner, 1)
        clock.now = 30.0
        while not runner.engine.idle:
            await ahead(runner, 1)
        stood, ran_out = [
            await rest_of(events, had) for events, had in zip((slow, late), firsts, strict=True)
        ]
        assert isinstance(error_of(stood), Overloaded)
        assert isinstance(error_of(ran_out), DeadlineExceeded)
        assert 8 <= len(stood.ids) <= 9
        assert 8 <= len(ran_out.ids) <= 9


async def test_time_passes_while_all_stand_still() -> None:
    """No step is done and no command comes: the end does."""
    clock = HandClock()
    async with runner_of(2, clock=clock) as runner:
        line = runner.line()
        line.start(request("a", prompt(9), greedy(FOR_EVER)))
        line.start(request("b", prompt(8), greedy(FOR_EVER)))
        for _ in range(4):
            await line.next()
        line.hold(("a", 0, 0), True)
        line.hold(("b", 0, 0), True)
        await ahead(runner, 1)
        clock.now = 30.0
        line.finish()
        ends = 0
        while (batch := await line.next()) is not None:
            ends += len([event for _, event in batch.events if not isinstance(event, Committed)])
        assert ends == 2
        line.close()


async def test_two_reasons_to_pause_are_two() -> None:
    """A run that its reader holds does not go on because its buffer is empty again."""
    async with runner_of(4, heartbeat_s=0.01) as runner:
        line = runner.line()
        line.start(request("a", prompt(9), greedy(60)))
        await ahead(runner, 20)  # its buffer is full
        line.hold(("a", 0, 0), True)
        told = Answer()
        while (batch := await line.next()) is not None and batch.events:
            for _, event in batch.events:
                assert isinstance(event, Committed)
                told.take(event)
        await ahead(runner, 20, "more")
        (held,) = runner.engine.running
        assert held.paused
        assert held.state.outputs == len(told.ids) == 4
        line.hold(("a", 0, 0), False)
        line.finish()
        while (batch := await line.next()) is not None:
            for _, event in batch.events:
                assert not isinstance(event, Exception)
                told.take(event)  # type: ignore[arg-type]
        assert told.ids == target_only(RULE, prompt(9), 60)
        line.close()


async def test_stopping_reaches_who_stands_still() -> None:
    async with runner_of(4) as runner:
        events = runner.run(request("slow", prompt(9), greedy(FOR_EVER)))
        commits = [await begun(events)]
        await ahead(runner, 20)
    told = await rest_of(events, commits)
    assert isinstance(error_of(told), Unavailable)
    assert told.ids == target_only(RULE, prompt(9), len(told.ids))
    assert 4 <= len(told.ids) <= 5


async def test_one_reader_that_never_reads_among_64() -> None:
    async with runner_of(64, max_waiting=256) as runner:
        deaf = runner.run(request("deaf", prompt(9), greedy(FOR_EVER)))
        await begun(deaf)
        told = await asyncio.gather(
            *(answer(runner, request(str(i), prompt(9, i), greedy(100))) for i in range(63))
        )
        assert all(one.reason is FinishReason.LENGTH for one in told)
        (left,) = runner.engine.running
        assert left.paused
        await deaf.aclose()
