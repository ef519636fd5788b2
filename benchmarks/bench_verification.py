"""What judging one row costs at the default model's vocabulary.

    pytest benchmarks/bench_verification.py --benchmark-columns=median,min --benchmark-sort=name

Each benchmark is one sequence without a draft (ℓ = 0): one row in, one token out. Logits are of
a language model's shape: a few likely tokens over a long tail.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from dspark.core.noise import gumbel
from dspark.core.sampling import SamplingParams
from dspark.models.verification import TokenCounts, argmax_rows, judge

V = 49152
MODES = {
    "greedy, penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1
    ),
    "greedy, 20 logprobs": SamplingParams(temperature=0.0, logprobs=True, top_logprobs=20),
    "temperature 1": SamplingParams(),
    "temperature 1, seed": SamplingParams(seed=7),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top-p 0.9, seed": SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.9, penalties": SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5
    ),
}


def logit_rows(rows: int) -> torch.Tensor:
    """float32 [rows, V]: standard deviation 2.5, and twenty candidates 8 to 18 above the mean."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2.5, (rows, V))
    logits[:, rng.integers(0, V, 20)] = rng.uniform(8, 18, (rows, 20))
    return torch.from_numpy(logits.astype(np.float32))


@pytest.mark.parametrize("name", MODES)
def test_judge_one_row(benchmark: BenchmarkFixture, name: str) -> None:
    rng = np.random.default_rng(2)
    prompt, output = rng.integers(0, V, 500), rng.integers(0, V, 500)
    counts = TokenCounts.of(prompt.tolist(), output.tolist())
    logits = logit_rows(1)
    params = MODES[name]
    verdict = benchmark(
        lambda: judge(logits, params, (), output_position=500, rng=rng, counts=counts)
    )
    assert len(verdict.ids) == 1


def test_plain_greedy_step_of_96_rows(benchmark: BenchmarkFixture) -> None:
    """16 sequences with ℓ = 5: one call for the whole step."""
    logits = logit_rows(96)
    assert len(benchmark(lambda: argmax_rows(logits))) == 96


def test_penalty_counts_of_a_block_position(benchmark: BenchmarkFixture) -> None:
    """500 distinct generated tokens, and seven of a draft on top."""
    counts = TokenCounts.of((), range(500))
    assert len(benchmark(lambda: counts.after(range(498, 505))).output_ids) == 505


@pytest.mark.parametrize("ids", [None, 128], ids=["vocabulary", "128 ids"])
def test_gumbel_noise(benchmark: BenchmarkFixture, ids: int | None) -> None:
    token_ids = None if ids is None else np.arange(ids) * 100
    assert len(benchmark(lambda: gumbel(7, 0, 500, token_ids, V))) == (ids or V)
