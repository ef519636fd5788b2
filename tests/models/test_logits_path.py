"""The short cuts of the path from logits to tokens (issue 7, Build 5) against plain definitions.

Each definition here sorts and copies as it likes. What the path promises besides: the same numbers
whatever was judged before in the same scratch, and no array of the vocabulary's size for a row.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.core.noise import NoiseScratch, gumbel, gumbel_of_gaps, noise_gaps
from dspark.core.sampling import SamplingParams
from dspark.core.verdicts import Verdict
from dspark.models.verification import (
    Distribution,
    Scratch,
    TokenCounts,
    adjust,
    coupled_token,
    distribution,
    draw,
    judge,
    largest,
    nucleus,
)

Row = NDArray[np.float64]
Logits = NDArray[np.float32]


def logits_of(kind: str, size: int, seed: int) -> Logits:
    """Rows as models give them, and rows on which a selection by thresholds could go wrong."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 2.5, size)
    if kind == "equal":
        row[:] = 1.5
    elif kind == "ties":
        row = np.round(row)
    elif kind == "flat":
        row /= 100
    elif kind == "peaked":
        row[rng.integers(0, size, 20)] = rng.uniform(8, 18, 20)
    elif kind == "masked":
        row[rng.random(size) < 0.9] = -np.inf
        row[rng.integers(size)] = 1.0
    elif kind == "one left":
        row[:] = -np.inf
        row[rng.integers(size)] = -3.0
    return row.astype(np.float32)


KINDS = st.sampled_from(["normal", "equal", "ties", "flat", "peaked", "masked", "one left"])
# Below the group maxima's reach, above it, and above what is counted into bins; ends of all kinds.
SIZES = st.sampled_from([1, 2, 5, 37, 400, 2047, 9001, 20_000])
SEEDS = st.integers(0, 2**32)
TOP_P = st.sampled_from([1e-9, 0.1, 0.5, 0.75, 0.9, 0.99, 1 - 1e-12])


def by_rank(values: NDArray[Any]) -> NDArray[np.int64]:
    """Indices, the largest first, of equal ones the lower first."""
    return np.lexsort((np.arange(len(values)), -values))


def held_by(weights: Row, top_p: float) -> NDArray[np.int64]:
    """The nucleus by its definition: everything in order, until top_p of the mass is held."""
    order = by_rank(weights)
    held = np.cumsum(weights[order])
    size = min(int(np.searchsorted(held, top_p * weights.sum())) + 1, len(weights))
    return np.sort(order[:size])


def plain(row: Logits, params: SamplingParams) -> Row:
    """p of L2 by its definition, over the whole row at each stage."""
    p = np.exp((row.astype(np.float64) - row.max()) * (1.0 / params.temperature))

    def cut(kept: NDArray[np.int64]) -> Row:
        left: Row = np.zeros_like(p)
        left[kept] = p[kept]
        return left

    if 0 < params.top_k < len(row):
        p = cut(by_rank(row)[: params.top_k])
    if params.top_p < 1.0:
        p = cut(held_by(p, params.top_p))
    if params.min_p > 0.0:
        p = cut(np.flatnonzero(p >= params.min_p))
    scaled: Row = p * (1.0 / p.sum())
    return scaled


@settings(max_examples=120, deadline=None)
@given(KINDS, SIZES, SEEDS, st.sampled_from([1, 2, 20, 50, 200, 1000, 10**6]))
def test_the_largest_are_those_of_a_full_sort(kind: str, size: int, seed: int, n: int) -> None:
    row, n = logits_of(kind, size, seed), min(n, size)
    np.testing.assert_array_equal(largest(row, n), np.sort(by_rank(row)[:n]))


@settings(max_examples=120, deadline=None)
@given(KINDS, SIZES, SEEDS, TOP_P)
def test_the_nucleus_is_that_of_a_full_sort(kind: str, size: int, seed: int, top_p: float) -> None:
    row = logits_of(kind, size, seed).astype(np.float64)
    weights = np.exp(row - row.max())
    np.testing.assert_array_equal(nucleus(weights, top_p), held_by(weights, top_p))


@settings(max_examples=150, deadline=None)
@given(
    kind=KINDS,
    size=SIZES,
    seed=SEEDS,
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.01, 0.7, 1.0, 4.0]),
        top_k=st.sampled_from([0, 2, 50, 3000]),
        top_p=TOP_P | st.just(1.0),
        min_p=st.sampled_from([0.0, 1e-300, 0.01, 0.5, 1.0]),
    ),
)
def test_a_distribution_is_the_definition(
    kind: str, size: int, seed: int, params: SamplingParams
) -> None:
    row = logits_of(kind, size, seed)
    expected = plain(row, params)
    found = distribution(row, params)
    np.testing.assert_array_equal(found.dense(size) > 0, expected > 0)
    np.testing.assert_allclose(found.dense(size), expected, rtol=1e-12)
    for token in (0, size // 2, size - 1, int(expected.argmax())):
        assert found.at(token) == pytest.approx(float(expected[token]), rel=1e-12, abs=0.0)


# One id, no multiple of four, more than one chunk of noise.
@settings(max_examples=60, deadline=None)
@given(
    kind=KINDS,
    size=st.sampled_from([1, 6, 403, 20_000, 70_001]),
    seed=SEEDS,
    position=st.integers(0, 2**32 - 1),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 4.0]),
        top_k=st.sampled_from([0, 40]),
        top_p=st.sampled_from([0.5, 0.95, 1.0]),
    ),
)
def test_a_coupled_token_is_the_argmax_over_the_whole_vocabulary(
    kind: str, size: int, seed: int, position: int, params: SamplingParams
) -> None:
    row = logits_of(kind, size, seed)
    p = distribution(row, params)
    dense = p.dense(size)
    with np.errstate(divide="ignore"):
        scores = np.log(dense) + gumbel(seed, 1, position, None, size)
    scratch = Scratch()
    assert coupled_token(dense, seed, 1, position, scratch) == scores.argmax()
    assert coupled_token(distribution(row, params, scratch), seed, 1, position, scratch) == (
        scores.argmax()
    )


def test_a_small_gap_alone_does_not_win() -> None:
    """Of few ids the winner often has a large -log(u), where 1 - u says little of it."""
    p = np.array([0.6, 0.2, 0.1, 0.06, 0.04])
    for position in range(2000):
        scores = np.log(p) + gumbel(11, 0, position, None, len(p))
        assert coupled_token(p, 11, 0, position) == scores.argmax()


def test_gaps_are_the_noise() -> None:
    """Bit for bit, whatever the chunks."""
    size = 1003
    whole = gumbel(-9, 3, 2**31, None, size)
    for blocks in (1, 7, 251, 400):
        for start, gaps in noise_gaps(-9, 3, 2**31, size, NoiseScratch(blocks)):
            ids = start + np.arange(gaps.size).reshape(-1, 4).T
            there = ids < size
            np.testing.assert_array_equal(gumbel_of_gaps(gaps.copy())[there], whole[ids[there]])


@settings(max_examples=60, deadline=None)
@given(KINDS, st.sampled_from([6, 403, 20_000]), SEEDS, st.sampled_from([0.5, 1.0]))
def test_a_residual_is_drawn_and_leaves_no_trace(
    kind: str, size: int, seed: int, top_p: float
) -> None:
    row = logits_of(kind, size, seed)
    found = distribution(row, SamplingParams(top_p=top_p))
    dense = found.dense(size)
    rng = np.random.default_rng(seed)
    ids = np.unique(rng.integers(0, size, 100))
    q = dense[ids] * rng.uniform(0, 2, len(ids))
    residual = dense.copy()
    residual[ids] = np.maximum(residual[ids] - q, 0.0)
    before = found.weights.copy()
    token = found.draw_residual(ids, q, np.random.default_rng(5))
    if residual.any():
        ids = np.arange(size) if found.ids is None else found.ids
        assert token == ids[draw(residual[ids], np.random.default_rng(5))]
    else:
        assert token is None
    np.testing.assert_array_equal(found.weights, before)


def test_a_residual_of_nothing_is_none() -> None:
    p = np.array([0.25, 0.0, 0.75])
    for one in (Distribution.of(p), Distribution(p[[0, 2]], np.array([0, 2]))):
        assert one.draw_residual(np.array([2, 0]), p[[2, 0]], np.random.default_rng(0)) is None
        assert one.at(0) == 0.25
        assert one.at(1) == 0.0


def test_a_row_without_anything_to_apply_is_not_copied() -> None:
    row = logits_of("normal", 100, 0)
    counts = TokenCounts.of([1], [2])
    assert adjust(row, SamplingParams(top_p=0.5), counts) is row
    for params in (SamplingParams(presence_penalty=1.0), SamplingParams(logit_bias={3: 1.0})):
        before = row.copy()
        assert adjust(row, params, counts) is not row
        np.testing.assert_array_equal(row, before)


V = 2**16
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.1,
    "logit_bias": {5: 2.0},
    "min_tokens": 900,
}
MODES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k": {"top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "seeded": {"seed": 7},
    "seeded top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalties": {"temperature": 0.0, **PENALTIES},
    "log-probabilities": {"temperature": 0.0, "logprobs": True, "top_logprobs": 20},
    "all": {
        **PENALTIES, "temperature": 0.8, "top_k": 200, "top_p": 0.9, "min_p": 0.01, "seed": 3,
        "logprobs": True, "top_logprobs": 5,
    },
}  # fmt: skip


def judged(params: SamplingParams, scratch: Scratch | None, size: int = V) -> Verdict:
    """Two rows with a draft token that may stand, from a support."""
    logits = torch.from_numpy(np.stack([logits_of("peaked", size, seed) for seed in (1, 2)]))
    tracemalloc.reset_peak()
    best = int(logits[0].argmax())
    return judge(
        logits, params, [best], output_position=600, rng=np.random.default_rng(4), scratch=scratch,
        counts=TokenCounts.of(range(0, 300, 7), range(0, 600, 5)), stop_ids=(2,),
        support_ids=np.array([[best, best ^ 1]], np.int32),
        support_weights=np.ones((1, 2), np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_row_costs_no_array_of_its_size(mode: str) -> None:
    """Less than half a row of float32 at the most; masks of a byte an id are below that. With a
    fresh scratch it is more wherever float64 or an adjusted row is needed: the measure sees it."""
    params = SamplingParams(**MODES[mode])
    scratch = Scratch()
    judged(params, scratch)
    tracemalloc.start()
    try:
        peaks = []
        for kept in (scratch, None):
            judged(params, kept)  # resets the peak once its logits are there
            logits = 2 * 4 * V
            peaks.append(tracemalloc.get_traced_memory()[1] - logits)
    finally:
        tracemalloc.stop()
    assert peaks[0] < 2 * V
    assert peaks[1] > 4 * V or mode in ("top-k", "min-p")


def test_verdicts_do_not_depend_on_what_the_scratch_was_used_for() -> None:
    shared = Scratch()
    order = np.random.default_rng(3).permutation(list(MODES) * 3)
    for mode, size in zip(order, [V, 4096, 1003] * len(MODES), strict=True):
        params = SamplingParams(**MODES[mode])
        assert judged(params, shared, size) == judged(params, None, size)
