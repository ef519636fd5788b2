"""The life of requests in an engine (design.md §4 L7, §6): every accepted one ends in one reply,
and everything it held goes back. `Scene` checks the engine's integrity after every step.
"""

from __future__ import annotations

import gc
import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
)
from dspark.core.requests import FinishReason, Request, Speculation
from dspark.core.sampling import SamplingParams

from .toy import (
    Answer,
    HandClock,
    Rule,
    Scene,
    ScriptedDrafter,
    ToyBackend,
    choices,
    greedy,
    history_rule,
    lookup,
    nothing,
    oracle,
    request,
    target_only,
    toy_engine,
)

V = 48
RULE = history_rule(V, seed=8, loop=11)


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + 5 * i + i * i // 3) % V for i in range(length))


def scene(*drafters: Any, rule: Rule = RULE, block_size: int = 16, **config: Any) -> Scene:
    backend = ToyBackend(rule, V, block_size=block_size)
    return Scene(toy_engine(backend, *(drafters or (lookup(),)), **config))


def error_of(answer: Answer) -> Exception | None:
    assert answer.finished is not None
    return answer.finished.error


def owned(of: Scene) -> int:
    return of.engine.cache.pool.owned


# --- cancellation and deadlines -------------------------------------------------------------------


def test_cancelling_frees_a_request_wherever_it_is() -> None:
    drafter = ScriptedDrafter(oracle(RULE))
    of = scene(drafter, max_sequences=3, prefill_chunk=8)
    of.submit(
        request("decoding", prompt(6), greedy(500)),
        request("prefilling", prompt(90, 1), greedy(500)),
        request("stays", prompt(7, 2), greedy(20)),
        request("waiting", prompt(8, 3), greedy(500)),
    )
    of.step(3)
    assert of.answers["decoding", 0].ids
    assert not of.answers["prefilling", 0].ids
    for name in ("decoding", "prefilling", "waiting", "unknown", "decoding"):
        of.engine.cancel(name)
        of.engine.check_integrity()
    of.drain()
    for name in ("decoding", "prefilling", "waiting"):
        assert isinstance(error_of(of.answers[name, 0]), Cancelled)
        assert of.answers[name, 0].reason is FinishReason.ERROR
    assert of.answers["stays", 0].ids == target_only(RULE, prompt(7, 2), 20)
    assert owned(of) == 0
    assert not drafter.sessions


def test_a_choice_is_cancelled_alone() -> None:
    of = scene()
    of.submit(*choices(request("a", prompt(9), SamplingParams(seed=1, n=3, max_tokens=30)), 3))
    of.step(3)
    of.engine.cancel("a", 1)
    of.drain()
    reasons = [of.answers["a", choice].reason for choice in range(3)]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]


def test_a_deadline_is_a_point_on_the_engines_clock() -> None:
    clock = HandClock(100.0)
    of = scene(max_sequences=2, clock=clock)
    of.submit(
        request("over before it began", prompt(5), greedy(50), deadline=100.0),
        request("runs", prompt(6), greedy(50), deadline=105.0),
        request("has time", prompt(7), greedy(50), deadline=1e9),
        request("has none", prompt(8), greedy(50)),
        request("waits", prompt(9), greedy(50), deadline=105.0),
    )
    of.step()
    assert isinstance(error_of(of.answers["over before it began", 0]), DeadlineExceeded)
    clock.now = 104.999
    of.step(2)
    assert of.answers["runs", 0].finished is None
    clock.now = 105.0
    of.step()
    for name in ("runs", "waits"):
        assert isinstance(error_of(of.answers[name, 0]), DeadlineExceeded)
    told = len(of.answers["runs", 0].ids)
    usage = of.answers["runs", 0].finished
    assert usage is not None
    assert usage.usage.completion_tokens == told > 0
    of.drain()
    for name, start in (("has time", 7), ("has none", 8)):
        assert of.answers[name, 0].ids == target_only(RULE, prompt(start), 50)
    assert owned(of) == 0


# --- attempts and replay --------------------------------------------------------------------------


def test_a_newer_attempt_ends_the_older_one() -> None:
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=3))
    of = scene(drafter)
    first = request("a", prompt(6), greedy(40))
    of.submit(first)
    of.step(4)
    streamed = of.answers["a", 0]
    for attempt in (0, -1):
        with pytest.raises(InvalidRequest, match=r"attempt: .* is not newer than attempt 0"):
            of.engine.submit(replace(first, attempt=attempt))
    of.engine.submit(replace(first, attempt=3, committed_ids=tuple(streamed.ids)))
    of.take(of.engine.take_events())
    assert isinstance(error_of(streamed), Cancelled)
    of.answers["a", 0] = Answer()
    with pytest.raises(InvalidRequest, match="attempt: 2 is not newer"):
        of.engine.submit(replace(first, attempt=2))
    of.drain()
    again = of.answers["a", 0]
    assert streamed.ids + again.ids == target_only(RULE, prompt(6), 40)
    assert again.commits[0].index == len(streamed.ids)
    assert drafter.closed == ["a/0/0", "a/0/3"]
    of.engine.submit(first)  # of a request that is over any attempt will do
    of.engine.cancel("a")


@pytest.mark.parametrize("given", [0, 1, 5, 16, 39])
@pytest.mark.parametrize(
    "params", [greedy(40), greedy(40, frequency_penalty=0.9, repetition_penalty=1.2, min_tokens=20)]
)
def test_a_replay_goes_on_where_the_stream_stopped(params: SamplingParams, given: int) -> None:
    one = request("a", prompt(20), params)
    (whole,) = scene(ScriptedDrafter(oracle(RULE, wrong_every=4))).ask(one)
    other = scene(lookup(), seed=5)
    (rest,) = other.ask(replace(one, attempt=1, committed_ids=tuple(whole.ids[:given])))
    assert whole.ids[:given] + rest.ids == whole.ids
    assert rest.commits[0].index == given
    assert rest.finished is not None
    assert rest.finished.usage.completion_tokens == 40


@pytest.mark.parametrize("by", ["length", "stop", "beyond"])
def test_a_replay_of_a_whole_answer_ends_at_once(by: str) -> None:
    """The verifier died between its last token and its last word."""
    text = target_only(RULE, prompt(9), 12)
    params = greedy(12, stop_ids=(text[7],) if by == "stop" else ())
    stand = text[: text.index(text[7]) + 1] if by == "stop" else text
    given = (*stand, 1, 2) if by == "beyond" else tuple(stand)
    of = scene()
    (answer,) = of.ask(request("a", prompt(9), params, committed_ids=given))
    assert answer.ids == []
    assert answer.reason is (FinishReason.STOP if by == "stop" else FinishReason.LENGTH)
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == len(stand)
    assert of.engine.figures.prefill_tokens == 0


# --- admission ------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    of = scene(max_waiting=3, max_sequences=2, retry_after_s=2.5)
    of.submit(*(request(str(i), prompt(20, i), greedy(9)) for i in range(3)))
    with pytest.raises(Overloaded, match="3 requests are waiting, the limit is 3") as refused:
        of.engine.submit(request("late", prompt(5), greedy(9)))
    assert refused.value.retry_after_s == 2.5
    assert of.engine.active == 3
    of.step()  # two of them start
    of.submit(request("later", prompt(5), greedy(9)))
    of.drain()
    assert all(answer.reason is FinishReason.LENGTH for answer in of.answers.values())


def test_a_refused_request_leaves_no_trace() -> None:
    of = scene()
    for bad in (
        request("a", (), greedy()),
        request("a", (1, V), greedy()),
        request("a", (1,), greedy(), speculation=Speculation(drafter="eagle")),
        request("a", (1,), greedy(), speculation=Speculation(gamma=-1)),
        request("a", (1,), greedy(), speculation=Speculation(verify="fixed")),
    ):
        with pytest.raises(InvalidRequest):
            of.engine.submit(bad)
    assert of.engine.idle
    assert of.step() == []


def test_requests_are_served_by_priority_then_by_arrival() -> None:
    of = scene(max_sequences=1)
    wanted = {"c": 0, "a": 5, "d": 0, "b": 5, "e": -1}
    of.submit(*(request(n, prompt(5), greedy(3), priority=p) for n, p in wanted.items()))
    finished = []
    while not of.engine.idle:
        finished += [key[0] for key, event in of.step() if of.answers[key].finished is event]
    assert finished == ["a", "b", "c", "d", "e"]


def test_prefill_goes_to_the_more_important_first() -> None:
    of = scene(prefill_chunk=16)
    of.submit(
        request("late", prompt(64, 1), greedy(2)),
        request("soon", prompt(64, 2), greedy(2), priority=1),
    )
    of.step(4)
    assert of.answers["soon", 0].ids
    assert not of.answers["late", 0].ids


@pytest.mark.parametrize("first", [5, 40], ids=["short", "long"])
def test_short_prompts_start_together(first: int) -> None:
    """A prompt shorter than a block shares none, so none waits for another's."""
    of = scene(max_sequences=12)
    of.submit(request("first", prompt(first), greedy(4)))
    of.submit(*(request(str(i), prompt(5, i % 3), greedy(4)) for i in range(11)))
    of.step()
    assert all(len(answer.ids) == 1 for answer in of.answers.values())


# --- one pool of blocks ---------------------------------------------------------------------------

MODES = {
    "greedy": greedy(60),
    "penalized": greedy(60, repetition_penalty=1.2, frequency_penalty=0.4),
    "seeded": SamplingParams(temperature=1.2, seed=9, max_tokens=60),
    # A sequence's own randomness is not drawn from while it waits, so even this is the same.
    "unseeded": SamplingParams(temperature=1.2, max_tokens=60),
}


@pytest.mark.parametrize(
    ("drafter", "mode"),
    [
        *itertools.product(["none", "ngram", "scripted"], ["greedy", "penalized", "seeded"]),
        # Not with drafts: which of them are lost decides what is drawn. Same law, not same text.
        ("none", "unseeded"),
    ],
)
def test_a_tiny_pool_gives_the_answers_of_a_large_one(drafter: str, mode: str) -> None:
    """8 requests of up to 110 tokens in a pool of 128."""

    def run(kv_tokens: int) -> tuple[list[list[int]], Any]:
        made = {"none": nothing, "ngram": lookup}.get(
            drafter, lambda: ScriptedDrafter(oracle(RULE, wrong_every=5))
        )
        of = scene(made(), kv_tokens=kv_tokens, max_sequences=6, prefill_chunk=24)
        asked = [request(str(i), prompt(8 + 6 * i, i), MODES[mode]) for i in range(8)]
        texts = [answer.ids for answer in of.ask(*asked)]
        assert owned(of) == 0
        return texts, of.engine

    large, roomy = run(8192)
    tiny, cramped = run(128)
    assert tiny == large
    assert roomy.preemptions == 0
    assert cramped.preemptions > 3


def test_the_least_important_is_preempted_and_comes_back() -> None:
    of = scene(kv_tokens=96, max_sequences=3)
    of.submit(
        request("low", prompt(20, 1), greedy(40), priority=-1),
        request("high", prompt(20, 2), greedy(40), priority=1),
        request("middle", prompt(20, 3), greedy(40)),
    )
    finished = []
    while not of.engine.idle:
        finished += [key[0] for key, event in of.step() if of.answers[key].finished is event]
    assert finished == ["high", "middle", "low"]
    assert of.engine.preemptions > 0
    for name, start in (("low", 1), ("high", 2), ("middle", 3)):
        assert of.answers[name, 0].ids == target_only(RULE, prompt(20, start), 40)


def test_a_preempted_request_may_be_cancelled() -> None:
    """It waits again, with text that was streamed and without a block."""
    of = scene(kv_tokens=64, max_sequences=2)
    of.submit(
        request("stays", prompt(20, 1), greedy(30)), request("goes", prompt(20, 2), greedy(30))
    )
    while not of.engine.preemptions:
        of.step()
    told = len(of.answers["goes", 0].ids)
    of.engine.cancel("goes")
    of.engine.check_integrity()
    of.drain()
    gone = of.answers["goes", 0]
    assert isinstance(error_of(gone), Cancelled)
    assert len(gone.ids) == told > 0
    assert of.answers["stays", 0].ids == target_only(RULE, prompt(20, 1), 30)


def test_a_newcomer_of_one_token_that_must_go_at_once() -> None:
    """Admitted and preempted in one step, before it ran: an older one grows into the last block."""
    of = scene(block_size=4, kv_tokens=8)
    of.submit(request("old", prompt(4), greedy(4)))
    of.step()
    of.submit(request("new", prompt(1, 9), greedy(4)))
    of.drain()
    assert of.answers["old", 0].ids == target_only(RULE, prompt(4), 4)
    assert of.answers["new", 0].ids == target_only(RULE, prompt(1, 9), 4)
    assert of.engine.preemptions == 1


def test_a_request_may_fill_the_whole_pool() -> None:
    """Also when half of it is cached, and a block more would be held while it is copied."""
    of = scene(kv_tokens=64)
    of.ask(request("a", prompt(40), greedy(2)))
    (answer,) = of.ask(request("b", (*prompt(40), *prompt(23, 7)), greedy(1)))
    assert answer.ids == target_only(RULE, [*prompt(40), *prompt(23, 7)], 1)


def test_a_prefix_is_computed_once() -> None:
    of = scene(prefill_chunk=100)
    shared = prompt(1000)
    figures = of.engine.figures
    (first,) = of.ask(request("first", (*shared, 1, 2, 3), greedy(4)))
    assert figures.prefill_tokens == 1003
    (second,) = of.ask(request("second", (*shared, 9, 8, 7, 6, 5), greedy(4)))
    assert figures.prefill_tokens == 1003 + 5
    assert first.finished is not None
    assert second.finished is not None
    assert (first.finished.usage.cached_tokens, second.finished.usage.cached_tokens) == (0, 1000)
    assert second.ids == target_only(RULE, [*shared, 9, 8, 7, 6, 5], 4)


def test_requests_that_come_together_compute_a_shared_prefix_once() -> None:
    """The second waits for the blocks that the first computes; what a block does not hold whole,
    each computes itself."""
    of = scene(prefill_chunk=48)
    shared = prompt(100)  # 6 blocks of 16 and 4 tokens
    answers = of.ask(*(request(str(i), (*shared, i, i + 1), greedy(4)) for i in range(4)))
    assert of.engine.figures.prefill_tokens == 102 + 3 * 6
    for i, answer in enumerate(answers):
        assert answer.ids == target_only(RULE, [*shared, i, i + 1], 4)


def test_choices_share_the_prompts_prefill() -> None:
    of = scene(prefill_chunk=48)
    one = request("a", prompt(100), SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=12))
    answers = of.ask(*choices(one, 4))
    assert of.engine.figures.prefill_tokens == 100 + 3 * 4
    assert len({tuple(answer.ids) for answer in answers}) == 4
    alone = scene()
    for choice, answer in enumerate(answers):
        (same,) = alone.ask(replace(one, choice=choice, request_id=f"b{choice}"))
        assert same.ids == answer.ids


def test_a_prefix_is_evicted_least_recently_used_first() -> None:
    of = scene(kv_tokens=256)
    of.ask(request("old", prompt(64, 1), greedy(2)))
    of.ask(request("newer", prompt(64, 2), greedy(2)))
    of.ask(request("old again", prompt(64, 1), greedy(2)))
    of.ask(request("large", prompt(180, 3), greedy(2)))
    (old,) = of.ask(request("old still", prompt(64, 1), greedy(2)))
    assert old.finished is not None
    assert old.finished.usage.cached_tokens > 0


# --- things that go wrong in a step ---------------------------------------------------------------


class StumblingBackend(ToyBackend):
    """Raises in the forwards whose numbers it is given, half-way: blocks are written by then."""

    stumbles: frozenset[int] = frozenset()

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        if self.forwards in self.stumbles:
            raise RuntimeError("out of memory")
        return output


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(at: int) -> None:
    backend = StumblingBackend(RULE, V)
    backend.stumbles = frozenset({at})
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=3))
    of = Scene(toy_engine(backend, drafter, prefill_chunk=20))
    of.submit(*(request(str(i), prompt(9 + 20 * i, i), greedy(30)) for i in range(3)))
    with pytest.raises(RuntimeError, match="out of memory"):
        of.drain()
    of.engine.fail(Unavailable("the step failed"))
    of.engine.check_integrity()
    of.drain()
    assert all(isinstance(error_of(answer), Unavailable) for answer in of.answers.values())
    assert owned(of) == 0
    assert not drafter.sessions
    for i in range(3):
        (answer,) = of.ask(request(f"again {i}", prompt(9 + 20 * i, i), greedy(30)))
        assert answer.ids == target_only(RULE, prompt(9 + 20 * i, i), 30)


def test_a_copy_of_a_block_that_raises_is_a_step_that_raises() -> None:
    class Torn(ToyBackend):
        def copy(self, src_block: int, dst_block: int) -> None:
            raise RuntimeError("torn")

    of = Scene(toy_engine(Torn(RULE, V), lookup()))
    of.ask(request("first", prompt(40), greedy(2)))
    of.submit(
        request("copies", (*prompt(40), 1, 2), greedy(2)), request("other", prompt(9, 4), greedy(2))
    )
    with pytest.raises(RuntimeError, match="torn"):
        of.step()
    of.engine.fail(Unavailable("the step failed"))
    of.drain()
    for name in ("copies", "other"):
        assert isinstance(error_of(of.answers[name, 0]), Unavailable)
    assert owned(of) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "params",
    [greedy(30), greedy(30, logprobs=True), SamplingParams(max_tokens=30),
     SamplingParams(max_tokens=30, seed=4)],
    ids=["greedy", "logprobs", "unseeded", "seeded"],
)  # fmt: skip
def test_logits_that_name_no_token_cost_their_own_request_only(
    params: SamplingParams, bad: float
) -> None:
    def rule(history: Any, first: int) -> Any:
        rows = RULE(history, first).copy()
        if history[0] == 7:  # one request's
            rows[np.arange(first, len(history)) >= 12] = bad
        return rows

    of = scene(ScriptedDrafter(oracle(RULE, wrong_every=3)), rule=rule)
    of.submit(request("sick", (7, 1, 2), params), request("well", (8, 1, 2), greedy(30)))
    of.drain()
    sick = of.answers["sick", 0]
    assert isinstance(error_of(sick), ModelError)
    assert len(sick.ids) == 10  # positions 3..12; what comes after the 13th token is unknown
    assert of.answers["well", 0].ids == target_only(RULE, (8, 1, 2), 30)


@pytest.mark.parametrize("length", [33, 40], ids=["whole blocks", "a part of one too"])
def test_what_a_broken_step_computed_or_read_is_not_found_cached(length: int) -> None:
    """The rows say that something of what they attend to is broken; which of it nobody knows. Kept,
    it would break each request with this prefix."""
    broken = False

    def rule(history: Any, first: int) -> Any:
        rows = RULE(history, first)
        return np.full_like(rows, np.nan) if broken else rows

    of = scene(rule=rule)

    def ask(name: str) -> Answer:
        (answer,) = of.ask(request(name, prompt(length), greedy(8)))
        return answer

    ask("first")
    assert ask("again").commits[0].cached_tokens == length - 1
    broken = True
    assert isinstance(error_of(ask("sick")), ModelError)
    broken = False
    well = ask("well")
    assert well.commits[0].cached_tokens == 0
    assert well.ids == target_only(RULE, prompt(length), 8)
    assert owned(of) == 0


# --- many steps -----------------------------------------------------------------------------------


def random_request(rng: np.random.Generator, number: int) -> Request:
    """Of any kind: a fresh prompt or one that shares a prefix, any mode, any end."""
    length = int(rng.integers(1, 60))
    ids = prompt(length, int(rng.integers(6)))
    sampling = (
        greedy(),
        greedy(repetition_penalty=1.1, logprobs=True),
        SamplingParams(seed=number),
        SamplingParams(top_p=0.9),
    )[int(rng.integers(4))]
    return request(
        f"r{number}",
        ids,
        replace(sampling, max_tokens=int(rng.integers(1, 40)), stop_ids=(int(rng.integers(V)),)),
        priority=int(rng.integers(3)),
        speculation=Speculation(
            drafter=("scripted", "ngram", "none")[int(rng.integers(3))],
            gamma=int(rng.integers(8)),
            verify=(None, "top-k", "fixed:4", "none")[int(rng.integers(4))],
        ),
        deadline=float(rng.integers(400)) if rng.random() < 0.1 else None,
    )


def live(steps: int) -> list[int]:
    """Random arrivals, cancels, deadlines and ends, in a pool too small for all; every so often all
    leave, and the number of live objects is taken."""
    rng, clock = np.random.default_rng(1), HandClock()
    scripted = ScriptedDrafter(oracle(RULE, wrong_every=4))
    of = scene(
        scripted, lookup(), kv_tokens=384, max_sequences=8, max_step_tokens=48, prefill_chunk=32,
        max_waiting=12, verify="early-stop", clock=clock,
    )  # fmt: skip
    number, objects = 0, []
    for step in range(1, steps + 1):
        clock.now += 0.1
        for _ in range(int(rng.poisson(0.35))):
            number += 1
            with suppress(Overloaded):
                of.submit(random_request(rng, number))
        if rng.random() < 0.05 and number:
            of.engine.cancel(f"r{int(rng.integers(max(1, number - 15), number + 1))}")
        of.step()
        if step % (steps // 10) == 0:
            of.drain()
            assert owned(of) == 0
            of.answers.clear()
            scripted.asked.clear()
            scripted.closed.clear()
            assert not scripted.sessions
            gc.collect()
            objects.append(len(gc.get_objects()))
    assert of.engine.preemptions > steps // 500
    assert of.engine.figures.speculation.accepted > steps // 10
    assert not of.engine.desk.faults
    return objects


def test_ten_thousand_ragged_steps_leak_nothing() -> None:
    objects = live(10_000)
    # After the first tenth the prefix cache is full; its entries come and go with what is evicted,
    # and a pool of 24 blocks holds a few hundred objects at most. 3,500 requests came and went.
    assert max(objects[1:]) - min(objects[1:]) < 100, objects
