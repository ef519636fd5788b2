"""Verify lengths: Algorithm 1, the optimum, and what admission may not know (design.md §4, L2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from dspark.core.errors import InvalidRequest
from dspark.scheduler import (
    Policy,
    PolicyKind,
    StepCost,
    capacity,
    plan,
    saving,
    scaled,
)
from dspark.scheduler.planner import throughput

EARLY_STOP = Policy.parse("early-stop")
TOP_K = Policy.parse("top-k")
NONE = Policy.parse("none")

Survival = list[np.ndarray[Any, Any]]

# Values that tie often and sum exactly, mixed with any.
gains = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0.0, 1.0))


def survivals(R: int = 3, gamma: int = 3) -> st.SearchStrategy[Survival]:
    one = st.lists(gains, max_size=gamma).map(lambda a: np.array(sorted(a, reverse=True)))
    return st.lists(one, min_size=1, max_size=R)


def tables(convex: bool, size: int = 20) -> st.SearchStrategy[StepCost]:
    """T at every B of 1..size; not convex = stairs, dips of Θ and all."""
    rise = st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.floats(0.0, 0.1))
    rises = st.lists(rise, min_size=size - 1, max_size=size - 1)
    return st.builds(
        lambda first, rises: StepCost.from_table(
            dict(
                enumerate(
                    itertools.accumulate(sorted(rises) if convex else rises, initial=first), 1
                )
            )
        ),
        st.floats(0.05, 2.0),
        rises,
    )


def theta(
    survival: Survival,
    lengths: Sequence[int],
    cost: StepCost,
    P: int = 0,
    weights: Sequence[float] | None = None,
    overhead: float = 0.0,
) -> float:
    R = len(survival)
    weights = [1.0] * R if weights is None else weights
    tau = sum(
        w * (1 + float(a[:n].sum())) for w, a, n in zip(weights, survival, lengths, strict=True)
    )
    return tau / (cost.decode_seconds(P, R, P + R + sum(lengths), 0) + overhead)


def brute_force(
    survival: Survival,
    cost: StepCost,
    P: int = 0,
    weights: Sequence[float] | None = None,
    overhead: float = 0.0,
    caps: Sequence[int] | None = None,
    most: int = 10**9,
) -> float:
    """The best Θ of all vectors of lengths."""
    caps = [10**9] * len(survival) if caps is None else caps
    room = [range(min(len(a), cap) + 1) for a, cap in zip(survival, caps, strict=True)]
    vectors = (v for v in itertools.product(*room) if sum(v) <= most)
    return max(theta(survival, v, cost, P, weights, overhead) for v in vectors)


def algorithm_1(survival: Survival, cost: StepCost) -> list[int]:
    """Line by line."""
    R = len(survival)
    B, tau = R, float(R)
    best, lengths, current = tau / cost.seconds(0, R, B, 0), [0] * R, [0] * R
    order = sorted((-a, r, j) for r, s in enumerate(survival) for j, a in enumerate(s, 1) if a > 0)
    for negative, r, j in order:
        current[r] = j
        B += 1
        tau -= negative
        if tau / cost.seconds(0, R, B, 0) > best:
            best, lengths = tau / cost.seconds(0, R, B, 0), list(current)
        else:
            break
    return lengths


# --- Algorithm 1 and the optimum -----------------------------------------------------------------


@given(survivals(R=4, gamma=5), tables(convex=False, size=24))
def test_early_stop_is_algorithm_1(survival: Survival, cost: StepCost) -> None:
    lengths = plan(survival, cost, 0, len(survival), 0, EARLY_STOP)
    assert lengths.tolist() == algorithm_1(survival, cost)


@given(survivals(), tables(convex=True), st.integers(0, 3), st.sampled_from([0.0, 0.3]))
def test_early_stop_is_optimal_where_t_is_convex(
    survival: Survival, cost: StepCost, P: int, overhead: float
) -> None:
    lengths = plan(survival, cost, P, len(survival), 0, EARLY_STOP, overhead=overhead)
    best = brute_force(survival, cost, P, overhead=overhead)
    assert theta(survival, lengths.tolist(), cost, P, overhead=overhead) == pytest.approx(best)


@given(survivals(), tables(convex=False), st.integers(0, 3), st.data())
def test_full_search_is_optimal_for_every_t(
    survival: Survival, cost: StepCost, P: int, data: st.DataObject
) -> None:
    R = len(survival)
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=R, max_size=R))
    caps = data.draw(st.lists(st.integers(0, 4), min_size=R, max_size=R))
    overhead = data.draw(st.sampled_from([0.0, 0.3]))
    most = data.draw(st.integers(0, 9))
    lengths = plan(
        survival, cost, P, R, 0, EARLY_STOP, None, caps, weights,
        lookahead=True, overhead=overhead, max_tokens=P + R + most,
    )  # fmt: skip
    assert (lengths <= caps).all()
    assert lengths.sum() <= most
    assert theta(survival, lengths.tolist(), cost, P, weights, overhead) == pytest.approx(
        brute_force(survival, cost, P, weights, overhead, caps, most)
    )


def test_full_search_passes_a_dip_where_early_stop_stops() -> None:
    stairs = StepCost.from_table({1: 1.0, 2: 1.6, 3: 1.6, 4: 1.6})
    survival = [np.array([0.5, 0.5, 0.5])]
    assert plan(survival, stairs, 0, 1, 0, EARLY_STOP).tolist() == [0]
    assert plan(survival, stairs, 0, 1, 0, EARLY_STOP, lookahead=True).tolist() == [3]
    assert capacity(survival, stairs, 0, 1, 0) == 3


def test_an_equal_theta_is_no_improvement() -> None:
    flat_theta = StepCost.from_table({1: 1.0, 2: 1.5})
    for lookahead in (False, True):
        lengths = plan([np.array([0.5])], flat_theta, 0, 1, 0, EARLY_STOP, lookahead=lookahead)
        assert lengths.tolist() == [0]


def test_overhead_makes_a_longer_step_worth_it() -> None:
    cost = StepCost.from_table({1: 1.0, 2: 2.0, 101: 101.0})
    survival = [np.array([0.9])]
    assert plan(survival, cost, 0, 1, 0, EARLY_STOP).tolist() == [0]
    assert plan(survival, cost, 0, 1, 0, EARLY_STOP, overhead=0.2).tolist() == [1]


def test_prefill_makes_no_draft_worth_verifying() -> None:
    """A prompt is computed once, however many tokens are drafted beside it."""
    cost = StepCost.from_table({1: 1.0, 2: 2.0, 101: 101.0})
    assert plan([np.array([0.9])], cost, 90, 1, 0, EARLY_STOP).tolist() == [0]
    level = StepCost.from_table({1: 1.0, 2: 2.0, 90: 90.0, 512: 90.0})
    assert plan([np.array([0.9])], level, 100, 1, 0, EARLY_STOP).tolist() == [1], "it rides along"


def test_a_token_is_worth_what_it_costs_once_all_prompts_are_computed() -> None:
    """Alone a request's token takes 1.0 s; with nine more, whose prompts are computed now, 0.1."""
    cost = StepCost.from_table({1: 1.0, 10: 1.0, 1010: 201.0})
    survival = [np.array([0.9])]
    assert plan(survival, cost, 100, 1, 0, EARLY_STOP).tolist() == [1]
    assert plan(survival, cost, 100, 1, 0, EARLY_STOP, joining=9).tolist() == [0]
    assert cost.decode_seconds(100, 1, 101, 0, joining=9) == pytest.approx(0.1)
    assert cost.decode_curve(100, 1, 0, 1, joining=9) == pytest.approx([0.1, 0.3])
    assert plan(survival, cost, 0, 1, 0, EARLY_STOP, joining=9).tolist() == [1], "for nothing"


@given(
    survivals(), st.integers(1, 400), st.floats(0.01, 1.0), st.sampled_from(["early-stop", "top-k"])
)
def test_where_all_tokens_cost_the_same_a_prompt_beside_them_changes_nothing(
    survival: Survival, P: int, slope: float, policy: str
) -> None:
    cost = StepCost.from_table({1: 4.0, 1001: 4.0 + 1000 * slope})
    R, chosen = len(survival), Policy.parse(policy)
    beside = plan(survival, cost, P, R, 0, chosen)
    near = [plan(survival, cost, 0, R, 0, chosen, overhead=e).tolist() for e in (-1e-9, 0.0, 1e-9)]
    assert beside.tolist() in near, "but for rounding"


def test_the_cost_of_requests_and_context_counts() -> None:
    """What a step costs anyway makes drafts cheap beside it."""
    cost = StepCost((1, 2), (1.0, 2.0), 0.0, 0.01)
    assert plan([np.array([0.9])], cost, 0, 1, 0, EARLY_STOP).tolist() == [0]
    assert plan([np.array([0.9])], cost, 0, 1, 1000, EARLY_STOP).tolist() == [1]


# --- what admission may not know -----------------------------------------------------------------

Planner = Callable[[Survival, StepCost], np.ndarray[Any, Any]]


def planner(text: str, K: int | None = None, **more: Any) -> Planner:
    policy = Policy.parse(text)
    return lambda s, cost: plan(s, cost, 0, len(s), 0, policy, K, **more)


CAUSAL = {
    "early-stop": planner("early-stop"),
    "early-stop, max_tokens": planner("early-stop", max_tokens=6),
    "top-k, K = 0": planner("top-k", 0),
    "top-k, K = 1": planner("top-k", 1),
    "top-k, K = 4": planner("top-k", 4),
    "top-k without K": planner("top-k"),
    "fixed, K = 3": planner("fixed:2", 3),
    "threshold": planner("threshold:0.5"),
    "threshold, K = 3": planner("threshold:0.25", 3),
}
SEARCH = planner("early-stop", lookahead=True)

Twin = tuple[Survival, Survival, int, int]


@st.composite
def twins(draw: st.DrawFn) -> Twin:
    """Two steps that differ only below the rank of one draft token x_k of request r.

    r's own tail is redrawn (and its length), and so is what others have strictly below x_k.
    """
    before = draw(survivals(R=4, gamma=4).filter(lambda s: any(len(a) for a in s)))
    r = draw(st.sampled_from([i for i, a in enumerate(before) if len(a)]))
    k = draw(st.integers(1, len(before[r])))
    value = float(before[r][k - 1])
    after = []
    for i, a in enumerate(before):
        head = a[:k] if i == r else a[a >= value]
        low = draw(st.lists(st.floats(0.0, 1.0), max_size=max(5 - len(head), 0)))
        tail = [value * x * (1.0 if i == r else 0.99) for x in sorted(low, reverse=True)]
        tail = tail if i == r else [x for x in tail if x < value]
        after.append(np.concatenate([head, tail]))
    return before, after, r, k


def same_admission(plans: Planner, twin: Twin, cost: StepCost) -> bool:
    before, after, r, k = twin
    return bool((plans(before, cost)[r] >= k) == (plans(after, cost)[r] >= k))


@pytest.mark.parametrize("name", CAUSAL)
@given(twin=twins(), cost=tables(convex=False, size=30))
@settings(max_examples=300)
def test_admission_of_x_k_does_not_depend_on_what_ranks_below_it(
    name: str, twin: Twin, cost: StepCost
) -> None:
    assert same_admission(CAUSAL[name], twin, cost)


@given(st.lists(gains, max_size=300), st.integers(0, 300), st.floats(1.0, 300.0))
def test_theta_does_not_depend_on_what_comes_later_not_even_by_rounding(
    gain: list[float], n: int, tau0: float
) -> None:
    ranked = np.array(sorted(gain, reverse=True))
    cost = APPENDIX_A.curve(0, 1, 0, len(ranked))
    first = throughput(ranked[:n], tau0, cost[: len(ranked[:n]) + 1])
    assert throughput(ranked, tau0, cost)[: len(first)].tobytes() == first.tobytes()


def test_the_property_above_has_power_a_search_breaks_it() -> None:
    broken = find(
        st.tuples(twins(), tables(convex=False, size=30)),
        lambda case: not same_admission(SEARCH, *case),
        settings=settings(max_examples=20_000, database=None, phases=[Phase.generate]),
    )
    assert not same_admission(SEARCH, *broken)


APPENDIX_A = StepCost.from_table({1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45})


def test_appendix_a() -> None:
    """c₂ = 0.9 if x₁ = A, 0 if x₁ = B: looking at it, x₁'s own value decides its admission."""
    if_a, if_b = [np.array([0.8, 0.8 * 0.9])], [np.array([0.8, 0.0])]
    assert plan(if_a, APPENDIX_A, 0, 1, 0, EARLY_STOP).tolist() == [0]
    assert plan(if_b, APPENDIX_A, 0, 1, 0, EARLY_STOP).tolist() == [0]
    assert plan(if_a, APPENDIX_A, 0, 1, 0, EARLY_STOP, lookahead=True).tolist() == [2]
    assert plan(if_b, APPENDIX_A, 0, 1, 0, EARLY_STOP, lookahead=True).tolist() == [0]
    assert not same_admission(SEARCH, (if_a, if_b, 0, 1), APPENDIX_A)


# --- what a better draft may not do --------------------------------------------------------------


@st.composite
def raised(draw: st.DrawFn) -> tuple[Survival, Survival, int]:
    """A step, and the same with one request's survivals raised."""
    low = draw(survivals(R=4, gamma=4))
    r = draw(st.integers(0, len(low) - 1))
    up = draw(st.lists(gains, min_size=len(low[r]), max_size=len(low[r])))
    high = list(low)
    high[r] = np.maximum(low[r], sorted(up, reverse=True))
    return low, high, r


@given(raised(), st.integers(0, 16), tables(convex=False, size=30))
def test_with_a_given_k_raising_a_survival_never_lowers_its_own_length(
    steps: tuple[Survival, Survival, int], K: int, cost: StepCost
) -> None:
    low, high, r = steps
    lengths = [plan(s, cost, 0, len(s), 0, TOP_K, K)[r] for s in (low, high)]
    assert lengths[0] <= lengths[1]


@given(raised(), tables(convex=True, size=30))
def test_with_convex_t_raising_a_survival_never_lowers_the_best_theta(
    steps: tuple[Survival, Survival, int], cost: StepCost
) -> None:
    low, high, _ = steps
    before, after = (
        theta(s, plan(s, cost, 0, len(s), 0, EARLY_STOP).tolist(), cost) for s in (low, high)
    )
    assert after >= before * (1 - 1e-9)


# --- capacity, ties, caps, weights, bounds -------------------------------------------------------

FREE = StepCost.from_table({1: 1.0})  # a step costs the same whatever it carries
ABC = [np.array([0.9, 0.5]), np.array([0.8, 0.5, 0.1]), np.array([])]


@pytest.mark.parametrize(
    ("K", "lengths"),
    [
        (0, [0, 0, 0]),
        (1, [1, 0, 0]),
        (2, [1, 1, 0]),
        (3, [2, 1, 0]),
        (4, [2, 2, 0]),
        (9, [2, 3, 0]),
    ],
)
def test_top_k_fills_k_by_live_rank_ties_by_arrival(K: int, lengths: list[int]) -> None:
    assert plan(ABC, FREE, 0, 3, 0, TOP_K, K).tolist() == lengths


def test_ties_inside_a_request_go_by_position_and_between_requests_by_arrival() -> None:
    level = [np.array([0.5, 0.5]), np.array([0.5, 0.5])]
    got = [plan(level, FREE, 0, 2, 0, TOP_K, K).tolist() for K in range(5)]
    assert got == [[0, 0], [1, 0], [2, 0], [2, 1], [2, 2]]


@given(survivals(R=4, gamma=5), st.integers(0, 20))
def test_top_k_admits_the_k_largest(survival: Survival, K: int) -> None:
    lengths = plan(survival, FREE, 0, len(survival), 0, TOP_K, K)
    everything = np.sort(np.concatenate(survival))[::-1]
    assert lengths.sum() == min(K, (everything > 0).sum())
    admitted = np.concatenate([a[:n] for a, n in zip(survival, lengths, strict=True)])
    assert np.sort(admitted)[::-1].tolist() == everything[: lengths.sum()].tolist()


@pytest.mark.parametrize("policy", ["early-stop", "top-k"])
def test_a_token_that_cannot_survive_is_never_admitted(policy: str) -> None:
    survival = [np.array([1.0, 0.0]), np.array([0.0])]
    assert plan(survival, FREE, 0, 2, 0, Policy.parse(policy), 3).tolist() == [1, 0]


def test_top_k_without_a_capacity_plans_like_early_stop() -> None:
    cost = StepCost.from_table({3: 1.0, 4: 1.1, 5: 1.2, 6: 2.0})
    assert (plan(ABC, cost, 0, 3, 0, TOP_K) == plan(ABC, cost, 0, 3, 0, EARLY_STOP)).all()
    assert plan(ABC, cost, 0, 3, 0, TOP_K).sum() == 2


def test_early_stop_takes_a_capacity_as_a_bound() -> None:
    assert plan(ABC, FREE, 0, 3, 0, EARLY_STOP).tolist() == [2, 3, 0]
    assert plan(ABC, FREE, 0, 3, 0, EARLY_STOP, 2).tolist() == [1, 1, 0]


def test_caps_clip_first_and_free_their_room() -> None:
    assert plan(ABC, FREE, 0, 3, 0, TOP_K, 3, [1, 9, 9]).tolist() == [1, 2, 0]
    assert plan(ABC, FREE, 0, 3, 0, TOP_K, 3, [0, 9, 9]).tolist() == [0, 3, 0]
    assert plan(ABC, FREE, 0, 3, 0, EARLY_STOP, None, [9, 1, 9]).tolist() == [2, 1, 0]
    assert plan(ABC, FREE, 0, 3, 0, Policy.parse("fixed:2"), None, [1, 9, 9]).tolist() == [1, 2, 0]


def test_weights_multiply_what_a_token_counts() -> None:
    assert plan(ABC, FREE, 0, 3, 0, TOP_K, 2, None, [0.1, 1.0, 1.0]).tolist() == [0, 2, 0]
    assert plan(ABC, FREE, 0, 3, 0, TOP_K, 9, None, [0.0, 1.0, 1.0]).tolist() == [0, 3, 0]
    # τ₀ is weighted too: twice the weight of everybody changes nothing.
    cost = StepCost.from_table({3: 1.0, 4: 1.2, 5: 1.4, 6: 2.0})
    ones = plan(ABC, cost, 0, 3, 0, EARLY_STOP)
    assert 0 < ones.sum() < 4
    assert (plan(ABC, cost, 0, 3, 0, EARLY_STOP, None, None, [2.0] * 3) == ones).all()


@pytest.mark.parametrize("policy", ["early-stop", "top-k", "fixed:3", "threshold:0"])
@given(survivals(R=4, gamma=4), st.integers(0, 5), st.integers(-3, 12))
def test_max_tokens_bounds_b_under_every_policy(
    policy: str, survival: Survival, P: int, room: int
) -> None:
    R = len(survival)
    lengths = plan(
        survival, FREE, P, R, 0, Policy.parse(policy), 10, None, None, max_tokens=P + R + room
    )
    assert lengths.shape == (R,)
    assert lengths.sum() <= max(room, 0)
    assert all(0 <= n <= len(a) for n, a in zip(lengths, survival, strict=True))


def test_fixed_ignores_confidence_until_a_bound_bites() -> None:
    survival = [np.array([0.0, 0.0, 0.0]), np.array([0.9, 0.8, 0.1])]
    assert plan(survival, FREE, 0, 2, 0, Policy.parse("fixed:2")).tolist() == [2, 2]
    assert plan(survival, FREE, 0, 2, 0, Policy.parse("fixed:2"), 3).tolist() == [1, 2]


def test_threshold_takes_the_longest_prefix_that_survives_so_likely() -> None:
    policy = Policy.parse("threshold:0.5")
    assert plan(ABC, FREE, 0, 3, 0, policy).tolist() == [2, 2, 0]
    assert plan(ABC, FREE, 0, 3, 0, policy, None, None, [0.1, 9.0, 1.0]).tolist() == [2, 2, 0]
    assert plan(ABC, FREE, 0, 3, 0, policy, 2).tolist() == [1, 1, 0]


@pytest.mark.parametrize("policy", ["early-stop", "top-k", "fixed:3", "threshold:0.5", "none"])
def test_nothing_drafted_is_plain_decoding(policy: str) -> None:
    empty = np.array([], np.float32)
    assert plan([], FREE, 7, 0, 0, Policy.parse(policy)).tolist() == []
    assert plan([empty] * 2, FREE, 0, 2, 0, Policy.parse(policy), 5).tolist() == [0, 0]
    assert plan([empty] * 2, FREE, 0, 2, 0, Policy.parse(policy), caps=[1, 1]).tolist() == [0, 0]


def test_none_verifies_nothing() -> None:
    assert plan(ABC, FREE, 0, 3, 0, NONE, 9).tolist() == [0, 0, 0]


def test_float32_survivals_plan_like_float64() -> None:
    single = [a.astype(np.float32) for a in ABC]
    assert plan(single, FREE, 0, 3, 0, TOP_K, 3).tolist() == [2, 1, 0]


def test_every_request_has_an_entry() -> None:
    with pytest.raises(ValueError, match="R = 4"):
        plan(ABC, FREE, 0, 4, 0, EARLY_STOP)


@given(survivals(), tables(convex=False))
def test_capacity_is_what_the_optimum_carries(survival: Survival, cost: StepCost) -> None:
    R = len(survival)
    K = capacity(survival, cost, 0, R, 0)
    lengths = plan(survival, cost, 0, R, 0, TOP_K, K)
    assert theta(survival, lengths.tolist(), cost) == pytest.approx(brute_force(survival, cost))


def test_capacity_takes_overhead_caps_weights_and_a_bound() -> None:
    assert capacity(ABC, FREE, 0, 3, 0) == 5
    assert capacity(ABC, FREE, 0, 3, 0, [1, 1, 1]) == 2
    assert capacity(ABC, FREE, 0, 3, 0, None, [0.0, 1.0, 1.0]) == 3
    assert capacity(ABC, FREE, 0, 3, 0, max_tokens=4) == 1
    cost = StepCost.from_table({1: 1.0, 2: 2.0})
    assert capacity([np.array([0.9])], cost, 0, 1, 0) == 0
    assert capacity([np.array([0.9])], cost, 0, 1, 0, overhead=0.2) == 1


def test_scaled_keeps_the_tokens_a_request() -> None:
    assert [scaled(12, 4, R) for R in (0, 1, 2, 4, 6)] == [0, 3, 6, 12, 18]
    assert [scaled(1, 4, R) for R in (1, 2, 3)] == [0, 1, 1]


# --- whether to draft at all ---------------------------------------------------------------------


@given(survivals(), tables(convex=False), st.data())
def test_savings_are_positive_together_iff_theta_rose(
    survival: Survival, cost: StepCost, data: st.DataObject
) -> None:
    R = len(survival)
    lengths = np.array([data.draw(st.integers(0, len(a))) for a in survival])
    T0, T = cost.seconds(0, R, R, 0), cost.seconds(0, R, R + int(lengths.sum()), 0)
    expected = [float(a[:n].sum()) for a, n in zip(survival, lengths, strict=True)]
    saved = np.array(saving(expected, lengths.tolist(), R / T0, T - T0))
    assert saved.shape == (R,)
    assert (saved[lengths == 0] == 0).all()
    rise = theta(survival, lengths.tolist(), cost) - R / T0
    assert saved.sum() == pytest.approx(rise * T * T0 / R, abs=1e-9)


def test_each_draft_pays_its_share_of_the_longer_step() -> None:
    saved = saving([0.9 + 0.8, 0.1, 0.0], [2, 1, 0], theta0=10.0, extra_s=0.03)
    assert saved == pytest.approx([0.17 - 0.02, 0.01 - 0.01, 0.0])


# --- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("early-stop", Policy(PolicyKind.EARLY_STOP)),
        ("top-k", Policy(PolicyKind.TOP_K)),
        ("none", Policy(PolicyKind.NONE)),
        ("fixed:1", Policy(PolicyKind.FIXED, length=1)),
        ("fixed:64", Policy(PolicyKind.FIXED, length=64)),
        ("threshold:0.7", Policy(PolicyKind.THRESHOLD, threshold=0.7)),
        ("threshold:1", Policy(PolicyKind.THRESHOLD, threshold=1.0)),
        ("threshold:.5", Policy(PolicyKind.THRESHOLD, threshold=0.5)),
        ("threshold:1e-05", Policy(PolicyKind.THRESHOLD, threshold=1e-5)),
    ],
)
def test_a_policy_is_read_and_written(text: str, policy: Policy) -> None:
    assert Policy.parse(text) == policy
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "text",
    [
        "", "Early-stop", "early_stop", "topk", " none", "none:1", "early-stop\n",
        "fixed", "fixed:", "fixed:0", "fixed:65", "fixed:-1", "fixed:2.5", "fixed:x", "fixed:٣",
        "fixed:3 ", "threshold", "threshold:", "threshold:1.1", "threshold:-0.1", "threshold:nan",
        "threshold:inf", "threshold:1_0", "threshold:1e5",
    ],
)  # fmt: skip
def test_a_bad_policy_names_value_and_choices(text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Policy.parse(text)
    assert error.value.field == "verify"
    message = str(error.value)
    assert repr(text) in message
    for choice in ("early-stop", "top-k", "fixed:N", "threshold:X", "none"):
        assert choice in message
