"""L1 and L2 of design.md §4: speculation changes how fast, never what.

Greedy text is compared token for token, sampled text by χ² against a law worked out from the toy's
table. What admission may not know (Appendix A) is in test_barrier.py.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.core.requests import Speculation
from dspark.core.sampling import SamplingParams
from dspark.models.targets.transformers import TransformersBackend

from .toy import (
    Array,
    HonestBigram,
    Proposal,
    Scene,
    ScriptedDrafter,
    ToyBackend,
    bigram_rule,
    greedy,
    history_rule,
    lookup,
    nothing,
    oracle,
    request,
    target_only,
    toy_engine,
)

POLICIES = ["early-stop", "top-k", *(f"fixed:{n}" for n in range(1, 8)), "threshold:0.5", "none"]
GAMMAS = range(8)

# --- L1 on the toy: whole-history logits, so that one wrong id changes all that follows -----------

V, LOOP, TOKENS = 32, 9, 24
RULE = history_rule(V, seed=3, loop=LOOP)
PROMPTS = [[(7 * i + j * j) % V for j in range(5 + 4 * i)] for i in range(12)]
TEXTS = [target_only(RULE, prompt, TOKENS) for prompt in PROMPTS]

DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": nothing,
    "ngram": lookup,
    "scripted": lambda: ScriptedDrafter(oracle(RULE, wrong_every=4)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_targets_alone(drafter: str, policy: str) -> None:
    for gamma in GAMMAS if drafter != "none" else (7,):
        chunk, batch = (1, 5, 16, 256)[gamma % 4], (12, 1)[gamma % 3 == 1]
        engine = toy_engine(
            ToyBackend(RULE, V),
            DRAFTERS[drafter](),
            verify=policy,
            gamma=gamma,
            prefill_chunk=chunk,
            max_sequences=batch,
        )
        answers = Scene(engine).ask(
            *(request(str(i), prompt, greedy(TOKENS)) for i, prompt in enumerate(PROMPTS))
        )
        assert [answer.ids for answer in answers] == TEXTS, f"γ = {gamma}, chunk {chunk}"
        assert not engine.desk.faults


@pytest.mark.parametrize("drafter", ["ngram", "scripted"])
def test_greedy_drafts_are_accepted(drafter: str) -> None:
    """The test above would mean little if nothing was ever accepted, or nothing rejected."""
    engine = toy_engine(ToyBackend(RULE, V), DRAFTERS[drafter](), verify="fixed:7")
    Scene(engine).ask(*(request(str(i), p, greedy(TOKENS)) for i, p in enumerate(PROMPTS)))
    figures = engine.figures.speculation
    assert 0.3 * figures.verified < figures.accepted < 0.9 * figures.verified


def test_policies_of_one_batch_do_not_mix() -> None:
    engine = toy_engine(ToyBackend(RULE, V), DRAFTERS["scripted"](), lookup(), max_sequences=12)
    asked = [
        request(
            str(i),
            prompt,
            greedy(TOKENS),
            speculation=Speculation(("scripted", "ngram", "none")[i % 3], i % 8, POLICIES[i % 11]),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    assert [answer.ids for answer in Scene(engine).ask(*asked)] == TEXTS


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"logit_bias": {3: 6.0, 9: -100.0}},
        {"min_tokens": 20, "stop_ids": tuple(range(0, V, 3))},
    ],
    ids=lambda rules: next(iter(rules)),
)
@pytest.mark.parametrize("drafter", ["ngram", "scripted"])
def test_rules_that_look_at_the_text_are_the_same_with_drafts(
    rules: dict[str, Any], drafter: str
) -> None:
    def texts(policy: str) -> list[list[int]]:
        engine = toy_engine(ToyBackend(RULE, V), DRAFTERS[drafter](), verify=policy)
        params = greedy(TOKENS, **rules)
        asked = [request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
        answers = Scene(engine).ask(*asked)
        assert (engine.figures.speculation.accepted > 0) == (policy != "none")
        return [answer.ids for answer in answers]

    plain = texts("none")
    assert texts("fixed:7") == plain
    assert plain != TEXTS, "the rule changed nothing: no test"


# --- L1 on a tiny Llama, against transformers' own generate ---------------------------------------


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # far above the usual 0.02, so that no two logits nearly tie
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama_texts(llama: LlamaForCausalLM) -> list[list[int]]:
    """What `generate` says. Rows are not bit-equal across batch shapes, so equality can be asked
    for only where the two best logits are further apart than rounding: float32 sums of this size
    differ by about 1e-5, and we ask for 1e-3."""
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        said = llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(said.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3, "a near-tie: choose another seed"
        texts.append(said.sequences[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("policy", ["none", "early-stop", "top-k", "fixed:5", "threshold:0.5"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "scripted"])
def test_greedy_text_is_that_of_generate(
    llama: LlamaForCausalLM, llama_texts: list[list[int]], drafter: str, policy: str
) -> None:
    whole = {tuple(p): [*p, *t] for p, t in zip(PROMPTS, llama_texts, strict=True)}

    def script(history: tuple[int, ...], asked: Any) -> Proposal:
        """The rest of the text, every fifth token wrong."""
        text = next(text for p, text in whole.items() if p == history[: len(p)])
        rest = text[len(history) : len(history) + asked.gamma]
        ids = tuple((t + (len(history) + k) % 5 // 4) % 97 for k, t in enumerate(rest))
        return Proposal(ids, [1.0] * len(ids))

    drafters = {"none": nothing(), "ngram": lookup(), "scripted": ScriptedDrafter(script)}
    for batch, chunk in ((12, 7), (1, 256)):
        backend: Any = TransformersBackend(deepcopy(llama))
        engine = toy_engine(
            backend, drafters[drafter], verify=policy, max_sequences=batch, prefill_chunk=chunk
        )
        asked = [request(f"{batch} {i}", p, greedy(24)) for i, p in enumerate(PROMPTS)]
        answers = Scene(engine).ask(*asked)
        assert [answer.ids for answer in answers] == llama_texts
    if drafter == "scripted" and policy != "none":
        assert engine.figures.speculation.accepted > 0


# --- L2 on a bigram toy of 4 tokens ---------------------------------------------------------------

STATES = 4
END = 3
GAMMA = 5
# χ² below this is a broken rule. Fixed seeds make each test one draw, the same on every run.
ALPHA = 1e-3
# A wrong rule must be as good as impossible, or the sample is too small to mean anything.
CERTAIN = 1e-9

P = np.array(
    [
        [0.55, 0.25, 0.15, 0.05],
        [0.10, 0.20, 0.30, 0.40],
        [0.30, 0.05, 0.60, 0.05],
        [0.25, 0.35, 0.15, 0.25],
    ]
)
# What the drafter draws from: three of four tokens, in an order of its own, not normalised.
SUPPORT = np.array([[1, 0, 2], [2, 3, 0], [2, 0, 1], [0, 1, 3]], np.int32)
WEIGHTS = np.array([[3, 2, 4], [1, 1, 3], [2, 5, 2], [0.7, 0.1, 0.9]], np.float32)
# Confidence by the token before: so telling that a planner which looked ahead would show.
LOGITS = np.array([2.5, -2.5, 1.0, -0.5], np.float32)

# T(B) in seconds: early-stop asks a token for a survival of about 0.4 to 0.5 here.
LINEAR = {1: 56.0, 1024: 50.0 + 6.0 * 1024}
# The first 6 draft tokens of 12 requests are nearly free, the rest are dear.
SCARCE = {1: 100.0, 12: 100.0, 18: 101.0, 1024: 101.0 + 30.0 * 1006}


def drafter(seed: int = 5, **lies: Any) -> ScriptedDrafter:
    rng = np.random.default_rng(seed)
    honest = {"support_ids": SUPPORT, "weights": WEIGHTS, "logits": LOGITS, "rng": rng}
    return ScriptedDrafter(HonestBigram(**{**honest, **lies}), gamma=GAMMA)


def law(params: SamplingParams) -> Array:
    """p [V, V] by last token, after temperature and truncation, in plain words."""
    rows = []
    for row in P:
        z = np.log(row) + [params.logit_bias.get(v, 0.0) for v in range(STATES)]
        p = np.exp(z / params.temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        keep = order[: params.top_k] if params.top_k else order
        p[np.setdiff1d(order, keep)] = 0
        p /= p.sum()
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
        p[p < params.min_p * p.max()] = 0
        rows.append(p / p.sum())
    return np.array(rows)


def sample(
    params: SamplingParams,
    n: int,
    *,
    policy: str,
    R: int,
    table: dict[int, float] | None = None,
    lie: Any = None,
    eos_ids: tuple[int, ...] = (),
    gamma: int = GAMMA,
) -> tuple[list[list[int]], Any]:
    engine = toy_engine(
        ToyBackend(bigram_rule(P), STATES),
        lie or drafter(),
        table=table,
        verify=policy,
        max_sequences=R,
        max_waiting=n,
        gamma=gamma,
        eos_ids=eos_ids,
        seed=21,
    )
    answers = Scene(engine).ask(*(request(str(i), [i % STATES], params) for i in range(n)))
    assert not engine.desk.faults
    return [answer.ids for answer in answers], engine


def p_value(counts: Array, expected: Array) -> float:
    """Of χ², cells that expect fewer than 5 taken together; a count where none may be is 0."""
    counts, expected = counts.ravel(), expected.ravel()
    if counts[expected == 0].any():
        return 0.0
    few = expected < 5
    observed = np.append(counts[~few], counts[few].sum())
    wanted = np.append(expected[~few], expected[few].sum())
    kept = wanted > 0
    return float(stats.chisquare(observed[kept], wanted[kept]).pvalue)


def triples_p_value(texts: list[list[int]], p: Array) -> float:
    """Of all (o_2 o_3 o_4), (o_5 o_6 o_7), … given the token before each: [V, V, V, V] cells. The
    chain forgets, so triples are independent given that token."""
    counts = np.zeros((STATES,) * 4)
    for text in texts:
        for at in range(0, len(text) - 3, 3):
            counts[tuple(text[at : at + 4])] += 1
    each = p[:, :, None, None] * p[None, :, :, None] * p[None, None, :, :]
    return p_value(counts, counts.sum((1, 2, 3))[:, None, None, None] * each)


PLAIN = SamplingParams(max_tokens=13)
NUCLEUS = SamplingParams(max_tokens=13, temperature=1.3, top_p=0.8)
TRUNCATED = SamplingParams(max_tokens=13, temperature=0.8, top_k=3, min_p=0.15)
BANNED = SamplingParams(max_tokens=13, logit_bias={2: -100.0, 1: 0.5})

# policy, requests at a time, T, and what its drafts must have met: the share of drafted tokens that
# are verified lies within these bounds, so that the case is what its name says.
CASES = {
    "none": ("none", 16, None, (0.0, 0.0)),
    "whole blocks": ("fixed:5", 16, None, (1.0, 1.0)),
    "short blocks": ("fixed:2", 16, None, (1.0, 1.0)),
    "early stop that never stops": ("early-stop", 16, None, (1.0, 1.0)),
    "early stop that trims": ("early-stop", 8, LINEAR, (0.1, 0.6)),
    "threshold": ("threshold:0.5", 16, None, (0.1, 0.7)),
    "top-k under load": ("top-k", 12, SCARCE, (0.05, 0.3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("params", [PLAIN, NUCLEUS], ids=["plain", "top-p"])
def test_sampled_text_follows_the_targets_law(params: SamplingParams, case: str) -> None:
    policy, R, table, (least, most) = CASES[case]
    texts, engine = sample(params, 700, policy=policy, R=R, table=table)
    assert triples_p_value(texts, law(params)) > ALPHA
    figures = engine.figures.speculation
    assert least <= figures.verified / max(figures.drafted, 1) <= most
    if policy == "top-k":  # K from the past, not the local plan, is what was tested
        assert engine.planner.local_plans < 0.1 * engine.figures.steps


@pytest.mark.parametrize("params", [TRUNCATED, BANNED], ids=["top-k and min-p", "bias"])
@pytest.mark.parametrize("case", ["short blocks", "early stop that trims", "top-k under load"])
def test_a_token_that_may_not_come_is_rejected_not_trimmed(
    params: SamplingParams, case: str
) -> None:
    """The drafter knows nothing of the rules and proposes forbidden tokens all the time."""
    policy, R, table, _ = CASES[case]
    texts, _ = sample(params, 700, policy=policy, R=R, table=table)
    assert triples_p_value(texts, law(params)) > ALPHA


@pytest.mark.parametrize("case", ["whole blocks", "early stop that trims", "top-k under load"])
def test_min_tokens_bans_the_end_inside_a_block(case: str) -> None:
    """Joint law of o_1..o_4: the end may come fourth at the earliest, and often does."""
    params = SamplingParams(max_tokens=4, min_tokens=3)
    policy, R, table, _ = CASES[case]
    texts, _ = sample(params, 3000, policy=policy, R=R, table=table, eos_ids=(END,))
    banned = P.copy()
    banned[:, END] = 0
    banned /= banned.sum(1, keepdims=True)
    start = np.full(STATES, 1 / STATES)  # prompts are each token equally often
    expected = np.einsum("s,sa,ab,bc,cd->abcd", start, banned, banned, banned, P) * len(texts)
    counts = np.zeros((STATES,) * 4)
    for text in texts:
        counts[tuple(text)] += 1
    assert p_value(counts, expected) > ALPHA


def test_policies_side_by_side_each_follow_the_law() -> None:
    """Requests of one step with policies of their own, K too small for all of them."""
    wishes = ["early-stop", "top-k", "fixed:2", "threshold:0.5"]
    engine = toy_engine(
        ToyBackend(bigram_rule(P), STATES), drafter(), table=SCARCE, max_sequences=12, gamma=GAMMA
    )
    asked = [
        request(str(i), [i % STATES], PLAIN, speculation=Speculation(verify=wishes[i // 4 % 4]))
        for i in range(1000)
    ]
    answers = Scene(engine).ask(*asked)
    for n in range(4):
        texts = [answer.ids for i, answer in enumerate(answers) if i // 4 % 4 == n]
        assert triples_p_value(texts, law(PLAIN)) > ALPHA, wishes[n]


@pytest.mark.parametrize("policy", ["early-stop", "top-k", "fixed:5"])
def test_prompt_lookup_is_a_point_mass_that_may_look_ahead(policy: str) -> None:
    """Its blocks are a function of committed text, so the full search over a staircase is free."""
    stairs = {1: 100.0, 4: 100.0, 5: 130.0, 12: 130.0, 13: 200.0, 64: 200.0}
    texts, engine = sample(PLAIN, 700, policy=policy, R=4, table=stairs, lie=lookup(GAMMA))
    assert triples_p_value(texts, law(PLAIN)) > ALPHA
    assert engine.figures.speculation.accepted > 100


def test_a_block_without_support_is_a_point_mass() -> None:
    """Always a valid reading: the law holds however the drafter drew, as long as nothing looks
    ahead. Acceptance is what it costs."""
    texts, engine = sample(PLAIN, 700, policy="fixed:5", R=16, lie=drafter(ships_support=False))
    assert triples_p_value(texts, law(PLAIN)) > ALPHA
    assert engine.figures.speculation.accepted > 0


def test_a_drafter_that_lies_about_q_is_seen_by_this_test() -> None:
    """Power: weights other than those drawn from bias the text, which is why drafters are
    authenticated, and a sample of this size shows it beyond doubt."""

    class Liar(HonestBigram):
        def __call__(self, history: tuple[int, ...], asked: Any) -> Proposal:
            said = super().__call__(history, asked)
            assert said.support_weights is not None
            level = np.ones_like(said.support_weights)
            return Proposal(said.ids, said.logits, said.support_ids, level)

    liar = ScriptedDrafter(Liar(SUPPORT, WEIGHTS, LOGITS, np.random.default_rng(5)), gamma=GAMMA)
    texts, _ = sample(PLAIN, 700, policy="fixed:5", R=16, lie=liar)
    assert triples_p_value(texts, law(PLAIN)) < CERTAIN
