"""Losslessness of the acceptance rules (design.md §4, L1 to L5), function by function.

Statistical tests draw with fixed generators, so they are deterministic. A right rule must reach
p > 1e-3 in a χ² test; a wrong one must fall below 1e-9 at the same sample size, or the test that
passes the right one says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark.core.errors import ModelError
from dspark.core.noise import gumbel
from dspark.core.sampling import SamplingParams
from dspark.core.verdicts import Verdict
from dspark.models.verification import (
    TokenCounts,
    adjust,
    argmax_rows,
    check_support,
    coupled_token,
    draw,
    judge,
    normalized_weights,
    probabilities,
    sample_from_support,
    token_logprob,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

Rows = NDArray[np.float64]
FAIR, FALSE = 1e-3, 1e-9
N = 10_000


def chi_square(counts: NDArray[np.int64], expected: Rows) -> float:
    """p-value of counts under probabilities; anything seen where none may be gives 0."""
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    share = expected[possible] / expected[possible].sum()
    assert (share * counts.sum()).min() > 5  # or χ² is not the statistic's distribution
    return float(stats.chisquare(counts[possible], share * counts.sum()).pvalue)


# ---------------------------------------------------------------- p of L2


def reference(
    logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]
) -> Rows:
    """What transformers makes of the same parameters: the penalty in float32, the rest in 64."""
    scores = torch.from_numpy(logits)[None]
    ids = torch.tensor([prompt + output])
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    warped = LogitsProcessorList(warpers)(ids, scores.double())
    row: Rows = warped.softmax(-1)[0].numpy()
    return row


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(2, 700),
    spread=st.sampled_from([0.1, 2.0, 8.0]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
        top_k=st.sampled_from([-1, 0, 2, 5, 50, 1000]),
        top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    ),
)
def test_distribution_equals_transformers(
    seed: int, vocab_size: int, spread: float, params: SamplingParams
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, vocab_size).astype(np.float32)
    prompt, output = (rng.integers(0, vocab_size, n).tolist() for n in (6, 4))
    before = logits.copy()
    row = adjust(logits, params, TokenCounts.of(prompt, output))
    p = probabilities(row, params)
    expected = reference(logits, params, prompt, output)
    np.testing.assert_array_equal(p > 0, expected > 0)
    np.testing.assert_allclose(p, expected, rtol=1e-10)  # both float64; sums in other orders
    np.testing.assert_array_equal(logits, before)


def test_penalties_bias_and_bans_add_up() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5, 3.0], np.float32)
    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={3: 4.0, 4: -1.0},
    )
    row = adjust(logits, params, TokenCounts.of([0, 0, 1], [1, 2, 2]), banned_ids=[4])
    # 0: prompt only, 2 / 2. 1: prompt and output once, -2 * 2 - 0.5 - 0.25.
    # 2: output twice, 1 / 2 - 0.5 - 2 * 0.25. 3: unseen, bias 4. 4: banned whatever its bias.
    np.testing.assert_array_equal(row, np.float32([1.0, -4.75, -0.5, 4.5, -np.inf]))


def test_grammar_mask_beats_the_ban_on_stop_ids_only_if_nothing_else_is_left() -> None:
    logits, params, counts = np.zeros(4, np.float32), SamplingParams(), TokenCounts()
    only_stop = adjust(logits, params, counts, [3, 3], np.array([False, False, False, True]))
    assert np.flatnonzero(np.isfinite(only_stop)).tolist() == [3]
    another = adjust(logits, params, counts, [3], np.array([False, True, False, True]))
    assert np.flatnonzero(np.isfinite(another)).tolist() == [1]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=3), [1, 3, 4]),  # 4 of 4, 5, 6 that tie: the lowest
        (SamplingParams(top_k=4), [1, 3, 4, 5]),
        (SamplingParams(top_p=1e-9), [1]),
        (SamplingParams(top_p=0.5, top_k=7), [1, 3, 4]),
        (SamplingParams(min_p=1.0), [1, 3]),
    ],
)
def test_ties_keep_the_lower_ids(params: SamplingParams, kept: list[int]) -> None:
    p = np.array([1, 3, 1, 3, 2, 2, 2, 1]) / 15
    row = probabilities(np.log(p).astype(np.float32), params)
    assert np.flatnonzero(row).tolist() == kept


def test_nucleus_of_a_flat_row_is_its_lower_half() -> None:
    p = probabilities(np.zeros(1024, np.float32), SamplingParams(top_p=0.5))
    np.testing.assert_array_equal(p, np.r_[np.full(512, 1 / 512), np.zeros(512)])


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_row_without_a_finite_largest_logit_is_an_error(broken: float) -> None:
    row = np.array([0.0, broken, 1.0], np.float32)
    with pytest.raises(ModelError):
        probabilities(row, SamplingParams())
    with pytest.raises(ModelError):
        probabilities(np.full(3, -np.inf, np.float32), SamplingParams())


def test_logprobs_are_the_models_own() -> None:
    logits = np.random.default_rng(4).normal(0, 3, 500).astype(np.float32)
    logits[[17, 400]] = logits.max() + 1  # a tie at the top
    exact = torch.from_numpy(logits).double().log_softmax(-1)
    for token in (0, 17, 499):
        found = token_logprob(logits, token, 5)
        assert found.logprob == pytest.approx(float(exact[token]), abs=1e-12)
        ids = [i for i, _ in found.top]
        assert ids == sorted(range(500), key=lambda i: (-logits[i], i))[:5]
        assert [value for _, value in found.top] == pytest.approx(exact[ids].tolist(), abs=1e-12)
    assert token_logprob(logits, 3, 0).top == ()
    assert len(token_logprob(logits[:4], 3, 20).top) == 4


@settings(max_examples=50, deadline=None)
@given(*[st.lists(st.integers(0, 9), max_size=12)] * 3)
def test_counts_equal_a_counter_and_keep_no_trace(
    prompt: list[int], output: list[int], draft: list[int]
) -> None:
    counts = TokenCounts.of(prompt, output)
    ahead = counts.after(draft)
    for found, tokens in ((counts, output), (ahead, output + draft)):
        pairs = zip(found.output_ids.tolist(), found.output_counts.tolist(), strict=True)
        assert dict(pairs) == Counter(tokens)
    assert set(ahead.prompt_ids.tolist()) == set(prompt)


# ---------------------------------------------------------------- drawing and supports


def test_draw_follows_its_weights_over_several_blocks() -> None:
    rng = np.random.default_rng(5)
    weights = np.zeros(1000)
    weights[[0, 1, 255, 256, 257, 600, 767, 768, 996]] = rng.uniform(0.5, 2, 9)
    counts = np.bincount([draw(weights, rng) for _ in range(N)], minlength=1000)
    assert chi_square(counts, weights / weights.sum()) > FAIR


@pytest.mark.parametrize(("u", "first"), [(0.0, True), (1.0 - 2.0**-53, False)])
def test_no_draw_falls_on_a_token_without_weight(u: float, first: bool) -> None:
    """At both ends of what a generator returns, with tokens without weight at both ends."""

    class Scripted(np.random.Generator):
        def random(self, *_: Any, **__: Any) -> Any:
            return u

    rng = Scripted(np.random.PCG64(0))
    for total in (0.3, 1.0, 1.5, 1e-300):
        weights = np.zeros(600)
        weights[[3, 299]] = total / 3, total * 2 / 3
        assert draw(weights, rng) == (3 if first else 299)
        support = np.array([0.0, total, total, 0.0], np.float32) + np.float32([0, 1, 2, 0])
        assert sample_from_support(support, rng) == (1 if first else 2)


def test_support_weights_normalize_to_the_same_numbers_on_both_sides() -> None:
    weights = np.random.default_rng(6).random(128).astype(np.float32)
    q = normalized_weights(weights)
    total = 0.0
    for w in weights.tolist():  # in order: a verifier in another language can do the same
        total += w
    np.testing.assert_array_equal(q, weights.astype(np.float64) / total)
    strided = np.repeat(weights, 3)[::3]
    np.testing.assert_array_equal(normalized_weights(strided), q)


def support_of(**change: Any) -> tuple[Any, Any, list[int], int]:
    ids = change.get("ids", np.array([[4, 1, 2], [0, 9, 5]], np.int32))
    weights = change.get("weights", np.float32([[0.5, 0.5, 0.0], [1, 2, 3]]))
    return ids, weights, change.get("draft", [1, 5]), change.get("V", 10)


@pytest.mark.parametrize(
    "bad",
    [
        {"draft": [2, 5]},  # drawn with weight 0
        {"draft": [3, 5]},  # not in its support
        {"draft": [1]},  # another length
        {"V": 9},
        {"ids": np.array([[4, 1, 2], [0, -1, 5]], np.int32)},
        {"ids": np.array([[1, 1, 2], [0, 9, 5]], np.int32)},
        {"weights": np.float32([[0.5, 0.5, 0.0], [1, np.nan, 3]])},
        {"weights": np.float32([[0.5, 0.5, 0.0], [1, np.inf, 3]])},
        {"weights": np.float32([[0.5, 0.5, -0.1], [1, 2, 3]])},
        {"weights": np.float32([[0.5, 0.5], [1, 2]])},
        {"weights": np.float32([[0, 0, 0], [1, 2, 3]])},
        {"ids": np.zeros((2, 0), np.int32), "weights": np.zeros((2, 0), np.float32)},
        {"ids": np.arange(1, dtype=np.int32), "weights": np.ones(1, np.float32)},
        {
            "ids": np.tile(np.arange(129, dtype=np.int32), (2, 1)),
            "weights": np.ones((2, 129), np.float32),
            "V": 500,
        },
    ],
)
def test_a_bad_support_is_recognized(bad: dict[str, Any]) -> None:
    assert check_support(*support_of())
    assert not check_support(*support_of(**bad))


def test_an_empty_draft_has_an_empty_support() -> None:
    assert check_support(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), [], 10)


# ---------------------------------------------------------------- L1


def test_greedy_keeps_what_equals_the_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0], [0.0, 1.0, 3.0]])
    own = argmax_rows(logits)
    assert own.tolist() == [1, 0, 2]  # ties: the lowest id
    assert verify_greedy(own, [1, 0]) == Verdict((1, 0, 2))
    assert verify_greedy(own, [1, 2]) == Verdict((1, 0))
    assert verify_greedy(own, [2, 0]) == Verdict((1,))
    assert verify_greedy(own[:1], []) == Verdict((1,))
    verdict = verify_greedy(own, [1, 2])
    assert (verdict.accepted, verdict.ids[-1]) == (1, 0)


# ---------------------------------------------------------------- L2

V = 8
ANCHOR = 0


def chain(rng: np.random.Generator, sharpness: float = 1.0) -> Rows:
    """[V, V] next-token distributions by last token. No cell so small that χ² could not see it."""
    rows: Rows = 0.8 * rng.dirichlet(np.full(V, sharpness), V) + 0.2 / V
    return rows


def joint(target: Rows) -> Rows:
    """Probabilities of the first two tokens after the anchor, [V * V]."""
    return (target[ANCHOR][:, None] * target).reshape(-1)


class ToyDrafter:
    """Draws γ tokens from a chain cut to its M likeliest ids, rounded to `wire` first."""

    def __init__(self, rows: Rows, M: int, wire: Callable[[Rows], Rows] = lambda w: w) -> None:
        self.M = M
        self.ids = np.argsort(-rows, axis=1)[:, :M].astype(np.int32)
        self.exact = np.take_along_axis(rows, self.ids, axis=1)
        self.weights = wire(self.exact).astype(np.float32)

    def block(self, gamma: int, rng: np.random.Generator, weights: Rows | None = None) -> Any:
        """(draft ids, support ids, support weights); drawn from `weights` if they are given."""
        source = self.weights if weights is None else weights
        seen = [ANCHOR]
        for _ in range(gamma):
            drawn = sample_from_support(source[seen[-1]], rng)
            seen.append(int(self.ids[seen[-1], drawn]))
        return seen[1:], self.ids[seen[:-1]], self.weights[seen[:-1]]


def first_two(
    target: Rows,
    propose: Callable[[np.random.Generator], Any],
    verify: Callable[..., Verdict] = verify_rejection,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Counts [V * V] of the first two committed tokens, over N requests."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(V * V, np.int64)
    for _ in range(N):
        draft, support_ids, support_weights = propose(rng)
        context = [ANCHOR, *draft]
        ids = verify(
            lambda k, context=context: target[context[k]], draft, support_ids, support_weights, rng
        ).ids
        second = ids[1] if len(ids) > 1 else draw(target[ids[0]], rng)
        counts[V * ids[0] + second] += 1
    return counts


def trimmed(block: Any, length: int) -> Any:
    """The first so many tokens, with the support of the whole block as it came."""
    return block[0][:length], block[1], block[2]


TARGETS: dict[str, Callable[[Rows], Rows]] = {
    "plain": lambda rows: rows,
    "top-p": lambda rows: np.stack(
        [
            probabilities(np.log(row).astype(np.float32), SamplingParams(top_p=0.7, min_p=0.12))
            for row in rows
        ]
    ),
    "masked": lambda rows: (
        rows * (np.arange(V) % 3 != 1) / rows[:, np.arange(V) % 3 != 1].sum(1)[:, None]
    ),
}


@pytest.mark.parametrize("target_kind", TARGETS)
@pytest.mark.parametrize(("length", "M"), [(0, V), (1, V), (2, V), (1, 3), (2, 3)])
def test_rejection_gives_the_targets_joint_distribution(
    target_kind: str, length: int, M: int
) -> None:
    """Blocks of γ = 2 cut to ℓ: what follows is the target's, whichever cut, support or mask."""
    rng = np.random.default_rng(8)
    target, drafter = TARGETS[target_kind](chain(rng)), ToyDrafter(chain(rng), M)
    counts = first_two(target, lambda rng: trimmed(drafter.block(2, rng), length))
    assert chi_square(counts, joint(target)) > FAIR


def test_a_draft_without_support_is_a_point_mass() -> None:
    """Lossless for whatever was drawn, and from whatever distribution."""
    rng = np.random.default_rng(9)
    target, drafter = chain(rng), ToyDrafter(chain(rng), 4)
    counts = first_two(target, lambda rng: (drafter.block(2, rng)[0], None, None))
    assert chi_square(counts, joint(target)) > FAIR


def coarse(weights: Rows) -> Rows:
    """A wire type with steps of 1/8, so that rounding is large enough for χ² to see."""
    return np.maximum(np.round(8 * weights), 1.0) / 8


def test_weights_are_rounded_before_the_draw() -> None:
    rng = np.random.default_rng(10)
    target, drafter = chain(rng), ToyDrafter(chain(rng, 0.5), 4, coarse)
    right = first_two(target, lambda rng: drafter.block(2, rng))
    assert chi_square(right, joint(target)) > FAIR
    wrong = first_two(target, lambda rng: drafter.block(2, rng, drafter.exact))
    assert chi_square(wrong, joint(target)) < FALSE


def textbook(
    row: Callable[[int], Rows],
    draft: Sequence[int],
    support_ids: NDArray[np.int32],
    support_weights: NDArray[np.float32],
    rng: np.random.Generator,
    mistake: str = "",
) -> Verdict:
    """The rule over dense vectors, and ways to get it wrong that look plausible."""
    q = np.zeros((len(support_ids), V))
    scale = support_weights.sum(axis=1, keepdims=True)
    if mistake == "mass before truncation":
        scale = np.ones_like(scale)
    np.put_along_axis(q, support_ids, support_weights / scale, axis=1)
    for k, x in enumerate(draft):
        p = row(k)
        ratio = q[k, x] / p[x] if mistake == "q over p" else p[x] / q[k, x]
        if rng.random() < ratio:
            continue
        residual = np.maximum(p - q[k], 0)
        rest = p if mistake == "p after a rejection" else residual
        return Verdict((*draft[:k], draw(rest, rng)))
    last = row(len(draft))
    if mistake == "residual after a trimmed block" and len(draft) < len(q):
        last = np.maximum(last - q[len(draft)], 0)
    return Verdict((*draft, draw(last, rng)))


@pytest.mark.parametrize(
    "mistake",
    [
        "",
        "q over p",
        "p after a rejection",
        "residual after a trimmed block",
        "mass before truncation",
    ],
)
def test_the_joint_test_sees_a_wrong_rule(mistake: str) -> None:
    """The same sample size, the same chains: a mistake is seen, the rule without one passes."""
    rng = np.random.default_rng(8)
    target, drafter = chain(rng), ToyDrafter(chain(rng), 3)

    def wrong(*arguments: Any) -> Verdict:
        return textbook(*arguments, mistake=mistake)

    # ℓ = 1 of γ = 2, so that the support of x_2 is there to be misused.
    counts = first_two(target, lambda rng: trimmed(drafter.block(2, rng), 1), wrong)
    value = chi_square(counts, joint(target))
    assert value < FALSE if mistake else value > FAIR


def test_acceptance_is_one_minus_total_variation() -> None:
    rng = np.random.default_rng(12)
    p, drafter = chain(rng)[ANCHOR], ToyDrafter(chain(rng), V)
    q = np.zeros(V)
    q[drafter.ids[ANCHOR]] = normalized_weights(drafter.weights[ANCHOR])
    stood = sum(
        verify_rejection(lambda _: p, *drafter.block(1, rng), rng).accepted for _ in range(N)
    )
    expected = 1 - 0.5 * np.abs(p - q).sum()
    assert abs(stood / N - expected) < 4 * np.sqrt(expected * (1 - expected) / N)


def test_a_residual_without_mass_falls_back_to_p_and_is_counted() -> None:
    """p = q / 2, as if half of the row were lost to rounding: rejections leave no residual."""
    rng = np.random.default_rng(13)
    drafter = ToyDrafter(chain(rng), 5)
    q = np.zeros(V)
    q[drafter.ids[ANCHOR]] = normalized_weights(drafter.weights[ANCHOR])
    verdicts = [verify_rejection(lambda _: q / 2, *drafter.block(1, rng), rng) for _ in range(N)]
    fallen = [v.ids[-1] for v in verdicts if v.fallbacks]
    assert all((v.fallbacks == 1) == (v.accepted == 0) for v in verdicts)
    assert abs(len(fallen) / N - 0.5) < 4 * 0.5 / np.sqrt(N)
    assert chi_square(np.bincount(fallen, minlength=V), q) > FAIR


def test_a_token_that_p_forbids_is_always_rejected() -> None:
    p = np.array([0.0, 1.0])
    support = np.array([[0, 1]], np.int32), np.float32([[1.0, 1e-30]])
    rng = np.random.default_rng(14)
    for _ in range(100):
        assert verify_rejection(lambda _: p, [0], *support, rng).ids == (1,)
        assert verify_rejection(lambda _: p, [0], None, None, rng).ids == (1,)


def test_rows_after_a_rejection_are_not_asked_for() -> None:
    asked: list[int] = []

    def row(k: int) -> Rows:
        asked.append(k)
        return np.array([0.0, 1.0])

    verify_rejection(row, [1, 0, 1], None, None, np.random.default_rng(0))
    verify_coupled(row, [1, 0, 1], 5, 0, 0)
    assert asked == [0, 1, 0, 1]


# ---------------------------------------------------------------- L3


def test_a_coupled_token_is_a_sample_of_p() -> None:
    p = chain(np.random.default_rng(15))[0]
    by_seed = np.bincount([coupled_token(p, seed, 0, 3) for seed in range(5000)], minlength=V)
    by_position = np.bincount([coupled_token(p, 9, 0, n) for n in range(5000)], minlength=V)
    assert chi_square(by_seed, p) > FAIR
    assert chi_square(by_position, p) > FAIR


@pytest.mark.parametrize("top_p", [0.05, 0.9, 1.0])
def test_a_coupled_token_is_the_argmax_of_log_p_plus_noise(top_p: float) -> None:
    """Few ids or all of them: the same noise at the same id."""
    logits = np.random.default_rng(16).normal(0, 1, 5000).astype(np.float32)
    p = probabilities(logits, SamplingParams(top_p=top_p))
    for position in range(40):
        with np.errstate(divide="ignore"):
            scores = np.log(p) + gumbel(-7, 2, position, None, 5000)
        assert coupled_token(p, -7, 2, position) == scores.argmax()


def coupled_text(target: Rows, seed: int, choice: int, lengths: Callable[[int], int]) -> list[int]:
    """32 tokens; before each round a drafter of no merit proposes lengths(position) tokens,
    the first half of them often right."""
    rng = np.random.default_rng(seed + 1)
    ids = [ANCHOR]
    while len(ids) <= 32:
        position = len(ids) - 1
        draft: list[int] = []
        for k in range(lengths(position)):
            last = [*ids, *draft][-1]
            own = coupled_token(target[last], seed, choice, position + k)
            draft.append(own if rng.random() < 0.7 else int(rng.integers(V)))
        context = [ids[-1], *draft]
        verdict = verify_coupled(
            lambda k, context=context: target[context[k]], draft, seed, choice, position
        )
        ids.extend(verdict.ids)
    return ids[1:33]


def test_coupled_text_is_a_function_of_seed_and_choice_alone() -> None:
    target = chain(np.random.default_rng(17))
    texts = set()
    for seed in range(20):
        for choice in range(2):
            alone = coupled_text(target, seed, choice, lambda _: 0)
            assert alone == coupled_text(target, seed, choice, lambda _: 5)
            # Trimmed by a rule that looks at whatever it likes: still lossless (L3).
            assert alone == coupled_text(target, seed, choice, lambda n: n * n % 4)
            texts.add(tuple(alone))
    assert len(texts) == 40


def test_a_drafter_with_the_same_noise_agrees_as_often_as_the_bound_says() -> None:
    """With E_v exponential, v wins on both sides iff E_w > E_v max(p_w/p_v, q_w/q_v) for all w:
    P(agree) = sum_v 1 / sum_w max(p_w/p_v, q_w/q_v), which is at least (1 - TV) / (1 + TV)."""
    rng, n = np.random.default_rng(18), 3000
    for sharpness in (0.3, 1.0, 5.0):
        p, q = chain(rng, sharpness)[:2]
        p, q = p / p.sum(), q / q.sum()
        stood = sum(
            verify_coupled(lambda _, p=p: p, [coupled_token(q, seed, 0, 0)], seed, 0, 0).accepted
            for seed in range(n)
        )
        ratio = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
        exact = float((1 / ratio.sum(axis=1)).sum())
        tv = 0.5 * np.abs(p - q).sum()
        four_sigma = 4 * np.sqrt(exact * (1 - exact) / n)
        assert exact >= (1 - tv) / (1 + tv)
        assert abs(stood / n - exact) < four_sigma
        # Independent noise would agree with probability p·q only: the test can tell.
        assert exact - p @ q > 2 * four_sigma


# ---------------------------------------------------------------- L4, and judge as a whole

PENALIZED: dict[str, Any] = {
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.4,
    "logit_bias": {2: 1.0},
    "min_tokens": 5,
    "logprobs": True,
    "top_logprobs": 3,
}
STOP = frozenset({1})
CHOICE = 3


def grammar(context: Sequence[int]) -> NDArray[np.bool_]:
    """A mask that depends on the last token: v may not follow v."""
    return np.arange(V) != context[-1]


def one_by_one(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> tuple[list[int], list[Any]]:
    """What plain decoding chooses: each token is committed before the next is chosen."""
    ids, logprobs = list(output), []
    for raw in logits.numpy():
        banned = STOP if len(ids) < params.min_tokens else ()
        row = adjust(raw, params, TokenCounts.of(prompt, ids), banned, grammar(ids))
        if params.seed is None:
            token = int(row.argmax())
        else:
            token = coupled_token(probabilities(row, params), params.seed, CHOICE, len(ids))
        logprobs.append(token_logprob(raw, token, params.top_logprobs))
        ids.append(token)
    return ids[len(output) :], logprobs


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.0, **PENALIZED),
    SamplingParams(temperature=0.9, top_p=0.9, seed=77, **PENALIZED),
])  # fmt: skip
def test_inside_a_block_each_position_sees_the_tokens_before_it(params: SamplingParams) -> None:
    """Blocks that stand or break at any place give what plain decoding gives, logprobs too."""
    rng = np.random.default_rng(19)
    differs = 0
    for _ in range(60):
        prompt, output = rng.integers(0, V, 3).tolist(), rng.integers(0, V, 2).tolist()
        logits = torch.from_numpy(rng.normal(0, 1.5, (5, V)).astype(np.float32))
        before = logits.clone()
        expected, logprobs = one_by_one(logits, params, prompt, output)
        differs += expected != one_by_one(logits, SamplingParams(
            temperature=params.temperature, top_p=params.top_p, seed=params.seed
        ), prompt, output)[0]  # fmt: skip
        for broken in range(5):
            draft = expected[:4]
            if broken < 4:
                draft[broken] = (draft[broken] + 1) % V
            counts = TokenCounts.of(prompt, output)
            masks = [grammar([*output, *draft[:k]]) for k in range(5)]
            verdict = judge(
                logits, params, draft, output_position=2, rng=rng, choice=CHOICE, stop_ids=STOP,
                counts=counts, mask=masks.__getitem__,
            )  # fmt: skip
            assert list(verdict.ids) == expected[: broken + 1]
            assert list(verdict.logprobs) == logprobs[: broken + 1]
            assert counts.output_counts.sum() == 2
        assert torch.equal(logits, before)
    assert differs > 30  # the penalties did decide something


def test_min_tokens_holds_stop_ids_back_inside_a_block() -> None:
    """Stop id 1 is the likeliest everywhere; with min_tokens = 3 it may come at position 3."""
    logits = torch.tensor([[0.0, 5.0, 1.0]]).repeat(4, 1)
    params = SamplingParams(temperature=0.0, min_tokens=3)
    rng = np.random.default_rng(0)
    verdict = judge(logits, params, [2, 2, 2], output_position=0, rng=rng, stop_ids=STOP)
    assert verdict.ids == (2, 2, 2, 1)


def test_judging_unseeded_rows_is_rejection_sampling_of_p() -> None:
    """The same generator state: judge and the rule on the rows of L2 decide alike."""
    rng = np.random.default_rng(20)
    params = SamplingParams(temperature=0.7, top_p=0.95, frequency_penalty=0.8)
    drafter = ToyDrafter(chain(rng), 4)
    stood = 0
    for case in range(200):
        logits = torch.from_numpy(rng.normal(0, 1, (3, V)).astype(np.float32))
        draft, support_ids, support_weights = drafter.block(3, rng)
        counts = TokenCounts.of([ANCHOR], [3])
        found = judge(
            logits, params, draft[:2], output_position=1, rng=np.random.default_rng(case),
            counts=counts, support_ids=support_ids, support_weights=support_weights,
        )  # fmt: skip

        def row(k: int, logits: Any = logits, draft: Any = draft) -> Rows:
            ahead = TokenCounts.of([ANCHOR], [3, *draft[:k]])
            return probabilities(adjust(logits[k].numpy(), params, ahead), params)

        case_rng = np.random.default_rng(case)
        assert found == verify_rejection(row, draft[:2], support_ids, support_weights, case_rng)
        stood += found.accepted
    assert 0 < stood < 400


def test_penalties_without_counts_are_our_bug() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    with pytest.raises(ValueError, match="counts"):
        judge(torch.zeros(1, V), params, (), output_position=0, rng=np.random.default_rng(0))


def test_a_greedy_row_of_nan_is_an_error() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1)
    logits = torch.full((1, V), torch.nan)
    with pytest.raises(ModelError):
        judge(logits, params, (), output_position=0, rng=np.random.default_rng(0))
