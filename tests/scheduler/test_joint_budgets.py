"""Water-filling of drafters: against every way to buy levels, and never more than there is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from dspark.scheduler.joint.budgets import envelope, share_out
from dspark.scheduler.joint.pipes import Pipes
from dspark.scheduler.joint.steps import FloatArray

from .toy_cluster import PATIENT

Curves = tuple[FloatArray, FloatArray]  # cost, value [V, L + 1]


@st.composite
def curves(draw: st.DrawFn, V: int = 3, L: int = 4, concave: bool = False) -> Curves:
    """Levels of up to V verifiers: costs rise, values do not fall, jagged unless concave."""
    n = draw(st.integers(1, V))
    width = st.floats(0.5, 3.0)
    rise = st.one_of(st.just(0.0), st.floats(0.0, 5.0))
    cost, value = np.zeros((2, n, L + 1))
    for v in range(n):
        widths = draw(st.lists(width, min_size=L, max_size=L))
        slopes = draw(st.lists(rise, min_size=L, max_size=L))
        slopes = sorted(slopes, reverse=True) if concave else slopes
        cost[v, 1:] = np.cumsum(widths)
        value[v] = 10.0 + np.cumsum([0.0, *np.multiply(widths, slopes)])
    return cost, value


def worth(curve: Curves, tokens: FloatArray) -> float:
    """What the levels within reach are worth."""
    cost, value = curve
    return float(np.where(cost <= tokens[:, None] + 1e-6, value, 0.0).max(axis=1).sum())


def best_levels(curve: Curves, capacity: float) -> float:
    """Brute force over all ways to buy one level each."""
    cost, value = curve
    return max(
        sum(value[v, level] for v, level in enumerate(levels))
        for levels in itertools.product(range(cost.shape[1]), repeat=len(cost))
        if sum(cost[v, level] for v, level in enumerate(levels)) <= capacity + 1e-9
    )


def pipes_of(capacity: Sequence[float], arcs: Sequence[Mapping[int, float]]) -> Pipes:
    flat = [(v, d, most) for v, own in enumerate(arcs) for d, most in own.items()]
    of, to, most = np.array(flat, np.float64).reshape(-1, 3).T
    return Pipes(np.array(capacity), len(arcs), of.astype(np.intp), to.astype(np.intp), most)


def one_drafter(curve: Curves, capacity: float) -> Pipes:
    return pipes_of([capacity], [{0: float(most)} for most in curve[0].max(axis=1)])


@settings(PATIENT, max_examples=150)
@given(curves(), st.floats(0.0, 30.0))
def test_one_drafter_is_shared_as_well_as_brute_force_but_for_one_step(
    curve: Curves, capacity: float
) -> None:
    """The loss is at most the one step of one envelope that could not be paid whole."""
    pipes = one_drafter(curve, capacity)
    tokens = share_out(*curve, pipes, np.zeros(len(curve[0])))
    verifier, level, gain = envelope(*curve)
    steps, at = [0.0], dict.fromkeys(range(len(curve[0])), 0)
    for v, to, slope in zip(verifier.tolist(), level.tolist(), gain.tolist(), strict=True):
        steps.append(slope * (curve[0][v, to] - curve[0][v, at[v]]))
        at[v] = to
    assert worth(curve, tokens) >= best_levels(curve, capacity) - max(steps) - 1e-6
    assert tokens.sum() <= capacity * (1 + 1e-9) + 1e-6
    assert tokens.sum() == pytest.approx(
        sum(pipes.given(v)[0] for v in range(len(tokens))), abs=1e-6
    )


@settings(PATIENT, max_examples=100)
@given(curves(concave=True), st.floats(0.0, 30.0))
def test_on_concave_levels_nothing_is_lost_but_inside_a_level(
    curve: Curves, capacity: float
) -> None:
    """Read as lines between levels, what is given is the optimum of the linear program."""
    cost, value = curve
    tokens = share_out(cost, value, one_drafter(curve, capacity), np.zeros(len(cost)))
    made = sum(np.interp(t, c, y) for t, c, y in zip(tokens, cost, value, strict=True))
    widths = np.diff(cost)
    slopes = np.diff(value) / widths
    best = linprog(
        -slopes.ravel(),
        A_ub=np.ones((1, slopes.size)),
        b_ub=[capacity],
        bounds=[(0, width) for width in widths.ravel()],
    )
    assert made == pytest.approx(value[:, 0].sum() - best.fun, rel=2e-3)


@settings(PATIENT, max_examples=100)
@given(curves(concave=True), st.data())
def test_many_drafters_are_shared_as_the_linear_program_says(
    curve: Curves, data: st.DataObject
) -> None:
    """Also where giving one verifier more means that another must draw elsewhere."""
    cost, value = curve
    V, D = len(cost), data.draw(st.integers(1, 3))
    capacity = data.draw(st.lists(st.floats(0.5, 10.0), min_size=D, max_size=D))
    arcs = [
        {d: data.draw(st.floats(0.1, 8.0)) for d in range(D) if data.draw(st.booleans())}
        for _ in range(V)
    ]
    pipes = pipes_of(capacity, arcs)
    tokens = share_out(cost, value, pipes, np.zeros(V))
    for d in range(D):
        used = sum(pipes.given(v).get(d, 0.0) for v in range(V))
        assert used <= capacity[d] * (1 + 1e-9) + 1e-6
    for v in range(V):
        assert sum(pipes.given(v).values()) == pytest.approx(tokens[v], abs=1e-6)
        assert all(-1e-9 <= t <= arcs[v][d] + 1e-6 for d, t in pipes.given(v).items())

    made = sum(np.interp(t, c, y) for t, c, y in zip(tokens, cost, value, strict=True))
    # Variables: what of each level of each verifier, then what along each arc.
    widths = np.diff(cost)
    slopes = np.diff(value) / widths
    along = [(v, d) for v in range(V) for d in arcs[v]]
    n = slopes.size
    balance = np.zeros((V, n + len(along)))
    limit = np.zeros((D, n + len(along)))
    for v in range(V):
        balance[v, v * slopes.shape[1] : (v + 1) * slopes.shape[1]] = 1.0
    for i, (v, d) in enumerate(along):
        balance[v, n + i] = -1.0
        limit[d, n + i] = 1.0
    best = linprog(
        np.concatenate((-slopes.ravel(), np.zeros(len(along)))),
        A_ub=limit, b_ub=capacity, A_eq=balance, b_eq=np.zeros(V),
        bounds=[(0, w) for w in widths.ravel()] + [(0, arcs[v][d]) for v, d in along],
    )  # fmt: skip
    optimum = value[:, 0].sum() - best.fun
    # A shred of a drafter (0.1 %) may be left.
    assert made >= optimum - slopes.max() * sum(capacity) * 2e-3 - 1e-6


def test_a_detour_moves_a_verifier_that_can_go_elsewhere() -> None:
    """The first may use both drafters, the second only the one that the first began with."""
    pipes = pipes_of([1.0, 1.0], [{0: 1.0, 1: 1.0}, {0: 1.0}])
    assert pipes.give(0, 1.0) == pytest.approx(1.0)
    assert pipes.given(0)[0] > 0.1
    assert pipes.give(1, 1.0) == pytest.approx(1.0)
    assert pipes.given(0) == pytest.approx({0: 0.0, 1: 1.0})
    assert pipes.give(1, 1.0) == 0.0


def test_a_detour_gives_nobody_more_than_its_requests_there_can_use() -> None:
    for second, got in ((0.5, 0.25), (0.22, 0.22)):  # the first can move a quarter, not more
        pipes = pipes_of([1.0, 1.0], [{0: 1.0, 1: 0.25}, {0: second}])
        assert pipes.give(0, 1.0) == pytest.approx(1.0)
        assert pipes.give(1, 1.0) == pytest.approx(got)
        assert pipes.given(0)[1] <= 0.25 + 1e-9


def test_a_step_that_cannot_be_paid_leaves_the_drafter_to_others() -> None:
    """The first verifier gains nothing before its last level, which is too dear."""
    cost = np.array([[0.0, 2.0, 4.0]] * 2)
    value = np.array([[0.0, 0.0, 9.0], [0.0, 1.0, 2.0]])
    tokens = share_out(cost, value, pipes_of([2.0], [{0: 4.0}] * 2), np.zeros(2))
    assert tokens.tolist() == pytest.approx([0.0, 2.0])


@given(curves(), st.floats(0.5, 10.0))
@settings(PATIENT, max_examples=60)
def test_what_is_required_comes_first_or_shrinks_alike(curve: Curves, capacity: float) -> None:
    V = len(curve[0])
    assume(V > 1)
    required = np.arange(1.0, V + 1)
    pipes = pipes_of([capacity], [{0: 100.0}] * V)
    tokens = share_out(*curve, pipes, required)
    if required.sum() <= capacity:
        assert (tokens >= required - 1e-6).all()
    else:
        assert tokens.sum() == pytest.approx(capacity, rel=2e-3)  # but for a shred
        part = tokens / required
        assert part.max() - part.min() <= 0.25 + 1e-6
