"""L4 of design.md §4: inside a block, position k sees the committed tokens plus x_1..x_{k-1}, and a
rejected token leaves no trace: not in counts, log-probabilities, caches, features, usage, figures.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dspark.core.requests import Speculation, SpeculationFigures, TokenLogprob
from dspark.core.sampling import SamplingParams
from dspark.models.targets.features import FeatureProjection

from .toy import (
    Rule,
    Scene,
    Script,
    ScriptedDrafter,
    ToyBackend,
    fixed_block,
    greedy,
    history_rule,
    lookup,
    nothing,
    oracle,
    request,
    toy_engine,
)

V, TOKENS, GAMMA = 24, 30, 7
RULE = history_rule(V, seed=6, loop=7)
PROMPTS = [[(5 * i + j * j) % V for j in range(6 + 9 * i)] for i in range(4)]
ENDS = (2, 11, 17)


def target_only(
    rule: Rule, prompt: list[int], params: SamplingParams, tokens: int
) -> tuple[list[int], list[TokenLogprob]]:
    """Greedy decoding with every rule applied token by token, as SamplingParams words them."""
    out: list[int] = []
    logprobs = []
    while len(out) < tokens:
        ids = [*prompt, *out]
        raw = rule(np.array(ids, np.int32), len(ids) - 1)[0]
        z = raw.astype(np.float64)
        for token in set(ids):
            r = params.repetition_penalty
            z[token] = z[token] / r if z[token] > 0 else z[token] * r
        for token, count in Counter(out).items():
            z[token] -= params.presence_penalty + params.frequency_penalty * count
        for token, bias in params.logit_bias.items():
            z[token] += bias
        if len(out) < params.min_tokens:
            z[list(params.stop_ids)] = -np.inf
        token = int(z.argmax())
        out.append(token)
        log_p = raw - np.log(np.exp(raw.astype(np.float64)).sum())
        best = sorted(range(V), key=lambda v: (-raw[v], v))[: params.top_logprobs]
        logprobs.append(
            TokenLogprob(float(log_p[token]), tuple((v, float(log_p[v])) for v in best))
        )
        if token in params.stop_ids:
            break
    return out, logprobs


def one_token(token: int) -> Script:
    """Proposes the same token over and over: where it is rejected, counting it would show."""
    return fixed_block([token] * GAMMA)


SCRIPTS = {
    "often right": oracle(RULE, wrong_every=5),
    "always wrong": oracle(RULE, wrong_every=1),
    "one token": one_token(5),
}


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 1.9},
        {"frequency_penalty": 1.1},
        {"frequency_penalty": -1.1},
        {"logit_bias": {4: 7.0, 8: -60.0}},
        {"min_tokens": 12, "stop_ids": ENDS},
        {"presence_penalty": 0.6, "repetition_penalty": 1.2, "min_tokens": 5, "stop_ids": ENDS},
    ],
    ids=lambda rules: " ".join(f"{name}={value}" for name, value in rules.items()),
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_position_sees_what_stands_before_it(script: str, rules: dict[str, Any]) -> None:
    params = greedy(TOKENS, logprobs=True, top_logprobs=3, **rules)
    engine = toy_engine(ToyBackend(RULE, V), ScriptedDrafter(SCRIPTS[script]), verify="fixed:7")
    answers = Scene(engine).ask(*(request(str(i), p, params) for i, p in enumerate(PROMPTS)))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, logprobs = target_only(RULE, prompt, params, TOKENS)
        assert answer.ids == ids
        told = [logprob for commit in answer.commits for logprob in commit.logprobs]
        assert len(told) == len(ids)
        for got, want in zip(told, logprobs, strict=True):
            # Float64 sums of float32 logits on both sides, in different orders.
            assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
            assert [v for v, _ in got.top] == [v for v, _ in want.top]
            assert [p for _, p in got.top] == pytest.approx([p for _, p in want.top], abs=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_figures_and_usage_count_what_stands(script: str) -> None:
    drafter = ScriptedDrafter(SCRIPTS[script])
    engine = toy_engine(ToyBackend(RULE, V), drafter, verify="fixed:3")
    answers = Scene(engine).ask(
        *(request(str(i), p, greedy(TOKENS)) for i, p in enumerate(PROMPTS))
    )
    total = SpeculationFigures()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.finished is not None
        assert answer.finished.usage.prompt_tokens == len(prompt)
        assert answer.finished.usage.completion_tokens == len(answer.ids) == TOKENS
        assert answer.commits[0].speculation == SpeculationFigures()  # of prefill
        for commit in answer.commits[1:]:
            told = commit.speculation
            assert told.rounds == 1
            assert told.accepted <= told.verified <= told.drafted <= GAMMA
            assert len(commit.ids) == told.accepted + 1 or commit is answer.commits[-1]
        assert [c.index for c in answer.commits] == np.cumsum(
            [0, *(len(c.ids) for c in answer.commits[:-1])]
        ).tolist()
        own = sum((c.speculation for c in answer.commits), SpeculationFigures())
        assert own == answer.finished.speculation
        total += own
    assert total == engine.figures.speculation
    assert engine.figures.committed_tokens == TOKENS * len(PROMPTS)
    assert (total.accepted > 0) == (script != "always wrong")


def test_a_session_is_told_what_stands_and_nothing_else() -> None:
    drafter = ScriptedDrafter(SCRIPTS["often right"])
    engine = toy_engine(ToyBackend(RULE, V), drafter, verify="fixed:7")
    (answer,) = Scene(engine).ask(request("a", PROMPTS[1], greedy(TOKENS)))
    told: list[int] = []
    for asked in drafter.asked:
        told[asked.start :] = asked.tokens
        assert asked.output_position == len(told) - len(PROMPTS[1])
    whole = PROMPTS[1] + answer.ids
    assert told == whole[: len(told)]
    assert [asked.round for asked in drafter.asked] == sorted({a.round for a in drafter.asked})
    assert drafter.closed == ["a/0/0"]


# --- what is cached -------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_prefix_hit_after_rejections_holds_what_stood(script: str, block_size: int) -> None:
    """Prompts that go on from what an earlier request said, and from half of it, and turn off."""
    drafter = ScriptedDrafter(SCRIPTS[script])
    backend = ToyBackend(RULE, V, block_size=block_size)
    scene = Scene(toy_engine(backend, drafter, verify="fixed:7"))
    (first,) = scene.ask(request("first", PROMPTS[2], greedy(TOKENS)))
    said = PROMPTS[2] + first.ids
    for name, prompt in {
        "all": said,
        "half": said[:37],
        "more": [*said, 3, 1, 4],
        "elsewhere": [*said[:37], (said[37] + 1) % V, 9],
    }.items():
        (hit,) = scene.ask(request(name, prompt, greedy(TOKENS, logprobs=True)))
        assert hit.finished is not None
        assert hit.finished.usage.cached_tokens >= min(37, len(prompt)) - 1
        fresh_engine = toy_engine(ToyBackend(RULE, V, block_size=block_size), nothing())
        (fresh,) = Scene(fresh_engine).ask(request(name, prompt, greedy(TOKENS, logprobs=True)))
        assert hit.ids == fresh.ids
        assert [x for c in hit.commits for x in c.logprobs] == [
            x for c in fresh.commits for x in c.logprobs
        ]


@pytest.mark.parametrize("wrong_every", [1, 3, 0])
@pytest.mark.parametrize(
    "config",
    [
        {"prefill_chunk": 256},
        {"prefill_chunk": 5},
        {"kv_tokens": 96},  # preemption: four sequences of up to 63 tokens
        {"verify": "fixed:2"},
        {"verify": "top-k"},
    ],
    ids=str,
)
def test_features_are_those_of_the_tokens_that_stand(
    config: dict[str, Any], wrong_every: int
) -> None:
    """The drafter checks every row it is sent against its tokens; what it misses it asks for."""
    projection = FeatureProjection(layer_ids=(0,))
    script = oracle(RULE, wrong_every=wrong_every)
    drafter = ScriptedDrafter(script, feature_id=projection.feature_id)
    backend = ToyBackend(RULE, V)
    backend.load_projection(projection)
    engine = toy_engine(backend, drafter, **{"verify": "fixed:7", **config})
    scene = Scene(engine)
    answers = scene.ask(*(request(str(i), p, greedy(TOKENS)) for i, p in enumerate(PROMPTS)))
    later = scene.ask(
        *(request(f"hit {i}", p + a.ids[:20], greedy(10)) for i, (p, a) in
          enumerate(zip(PROMPTS, answers, strict=True)))
    )  # fmt: skip
    assert [a.ids for a in later] == [a.ids[20:] for a in answers]
    assert not engine.desk.faults
    assert (engine.preemptions > 0) == ("kv_tokens" in config)
    if "kv_tokens" not in config:
        assert all(a.finished and a.finished.usage.cached_tokens > 0 for a in later)


def test_a_prefix_without_features_is_computed_again_for_a_drafter_that_reads_them() -> None:
    projection = FeatureProjection(layer_ids=(0,))
    reader = ScriptedDrafter(oracle(RULE), drafter_id="reader", feature_id=projection.feature_id)
    backend = ToyBackend(RULE, V)
    backend.load_projection(projection)
    engine = toy_engine(backend, lookup(), reader)
    scene = Scene(engine)
    scene.ask(request("tokens only", PROMPTS[3], greedy(8)))
    wish = Speculation(drafter="reader")
    for name, cached in (("first", 0), ("second", len(PROMPTS[3]) - 1)):
        (answer,) = scene.ask(request(name, PROMPTS[3], greedy(8), speculation=wish))
        assert answer.finished is not None
        assert answer.finished.usage.cached_tokens == cached
    assert not engine.desk.faults
    (again,) = scene.ask(request("tokens again", PROMPTS[3], greedy(8)))
    assert again.finished is not None
    assert again.finished.usage.cached_tokens == len(PROMPTS[3]) - 1


def test_a_drafter_that_forgets_is_told_again() -> None:
    projection = FeatureProjection(layer_ids=(0,))
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=4), feature_id=projection.feature_id)
    backend = ToyBackend(RULE, V)
    backend.load_projection(projection)
    engine = toy_engine(backend, drafter, verify="fixed:7")
    scene = Scene(engine)
    scene.submit(request("a", PROMPTS[0], greedy(60)))
    for _ in range(20):
        scene.step()
        if engine.figures.steps % 3 == 0:
            drafter.forget("a/0/0")
    scene.drain()
    assert set(engine.desk.faults) == {"need context"}
    assert engine.desk.faults["need context"] >= 3
    assert engine.figures.speculation.accepted > 20
