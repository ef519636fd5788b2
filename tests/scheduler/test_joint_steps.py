"""Θ_v(K) of many verifiers at once: the same T as `StepCost`, and no K missed (§5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dspark.scheduler import StepCost
from dspark.scheduler.joint.steps import (
    FloatArray,
    Steps,
    Tables,
    admitted,
    best_capacity,
    level_curves,
    mean_steps,
)

from .toy_cluster import PATIENT, step_costs


@dataclass(frozen=True)
class Step:
    """One verifier's mean step, its supply of drafts (counts need not be whole) and overhead."""

    cost: StepCost
    P: int
    R: int
    context: int
    count: list[float]
    gain: list[float]
    overhead: float

    @property
    def tokens(self) -> int:
        return int(np.ceil(sum(self.count) - 1e-6))

    def tau(self, K: float, f: float = 1.0) -> float:
        """R and the K best of the supply, of which only a part f is there."""
        tau, left = float(self.R), K
        for n, a in zip(self.count, self.gain, strict=True):
            tau += min(n * f, left) * a
            left -= min(n * f, left)
        return tau

    def theta(self, K: int) -> float:
        seconds = self.cost.decode_seconds(self.P, self.R, self.P + self.R + K, self.context)
        return self.tau(K) / (seconds + self.overhead)


Problem = tuple[Steps, FloatArray, FloatArray, FloatArray, FloatArray]


def steps_of(steps: Sequence[Step]) -> Problem:
    """`best_capacity`'s arguments."""
    tables = Tables.of([step.cost for step in steps])

    def column(name: str) -> FloatArray:
        return np.array([getattr(step, name) for step in steps], np.float64)

    built = mean_steps(tables, column("P"), column("R"), column("context"), column("tokens"))
    return built, column("count"), column("gain"), column("R"), column("overhead")


@st.composite
def mean_step(draw: st.DrawFn, convex: bool = False, N: int = 6) -> Step:
    counts = st.one_of(st.integers(0, 20).map(float), st.floats(0.0, 20.0))
    gains = draw(st.lists(st.floats(0.0, 1.0), min_size=N, max_size=N))
    return Step(
        draw(step_costs(convex)),
        draw(st.integers(0, 50)),
        draw(st.integers(1, 30)),
        draw(st.integers(0, 10_000)),
        draw(st.lists(counts, min_size=N, max_size=N)),
        sorted(gains, reverse=True),
        draw(st.sampled_from([0.0, 0.01])),
    )


many = st.lists(mean_step(), min_size=1, max_size=4)


@settings(PATIENT, max_examples=40)
@given(many)
def test_seconds_are_step_costs_at_every_k(steps: list[Step]) -> None:
    built = steps_of(steps)[0]
    for v, step in enumerate(steps):
        K = np.arange(step.tokens + 1)
        row = built.rows(np.array([v])).seconds(K[None, :].astype(float))[0]
        curve = step.cost.curve(step.P, step.R, step.context, step.tokens)
        assert row == pytest.approx(curve, rel=1e-9)


@settings(PATIENT, max_examples=100)
@given(many)
def test_k_is_the_best_of_all(steps: list[Step]) -> None:
    best = best_capacity(*steps_of(steps))
    for v, step in enumerate(steps):
        theta = [step.theta(K) for K in range(step.tokens + 1)]
        K = int(best.K[v])
        assert best.theta[v] == pytest.approx(max(theta), rel=1e-9)
        assert theta[K] == pytest.approx(max(theta), rel=1e-9)
        assert all(t < max(theta) * (1 + 1e-9) for t in theta[:K])
        at_K = step.cost.seconds(step.P, step.R, step.P + step.R + K, step.context)
        assert best.seconds[v] == pytest.approx(at_K)


def test_of_equals_the_fewest_tokens() -> None:
    """T doubles where τ does: Θ is the same at K = 0 and K = 2."""
    step = Step(StepCost.from_table({2: 1.0, 3: 2.0, 4: 2.0}), 0, 2, 0, [2.0], [1.0], 0.0)
    assert step.theta(0) == step.theta(2)
    assert best_capacity(*steps_of([step])).K.tolist() == [0]


@settings(PATIENT, max_examples=60)
@given(mean_step(convex=True), st.data())
def test_raised_survivals_never_lower_k_where_t_is_convex_and_they_rise_alike(
    step: Step, data: st.DataObject
) -> None:
    """By one factor. If only the best survive more, Θ rises and the marginal one is dropped."""
    assume(sum(step.count) > 0)
    factor = data.draw(st.floats(1.0, 1.0 / max(*step.gain, 0.1)))
    raised = Step(
        step.cost, step.P, step.R, step.context, step.count,
        [a * factor for a in step.gain], step.overhead,
    )  # fmt: skip
    low, high = (best_capacity(*steps_of([s])) for s in (step, raised))
    better = high.theta[0] - raised.theta(int(low.K[0]))
    assert high.K[0] >= low.K[0] or better < 1e-9 * high.theta[0]


@settings(PATIENT, max_examples=40)
@given(mean_step(), st.data())
def test_raised_survivals_never_lower_theta(step: Step, data: st.DataObject) -> None:
    more = data.draw(st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6))
    gain = sorted(np.maximum(step.gain, more).tolist(), reverse=True)
    raised = Step(step.cost, step.P, step.R, step.context, step.count, gain, step.overhead)
    low, high = (best_capacity(*steps_of([s])) for s in (step, raised))
    assert high.theta[0] >= low.theta[0] * (1 - 1e-9)


@settings(PATIENT, max_examples=60)
@given(many, st.sampled_from([0.25, 0.5, 1.0]))
def test_a_level_is_what_so_many_drafts_are_worth(steps: list[Step], f: float) -> None:
    """Never below the best whole K, and above it by less than one more draft token could bring."""
    built, count, gain, tau0, overhead = steps_of(steps)
    theta, _ = level_curves(built, count, gain, tau0, overhead, np.array([f]))
    whole = best_capacity(built, count * f, gain, tau0, overhead * f)
    for v, step in enumerate(steps):
        assert theta[v, 0] >= whole.theta[v] * (1 - 1e-9)
        plain = step.cost.seconds(0, step.R, step.R, step.context)
        assert theta[v, 0] <= whole.theta[v] + 1.0 / plain + 1e-9


def test_what_is_admitted_of_each_bin() -> None:
    share = admitted(np.array([[2.0, 0.0, 4.0], [1.0, 1.0, 1.0]]), np.array([3.0, 0.0]))
    assert share.tolist() == [[1.0, 0.0, 0.25], [0.0, 0.0, 0.0]]


def test_tables_are_made_once_for_the_same_costs() -> None:
    costs = [StepCost.from_table({1: 1.0}), StepCost.from_table({1: 1.0, 4: 2.0})]
    tables = Tables.of(costs)
    assert Tables.of(list(costs), tables) is tables
    assert Tables.of(costs[::-1], tables) is not tables
