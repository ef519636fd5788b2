"""Measuring T(P, R, B, context) on a backend whose steps take what a formula says, on a clock that
only steps move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.scheduler import StepCost
from dspark.verifier.profiling import (
    CHECKED,
    CONTEXT,
    is_bent,
    points,
    profile_step_cost,
    still_holds,
)

Seconds = Callable[[int, int, int, int], float]  # of (P, R, B, context)


def linear(P: int, R: int, B: int, context: int) -> float:
    return 0.05 + 0.002 * B + 0.003 * R + 4e-6 * context


class TimedBackend:
    """Steps that take `seconds(P, R, B, context)`, or what `disturbed(number of the step, seconds)`
    makes of it. Fails at once if a step is not one that an engine could have composed."""

    block_size = 16

    def __init__(
        self,
        seconds: Seconds = linear,
        *,
        context_length: int = 4096,
        disturbed: Callable[[int, float], float] = lambda _, seconds: seconds,
    ) -> None:
        self.context_length = context_length
        self.now = 0.0
        self.sizes: list[int] = []  # B of every step
        self._seconds = seconds
        self._disturbed = disturbed
        self._blocks = 0

    def clock(self) -> float:
        return self.now

    def allocate(self, blocks: int) -> None:
        self._blocks = blocks

    def forward(self, batch: RaggedBatch) -> StepOutput:
        B, R = len(batch.token_ids), len(batch.context_len)
        new = np.diff(batch.query_start)
        assert batch.query_start[-1] == B
        ends = batch.context_len + new
        places = np.concatenate([np.arange(e - n, e) for e, n in zip(ends, new, strict=True)])
        assert np.array_equal(batch.positions, places)
        assert ends.max() <= self.context_length
        assert batch.block_table.shape[1] * self.block_size >= ends.max()
        used = batch.block_table.ravel()
        assert len(set(used)) == len(used), "sequences share a block"
        assert used.max() < self._blocks
        prefill = len(batch.logit_rows) < B
        if prefill:
            assert np.array_equal(batch.logit_rows, batch.query_start[1:] - 1)
        P, R = (B, 0) if prefill else (0, R)
        seconds = self._seconds(P, R, B, int(batch.context_len.sum()))
        self.now += self._disturbed(len(self.sizes), seconds)
        self.sizes.append(B)
        return StepOutput(torch.zeros(len(batch.logit_rows), 3), {})


def profile(backend: TimedBackend, max_tokens: int = 512, max_sequences: int = 64) -> StepCost:
    return profile_step_cost(backend, max_tokens, max_sequences, clock=backend.clock)


# --- what is measured ----------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 200))
def test_points_reach_from_one_token_to_the_largest_step(
    max_tokens: int, max_sequences: int
) -> None:
    todo = points(max_tokens, max_sequences, CONTEXT)
    sizes = [point.B for point in todo]
    assert (min(sizes), max(sizes)) == (1, max_tokens)
    assert len(set(todo)) == len(todo)
    assert all(point.queries.sum() == point.B and point.queries.min() > 0 for point in todo)
    assert all(point.R <= max(max_sequences, 1) for point in todo)
    # A context of another size at a B that is measured anyway, so that its cost can be told.
    deep = [point for point in todo if point.context > CONTEXT]
    assert deep
    assert {(p.R, p.B) for p in deep} <= {(p.R, p.B) for p in todo if p.context == CONTEXT}


@pytest.mark.parametrize("max_tokens", [1, 100, 512, 700])
@pytest.mark.parametrize("max_sequences", [1, 4, 64])
@pytest.mark.parametrize("context_length", [8, 100, 300, 4096])
def test_every_step_is_one_that_could_be(
    max_tokens: int, max_sequences: int, context_length: int
) -> None:
    backend = TimedBackend(context_length=context_length)
    cost = profile(backend, max_tokens, max_sequences)
    assert cost.tokens[0] == 1
    assert max(backend.sizes) == cost.tokens[-1] <= max_tokens


def test_the_profile_is_what_steps_cost() -> None:
    cost = profile(TimedBackend())
    for P, R, B, context in [(0, 1, 1, 256), (0, 1, 8, 256), (0, 16, 100, 9000), (512, 0, 512, 0)]:
        assert cost.seconds(P, R, B, context) == pytest.approx(linear(P, R, B, context), rel=0.02)


def test_few_sequences_tell_what_context_costs_too() -> None:
    assert profile(TimedBackend(), max_sequences=1).per_context_token_s == pytest.approx(4e-6)


def test_hiccups_and_the_first_round_do_not_count() -> None:
    first = len(points(512, 64, CONTEXT))

    def disturbed(step: int, seconds: float) -> float:
        return seconds * (100.0 if step < first or step % 7 == 0 else 1.0)

    hiccups, none = profile(TimedBackend(disturbed=disturbed)), profile(TimedBackend())
    assert hiccups.tokens == none.tokens
    assert hiccups.table_s == pytest.approx(none.table_s)


def test_a_cold_start_is_not_what_a_step_costs() -> None:
    first = len(points(64, 8, CONTEXT))
    cold = TimedBackend(disturbed=lambda step, seconds: seconds * (100.0 if step < first else 1.0))
    cost = profile_step_cost(cold, 64, 8, repeats=1, clock=cold.clock)
    assert cost.seconds(0, 1, 1, CONTEXT) == pytest.approx(linear(0, 1, 1, CONTEXT), rel=0.02)


def test_a_machine_that_drifts_bends_nothing() -> None:
    """Points are taken in rounds, so each of them sees the machine at every speed."""
    drifting = TimedBackend(disturbed=lambda step, seconds: seconds * (1 + step / 100))
    slow, steady = profile(drifting), profile(TimedBackend())
    pace = np.array(slow.table_s) / np.array(steady.table_s)
    assert pace.max() < 1.2 * pace.min()
    assert pace.min() > 1.5


def test_progress_counts_steps() -> None:
    told: list[tuple[int, int]] = []
    backend = TimedBackend()
    profile_step_cost(
        backend, 64, 8, repeats=2, progress=lambda *step: told.append(step), clock=backend.clock
    )
    whole = 3 * len(points(64, 8, CONTEXT))
    assert told == [(done, whole) for done in range(1, whole + 1)]


# --- whether a kept profile holds ----------------------------------------------------------------


def bent(P: int, R: int, B: int, context: int) -> float:
    """As measured beside another process: whatever needs more than one thread's share waits."""
    return linear(P, R, B, context) * (1.0 if B == 1 else 4.0)


def holds(cost: StepCost, backend: TimedBackend) -> bool:
    return still_holds(cost, backend, clock=backend.clock)


def test_a_profile_holds_on_the_machine_it_is_of() -> None:
    backend = TimedBackend()
    assert holds(profile(TimedBackend()), backend)
    assert set(backend.sizes) == set(CHECKED)
    assert len(backend.sizes) == 9, "a quick look is quick"


def test_a_machine_of_another_speed_is_no_reason_to_measure_again() -> None:
    assert holds(profile(TimedBackend()), TimedBackend(lambda *step: 3 * linear(*step)))


def test_a_profile_of_a_busy_machine_does_not_hold() -> None:
    busy = profile(TimedBackend(bent))
    assert not holds(busy, TimedBackend())
    assert not holds(profile(TimedBackend()), TimedBackend(bent))


def test_one_hiccup_in_a_look_is_looked_past() -> None:
    backend = TimedBackend(disturbed=lambda step, seconds: seconds * (9.0 if step == 4 else 1.0))
    assert holds(profile(TimedBackend()), backend)
    assert len(backend.sizes) == 9


def test_looks_that_contradict_each_other_prove_nothing() -> None:
    """A machine too busy to tell is too busy to measure on."""

    def disturbed(step: int, seconds: float) -> float:
        look, point = step // 9, step % 3
        return seconds * (4.0 if point == look else 1.0)

    backend = TimedBackend(disturbed=disturbed)
    assert holds(profile(TimedBackend()), backend)
    assert len(backend.sizes) == 18


@pytest.mark.parametrize("context_length", [1, 8, 20])
def test_a_context_too_short_for_all_sizes(context_length: int) -> None:
    backend = TimedBackend(context_length=context_length)
    assert holds(profile(TimedBackend(context_length=context_length), 32), backend)


@pytest.mark.parametrize(
    ("expected", "measured", "answer"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], False),
        ([1.0, 2.0, 4.0], [10.0, 20.0, 40.0], False),
        ([1.0, 2.0, 4.0], [1.0, 2.0, 5.9], False),
        ([1.0, 2.0, 4.0], [1.0, 2.0, 6.1], True),
        ([1.0, 2.0, 4.0], [1.6, 2.0, 4.0], True),
        ([1.0, 2.0, 4.0], [1.25, 2.0, 3.2], True),
        ([1.0], [7.0], False),
    ],
)
def test_bent_is_by_ratio(
    expected: Sequence[float], measured: Sequence[float], answer: bool
) -> None:
    assert is_bent(expected, measured) is answer
    assert is_bent(measured, expected) is answer
