"""Measuring what a step costs on this machine: T(P, R, B, context) of design.md §6."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dspark.models.targets.backend import Backend, RaggedBatch
from dspark.models.verification import argmax_rows
from dspark.scheduler import StepCost

# Matrix kernels change shape at small sizes, so those are measured one by one.
GRID = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXT = 256
REPEATS = 5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One kind of step: R sequences of B / R tokens each, `context` tokens in the cache each.

    prefill: the tokens are prompt, so only the last row's logits are wanted.
    """

    R: int
    B: int
    context: int
    prefill: bool = False

    @property
    def sample(self) -> tuple[int, int, int, int]:
        """(P, R, B, context) as the step cost counts them."""
        if self.prefill:
            return self.B, 0, self.B, self.R * self.context
        return 0, self.R, self.B, self.R * self.context


def points(max_tokens: int, max_sequences: int, context: int) -> list[Point]:
    """A grid over B with one sequence, and a few steps that tell sequences and context apart."""
    grid = [Point(1, B, context, prefill=B > 128) for B in GRID if B <= max_tokens]
    batches = [R for R in (4, 8, 16, 32, 64) if R <= max_sequences]
    wide = [Point(R, R, context) for R in batches]
    deep = [Point(R, R, 4 * context) for R in batches[1:2]]
    return grid + wide + deep


def profile_step_cost(
    backend: Backend,
    max_tokens: int,
    max_sequences: int,
    *,
    repeats: int = REPEATS,
    progress: Progress = lambda _done, _all: None,
) -> StepCost:
    """Medians of `repeats` steps a point, taken in rounds so that drift of the machine cancels.

    Allocates the backend's blocks anew; the caller allocates its own afterwards. progress(done, all)
    counts steps.
    """
    context = min(CONTEXT, (backend.context_length - 1) // 8)
    most = backend.context_length - context
    todo = points(min(max_tokens, most), max_sequences, context)
    blocks = max(p.R * _blocks(p, backend.block_size) for p in todo)
    backend.allocate(blocks)
    batches = [synthetic_batch(p, backend.block_size) for p in todo]
    seconds = np.empty((repeats, len(todo)))
    for done, (i, (j, batch)) in enumerate(
        itertools.product(range(-1, repeats), enumerate(batches)), start=1
    ):
        begin = time.perf_counter()
        argmax_rows(backend.forward(batch).logits)
        if i >= 0:  # the first round warms up
            seconds[i, j] = time.perf_counter() - begin
        progress(done, (repeats + 1) * len(todo))
    medians = np.median(seconds, axis=0)
    return StepCost.fit([(*p.sample, float(s)) for p, s in zip(todo, medians, strict=True)])


def _blocks(point: Point, block_size: int) -> int:
    return -(-(point.context + point.B // point.R) // block_size)


def synthetic_batch(point: Point, block_size: int) -> RaggedBatch:
    """A step of the shape of `point` over zeroed blocks; what the tokens are does not matter."""
    each = point.B // point.R
    offsets = np.tile(np.arange(each, dtype=np.int32), point.R)
    per_row = _blocks(point, block_size)
    rows = np.arange(point.B, dtype=np.int32)
    return RaggedBatch(
        token_ids=np.ones(point.B, np.int32),
        positions=offsets + np.int32(point.context),
        query_start=np.arange(0, point.B + 1, each, dtype=np.int32),
        context_len=np.full(point.R, point.context, np.int32),
        block_table=np.arange(point.R * per_row, dtype=np.int32).reshape(point.R, per_row),
        logit_rows=rows[each - 1 :: each] if point.prefill else rows,
        feature_rows=np.empty(0, np.int32),
    )
