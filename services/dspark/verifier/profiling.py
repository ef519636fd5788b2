"""Measuring what a step costs on this machine: T(P, R, B, context) of design.md §6."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.models.targets.backend import Backend, RaggedBatch
from dspark.models.verification import argmax_rows
from dspark.scheduler import StepCost

# Matrix kernels change shape at small sizes, so those are measured one by one.
GRID = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXT = 256
REPEATS = 5

# (R, B) of steps that verify few drafts; their B is on the grid, where one sequence stands too.
MIXED = ((4, 5), (12, 16), (15, 16), (31, 32))

# Verify lengths follow from how step costs compare with each other, so a kept cost is checked by
# that, at sizes that are quick and where a busy machine bends the curve.
CHECKED = (1, 8, 32)
BENT = 1.5

Progress = Callable[[int, int], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One kind of step: R sequences of B // R tokens each, the last with the rest of B too;
    `context` tokens in the cache each.

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

    @property
    def queries(self) -> NDArray[np.int32]:
        """int32 [R]: tokens of each sequence."""
        queries = np.full(self.R, self.B // self.R, np.int32)
        queries[-1] += self.B % self.R
        return queries


def points(max_tokens: int, max_sequences: int, context: int) -> list[Point]:
    """A grid over B up to max_tokens with one sequence, and a few steps that tell apart sequences,
    context, and queries of unequal length, as a step has them that verifies drafts."""
    sizes = [*(B for B in GRID if B < max_tokens), max_tokens]
    grid = [Point(1, B, context, prefill=B > 128) for B in sizes]
    batches = [R for R in (4, 8, 16, 32, 64) if R <= min(max_sequences, max_tokens)]
    wide = [Point(R, R, context) for R in batches]
    R = ([1, *batches])[:3][-1]
    mixed = [Point(r, B, context) for r, B in MIXED if r <= max_sequences and B in sizes]
    return [*grid, *wide, *mixed, Point(R, R, 4 * context)]


def profile_step_cost(
    backend: Backend,
    max_tokens: int,
    max_sequences: int,
    *,
    repeats: int = REPEATS,
    progress: Progress = lambda _done, _all: None,
    clock: Clock = time.perf_counter,
) -> StepCost:
    """Medians of `repeats` steps a point, taken in rounds so that drift of the machine cancels.

    Allocates the backend's blocks anew; the caller allocates its own afterwards.
    progress(done, all) counts steps.
    """
    context = _context(backend)
    most = min(max_tokens, backend.context_length - context)
    todo = points(most, max_sequences, context)
    seconds = _time(backend, todo, 1 + repeats, clock, progress)[1:]  # the first round warms up
    medians = np.median(seconds, axis=0)
    return StepCost.fit([(*p.sample, float(s)) for p, s in zip(todo, medians, strict=True)])


def still_holds(cost: StepCost, backend: Backend, *, clock: Clock = time.perf_counter) -> bool:
    """Whether a few quick steps compare with each other as `cost` says.

    No only if two looks contradict it and not one another: else it is this moment that is noisy,
    and a new measurement would be too. Allocates anew.
    """
    context = _context(backend)
    todo = [Point(1, B, context) for B in CHECKED if B + context <= backend.context_length]
    kept = [cost.seconds(*point.sample) for point in todo]
    first = _time(backend, todo, 3, clock).min(axis=0)
    if not is_bent(kept, first):
        return True
    second = _time(backend, todo, 3, clock).min(axis=0)
    return not is_bent(kept, second) or is_bent(first, second)


def is_bent(expected: ArrayLike, measured: ArrayLike) -> bool:
    """Whether two of the points compare otherwise than expected, by more than a factor of BENT. A
    machine that is faster or slower as a whole is not bent: verify lengths stay the same."""
    pace = np.asarray(measured) / np.asarray(expected)
    return bool(pace.max() > BENT * pace.min())


def _context(backend: Backend) -> int:
    return min(CONTEXT, (backend.context_length - 1) // 8)


def _time(
    backend: Backend,
    todo: Sequence[Point],
    rounds: int,
    clock: Clock,
    progress: Progress = lambda _done, _all: None,
) -> NDArray[np.float64]:
    """Seconds of each point's step, float64 [rounds, points]."""
    backend.allocate(max(p.R * _blocks(p, backend.block_size) for p in todo))
    batches = [synthetic_batch(point, backend.block_size) for point in todo]
    seconds = np.empty((rounds, len(todo)))
    for step in range(seconds.size):
        at = divmod(step, len(todo))
        begin = clock()
        argmax_rows(backend.forward(batches[at[1]]).logits)
        seconds[at] = clock() - begin
        progress(step + 1, seconds.size)
    return seconds


def _blocks(point: Point, block_size: int) -> int:
    return -(-(point.context + int(point.queries[-1])) // block_size)


def synthetic_batch(point: Point, block_size: int) -> RaggedBatch:
    """A step of the shape of `point` over zeroed blocks; what the tokens are does not matter."""
    queries = point.queries
    ends = np.cumsum(queries, dtype=np.int32)
    rows = np.arange(point.B, dtype=np.int32)
    offsets = rows - np.repeat(ends - queries, queries)
    per_row = _blocks(point, block_size)
    return RaggedBatch(
        token_ids=np.ones(point.B, np.int32),
        positions=offsets + np.int32(point.context),
        query_start=np.concatenate([[0], ends], dtype=np.int32),
        context_len=np.full(point.R, point.context, np.int32),
        block_table=np.arange(point.R * per_row, dtype=np.int32).reshape(point.R, per_row),
        logit_rows=ends - 1 if point.prefill else rows,
        feature_rows=np.empty(0, np.int32),
    )
