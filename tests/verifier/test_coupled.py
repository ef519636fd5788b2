"""L3 of design.md §4: seeded text is a function of (prompt, parameters, seed, choice) alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.requests import Request
from dspark.core.sampling import SamplingParams

from .toy import (
    Answer,
    HonestBigram,
    Proposal,
    Scene,
    ScriptedDrafter,
    ToyBackend,
    bigram_rule,
    choices,
    fixed_block,
    greedy,
    history_rule,
    lookup,
    nothing,
    oracle,
    request,
    target_only,
    toy_engine,
)

V, TOKENS, SEED, TEMPERATURE = 32, 28, 2**63 + 11, 1.4
RULE = history_rule(V, seed=4, loop=8)
SEEDED = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=TOKENS)
PROMPTS = [[(5 * i + 3 * j * j) % V for j in range(4 + 7 * i)] for i in range(4)]
TEXTS = [
    target_only(RULE, prompt, TOKENS, temperature=TEMPERATURE, seed=SEED) for prompt in PROMPTS
]


def asked(**changes: Any) -> list[Request]:
    return [request(str(i), p, replace(SEEDED, **changes)) for i, p in enumerate(PROMPTS)]


def engine_with(drafter: Any, **config: Any) -> Any:
    return toy_engine(ToyBackend(RULE, V), drafter, **config)


def texts(answers: list[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def ignorant_of_noise(history: tuple[int, ...], wanted: Any) -> Proposal:
    """Says it is sure of a block that it made up."""
    block = tuple((history[-1] * 3 + k) % V for k in range(wanted.gamma))
    return Proposal(block, [9.0] * len(block))


DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": nothing,
    "ngram": lookup,
    "honest": lambda: ScriptedDrafter(oracle(RULE, blur=1.5)),
    "liar": lambda: ScriptedDrafter(ignorant_of_noise),
}


@pytest.mark.parametrize("policy", ["early-stop", "top-k", "fixed:3", "threshold:0.5", "none"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_seeded_text_does_not_depend_on_drafts(drafter: str, policy: str) -> None:
    for gamma in range(8) if drafter != "none" else (7,):
        chunk, mates = (3, 16, 256)[gamma % 3], (4, 1)[gamma % 2]
        engine = engine_with(
            DRAFTERS[drafter](),
            gamma=gamma,
            verify=policy,
            prefill_chunk=chunk,
            max_sequences=mates,
            seed=gamma,  # of the engine's own randomness, which must not matter
        )
        assert texts(Scene(engine).ask(*asked())) == TEXTS, f"γ = {gamma}"


def test_an_honest_drafter_that_shares_the_noise_is_accepted() -> None:
    engine = engine_with(DRAFTERS["honest"](), verify="fixed:7")
    Scene(engine).ask(*asked())
    figures = engine.figures.speculation
    assert 0.4 * figures.verified < figures.accepted < figures.verified


def test_a_support_that_comes_with_a_coupled_draft_is_not_looked_at() -> None:
    table = np.full((V, V), 1 / V)
    support = np.full((V, 1), V + 5, np.int32)  # no id at all
    script = HonestBigram(support, np.full((V, 1), np.nan, np.float32), np.zeros(V), None)

    def says(history: tuple[int, ...], wanted: Any) -> Proposal:
        block = fixed_block(range(wanted.gamma))(history, wanted)
        came = list(range(wanted.gamma))
        return replace(
            block, support_ids=script.support_ids[came], support_weights=script.weights[came]
        )

    def run(drafter: Any) -> list[list[int]]:
        return texts(Scene(toy_engine(ToyBackend(bigram_rule(table), V), drafter)).ask(*asked()))

    assert run(ScriptedDrafter(says)) == run(nothing())


def test_seeded_text_does_not_depend_on_batch_mates() -> None:
    """Mates of every kind: greedy, unseeded, seeded otherwise, that come and go."""
    scene = Scene(engine_with(DRAFTERS["honest"](), max_sequences=6))
    scene.submit(*asked())
    for i in range(12):
        params = (greedy(5), SamplingParams(max_tokens=3), replace(SEEDED, seed=i, max_tokens=9))
        scene.submit(request(f"mate {i}", [i, i + 1, i + 2], params[i % 3]))
        scene.step()
        if i % 4 == 3:
            scene.engine.cancel(f"mate {i}")
    answers = scene.drain()
    assert [answers[str(i), 0].ids for i in range(4)] == TEXTS


def test_seeded_text_survives_preemption() -> None:
    """128 tokens of room for four sequences of up to 53."""
    engine = engine_with(DRAFTERS["honest"](), kv_tokens=128)
    assert texts(Scene(engine).ask(*asked())) == TEXTS
    assert engine.preemptions > 0


@pytest.mark.parametrize("given", [1, 2, 13, 27])
def test_seeded_text_goes_on_after_a_replay(given: int) -> None:
    """Failover: another engine, another drafter, the first half already streamed."""
    engine = engine_with(lookup(), seed=99)
    replays = [
        replace(a, committed_ids=tuple(text[:given]), attempt=1)
        for a, text in zip(asked(), TEXTS, strict=True)
    ]
    answers = Scene(engine).ask(*replays)
    assert texts(answers) == [text[given:] for text in TEXTS]
    assert all(answer.commits[0].index == given for answer in answers)


def test_four_choices_are_four_texts_and_come_again() -> None:
    def four(drafter: Any) -> list[list[int]]:
        one = request("a", PROMPTS[1], replace(SEEDED, n=4))
        return texts(Scene(engine_with(drafter)).ask(*choices(one, 4)))

    plain = four(nothing())
    assert len({tuple(text) for text in plain}) == 4
    assert plain[0] == TEXTS[1]
    assert four(DRAFTERS["honest"]()) == plain == four(lookup())


def test_choices_are_independent_draws() -> None:
    """First tokens of 64 choices of one request follow the target's law: at a uniform law over 4
    ids each is within 16 ± 12 (3.5 standard deviations)."""
    uniform = ToyBackend(bigram_rule(np.full((4, 4), 0.25)), 4)
    engine = toy_engine(uniform, nothing())
    one = request("a", [0], SamplingParams(seed=1, n=64, max_tokens=1))
    counts = np.bincount([a.ids[0] for a in Scene(engine).ask(*choices(one, 64))], minlength=4)
    assert ((counts > 4) & (counts < 28)).all()


def test_another_seed_is_another_text() -> None:
    engine = engine_with(nothing())
    assert texts(Scene(engine).ask(*asked(seed=SEED + 1))) != TEXTS


def test_greedy_text_does_not_depend_on_the_seed() -> None:
    plain = [target_only(RULE, prompt, TOKENS) for prompt in PROMPTS]
    for seed in (None, 0, 1, SEED):
        changes = {"seed": seed, "temperature": 0.0}
        engine = engine_with(DRAFTERS["honest"]())
        assert texts(Scene(engine).ask(*asked(**changes))) == plain


@pytest.mark.parametrize(
    "rules",
    [
        {"top_p": 0.7, "min_p": 0.02},
        {"top_k": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.7},
        {"logit_bias": {1: 5.0, 2: -100.0}},
        {"min_tokens": 20, "stop_ids": tuple(range(0, V, 2))},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_rules_of_sampling_are_the_same_with_drafts(rules: dict[str, Any]) -> None:
    plain = texts(Scene(engine_with(nothing())).ask(*asked(**rules)))
    assert plain != TEXTS, "the rule changed nothing: no test"
    for drafter in (lookup(), DRAFTERS["honest"]()):
        engine = engine_with(drafter, verify="fixed:7")
        assert texts(Scene(engine).ask(*asked(**rules))) == plain
        assert engine.figures.speculation.accepted > 0
