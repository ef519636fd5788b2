"""L6 of design.md §4: stop ids, EOS and token limits cut inside an accepted block. Nothing after
the cut is committed, streamed, counted, cached or logged, and ℓ is clipped to the room left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.requests import FinishReason
from dspark.core.sampling import SamplingParams
from dspark.models.targets.features import FeatureProjection

from .toy import (
    Answer,
    Proposal,
    Rule,
    Scene,
    Script,
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

# A target that counts upwards: after t comes t + 1, so what comes when needs no table.
V = 64
GAMMA = 7


def counting(history: Any, first: int) -> Any:
    rows = np.zeros((len(history) - first, V), np.float32)
    rows[np.arange(len(rows)), (history[first:] + 1) % V] = 9.0
    return rows


RULE: Rule = counting


def run(
    sampling: SamplingParams,
    prompt: tuple[int, ...] = (0,),
    *,
    script: Script | None = None,
    **config: Any,
) -> tuple[Answer, Any, ScriptedDrafter]:
    """One request with a drafter that is always right, whole blocks verified."""
    drafter = ScriptedDrafter(script or oracle(RULE))
    engine = toy_engine(ToyBackend(RULE, V), drafter, **{"verify": "fixed:7", **config})
    (answer,) = Scene(engine).ask(request("a", prompt, sampling))
    check_that_nothing_is_beyond(answer, engine, prompt)
    return answer, engine, drafter


def check_that_nothing_is_beyond(answer: Answer, engine: Any, prompt: tuple[int, ...]) -> None:
    """Streamed, counted and told figures agree with the tokens that stand."""
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == len(answer.ids)
    assert engine.figures.committed_tokens == len(answer.ids)
    for commit in answer.commits:
        told = commit.speculation
        assert told.accepted <= len(commit.ids)
        assert told.accepted <= told.verified <= told.drafted
    # What is cached is what stands, but for the last token, which was never computed.
    whole = (*prompt, *answer.ids)
    cached = engine.cache.pool.match((*whole, 1, 2, 3), "")
    held = len(cached.blocks) * engine.cache.pool.block_size + cached.tokens
    assert held == len(whole) - 1


# The anchor is 1; the first block holds 2..8 and its bonus token is 9, the second 10..16 and 17.


@pytest.mark.parametrize("stop", range(1, 19))
@pytest.mark.parametrize("kind", ["stop id", "EOS"])
def test_an_end_cuts_the_block_where_it_stands(kind: str, stop: int) -> None:
    if kind == "EOS":
        answer, _, _ = run(greedy(40), eos_ids=(stop,))
    else:
        answer, _, _ = run(greedy(40, stop_ids=(stop, 60)))
    assert answer.ids == list(range(1, stop + 1))
    assert answer.reason is FinishReason.STOP


@pytest.mark.parametrize("sampling", [{"temperature": 1e-3}, {"temperature": 1e-3, "seed": 7}])
@pytest.mark.parametrize("stop", [2, 5, 9])
def test_an_end_cuts_sampled_blocks_too(stop: int, sampling: dict[str, Any]) -> None:
    """At a temperature this low the odds of another token are e^-9000."""
    answer, engine, _ = run(SamplingParams(max_tokens=40, stop_ids=(stop,), **sampling))
    assert answer.ids == list(range(1, stop + 1))
    assert engine.figures.speculation.accepted > 0


def test_an_end_in_the_prompt_is_no_end() -> None:
    answer, _, _ = run(greedy(3), prompt=(5, 6), eos_ids=(5, 6))
    assert answer.ids == [7, 8, 9]


def test_ignore_eos_goes_on_but_stop_ids_still_stop() -> None:
    answer, _, _ = run(greedy(20, ignore_eos=True), eos_ids=(4,))
    assert answer.ids == list(range(1, 21))
    assert answer.reason is FinishReason.LENGTH
    answer, _, _ = run(greedy(20, ignore_eos=True, stop_ids=(6,)), eos_ids=(4,))
    assert answer.ids == [1, 2, 3, 4, 5, 6]
    assert answer.reason is FinishReason.STOP


@pytest.mark.parametrize("limit", range(1, 20))
def test_max_tokens_cuts_the_block(limit: int) -> None:
    answer, engine, drafter = run(greedy(limit))
    assert answer.ids == list(range(1, limit + 1))
    assert answer.reason is FinishReason.LENGTH
    # ℓ is clipped to the room: a bonus token follows whatever stands, so nothing is thrown away.
    figures = engine.figures.speculation
    assert figures.accepted == figures.verified == figures.drafted
    for asked in drafter.asked:
        assert 0 < asked.gamma <= limit - asked.output_position - 1


def test_an_end_on_the_last_token_is_a_stop() -> None:
    answer, _, _ = run(greedy(6), eos_ids=(6,))
    assert answer.reason is FinishReason.STOP


def test_a_block_longer_than_the_room_is_refused_as_a_whole() -> None:
    """It was told how much room there is."""
    answer, engine, _ = run(
        greedy(5), script=lambda history, asked: Proposal(tuple(range(2, 9)), [3.0] * 7)
    )
    assert answer.ids == [1, 2, 3, 4, 5]
    assert engine.desk.faults == {"too long": 3}  # after 1, 2 and 3; after 4 there is room for none


# --- the end of the context -----------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 12])
@pytest.mark.parametrize("bound", ["context", "kv"])
def test_the_end_of_the_room_is_a_length(bound: str, max_tokens: int | None) -> None:
    """20 prompt tokens of 32: 12 are left, by the target's context or by the pool."""
    backend = ToyBackend(RULE, V, context_length=32 if bound == "context" else 999)
    config = {"kv_tokens": 32} if bound == "kv" else {}
    drafter = ScriptedDrafter(oracle(RULE))
    engine = toy_engine(backend, drafter, verify="fixed:7", **config)
    prompt = tuple(range(20))
    (answer,) = Scene(engine).ask(request("a", prompt, greedy(max_tokens)))
    assert answer.ids == list(range(20, 32))
    assert answer.reason is FinishReason.LENGTH
    check_that_nothing_is_beyond(answer, engine, prompt)


def test_a_prompt_that_leaves_room_for_one_token_gets_one() -> None:
    backend = ToyBackend(RULE, V, context_length=32)
    drafter = ScriptedDrafter(oracle(RULE))
    (answer,) = Scene(toy_engine(backend, drafter)).ask(request("a", range(31), greedy(None)))
    assert answer.ids == [31]
    assert answer.reason is FinishReason.LENGTH
    assert not drafter.asked


# --- min_tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("least", range(12))
def test_min_tokens_lets_the_end_come_no_earlier(least: int) -> None:
    """From 0 the target would stop at once; banned, it says its next best until it may."""
    rule = history_rule(16, seed=2)
    ends = tuple(range(0, 16, 2))  # every second token ends, so that most are banned on the way

    def text(policy: str) -> Answer:
        engine = toy_engine(ToyBackend(rule, 16), ScriptedDrafter(oracle(rule)), verify=policy)
        params = greedy(30, min_tokens=least, stop_ids=ends)
        (answer,) = Scene(engine).ask(request("a", [3], params))
        return answer

    answer = text("none")
    assert len(answer.ids) > least
    assert not set(answer.ids[:-1]) & set(ends)
    assert answer.ids[-1] in ends
    assert text("fixed:7").ids == answer.ids


def test_min_tokens_counts_replayed_tokens() -> None:
    engine = toy_engine(ToyBackend(RULE, V), nothing())
    params = greedy(30, min_tokens=5, stop_ids=(4, 8))
    asked = request("a", [0], params, committed_ids=(1, 2, 3))
    (answer,) = Scene(engine).ask(asked)
    # 4 is banned as the fourth token; what the target says instead is id 0, then it counts on.
    assert answer.ids[0] == 0
    assert len(answer.ids) + 3 > 5


# --- nothing after the cut ------------------------------------------------------------------------


def test_logprobs_end_with_the_tokens() -> None:
    answer, _, _ = run(greedy(40, stop_ids=(5,), logprobs=True, top_logprobs=2))
    assert [len(c.logprobs) for c in answer.commits] == [len(c.ids) for c in answer.commits]
    assert sum(len(c.logprobs) for c in answer.commits) == 5


@pytest.mark.parametrize("stop", [3, 5, 9])
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_a_request_after_the_cut_computes_what_was_cut(block_size: int, stop: int) -> None:
    """The rejected end of the block sits in the same KV blocks: a later request that turns off
    where the first one stopped must not meet it. The toy's text depends on every id before."""
    rule = history_rule(V, seed=9)
    projection = FeatureProjection(layer_ids=(0,))
    backend = ToyBackend(rule, V, block_size=block_size)
    backend.load_projection(projection)
    drafter = ScriptedDrafter(oracle(rule), feature_id=projection.feature_id)
    engine = toy_engine(backend, drafter, verify="fixed:7")
    scene, text = Scene(engine), target_only(rule, [7], 12)
    (cut,) = scene.ask(request("cut", [7], greedy(12, stop_ids=(text[stop],))))
    at = len(cut.ids)
    assert cut.ids == text[:at]
    turned = [7, *cut.ids, (text[at] + 1) % V, 4]
    (hit,) = scene.ask(request("turned", turned, greedy(9)))
    assert hit.finished is not None
    assert hit.finished.usage.cached_tokens == at  # the prompt and all but the last that stands
    assert hit.ids == target_only(rule, turned, 9)
    assert not engine.desk.faults


def test_a_session_is_closed_with_its_request() -> None:
    _, _, drafter = run(greedy(40, stop_ids=(5,)))
    assert drafter.closed == ["a/0/0"]
    assert not drafter.sessions


def test_an_engine_without_drafts_ends_alike() -> None:
    for params in (greedy(9), greedy(40, stop_ids=(6,)), greedy(40, stop_ids=(2,), min_tokens=3)):
        answer, _, _ = run(params)
        engine = toy_engine(ToyBackend(RULE, V), nothing())
        (plain,) = Scene(engine).ask(request("a", [0], params))
        assert replace(plain.finished, speculation=None) == replace(  # type: ignore[type-var, arg-type]
            answer.finished, speculation=None
        )
        assert plain.ids == answer.ids
