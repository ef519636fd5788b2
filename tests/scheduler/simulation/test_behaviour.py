"""What a simulated cluster does with load, tenants, deadlines and a scheduler."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dspark.scheduler.simulation import Arm, Simulation, config_of, enough_drafters, sweep
from dspark.scheduler.simulation.profiles import Domain, draw, survival
from dspark.verifier.guidance import Guidance

from .simulated import RISING, configured, one, ran, simulated, table

POLICIES = ["none", "fixed:2", "threshold:0.5", "early-stop", "top-k", "central"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_says_the_same(policy: str) -> None:
    config = configured(
        RISING,
        acceptance=0.7,
        domain={"spread": 0.2, "noise": 0.5},
        policies=[policy],
        verifier={"count": 2, "step_noise": 0.1},
        drafters=[{"tokens_per_s": 2000.0, "count": 2}],
        arrivals={"kind": "bursts", "rate": 40.0, "answer": {"kind": "geometric", "mean": 30}},
        duration_s=4.0,
    )
    assert one(config) == one(config)
    other = configured(
        RISING, acceptance=0.7, policies=[policy], arrivals={"kind": "poisson"}, seed=1,
        duration_s=4.0,
    )  # fmt: skip
    assert one(config) != one(other)


@pytest.mark.parametrize("policy", ["early-stop", "top-k", "central"])
def test_verify_lengths_fall_as_load_rises(policy: str) -> None:
    config = configured(
        RISING,
        acceptance=0.75,
        domain={"spread": 0.2},
        policies=[policy],
        sweep={"users": [2, 8, 32]},
        arrivals={"answer": 200},
        duration_s=6.0,
        warmup_s=1.0,
    )
    budgets = [figures.budget for figures in simulated(config)]
    assert budgets[0] > 1.4 * budgets[1]
    assert budgets[1] > 1.4 * budgets[2]


def test_a_planned_length_beats_fixed_ones_under_load() -> None:
    """Short where few are accepted, long where many are, and neither decided beforehand."""
    config = configured(
        RISING,
        acceptance=0.7,
        domain={"spread": 0.25},
        policies=["none", "fixed:1", "fixed:7", "top-k"],
        arrivals={"users": 12, "answer": 300},
        warmup_s=2.0,
    )
    none, short, long, planned = (figures.throughput for figures in simulated(config))
    assert planned > 1.02 * max(none, short, long)


def test_drafts_that_never_stand_are_left_alone() -> None:
    """Bypass. Probes are dear here: a pass for one request takes as long as for many."""
    config = configured(
        RISING,
        acceptance=0.02,
        arms=[
            {"policy": "none"},
            {"policy": "top-k", "draft_share": 0.3},
            {"policy": "fixed:7", "draft_share": 0.3},
        ],
        arrivals={"users": 16, "answer": 1000},
        warmup_s=4.0,
    )
    none, planned, always = (figures.throughput for figures in simulated(config))
    assert planned > 0.95 * none > 1.5 * always


def test_the_barrier_lets_the_pasts_capacity_in() -> None:
    """Every step but the first few is planned by a K that is older than all its drafts."""
    config = configured(
        RISING, acceptance=0.8, arrivals={"users": 8, "answer": 500}, duration_s=5.0
    )
    found = ran(config, "top-k")
    assert found.measures.counts.steps > 100
    assert found.local_plans <= 3


@pytest.mark.parametrize("policy", ["top-k", "central"])
def test_tenants_get_their_shares_under_saturation(policy: str) -> None:
    config = configured(
        RISING,
        acceptance=0.7,
        policies=[policy],
        verifier={"count": 2, "max_sequences": 8},
        tenants=[{"name": "a", "share": 3.0}, {"name": "b", "share": 1.0}],
        arrivals={"users": 96, "answer": {"kind": "geometric", "mean": 40}},
        duration_s=20.0,
        warmup_s=4.0,
    )
    figures = one(config)
    assert figures.tenants["a"] == pytest.approx(0.75, abs=0.04)


def test_the_central_plan_reaches_the_verifiers() -> None:
    config = configured(
        RISING,
        acceptance=0.8,
        policies=["central"],
        verifier={"count": 3},
        arrivals={"users": 24, "answer": 20},
        duration_s=4.0,
    )
    figures = one(config)
    steps = 3 * 4.0 / figures.step_s
    assert figures.guided_plans > 0.8 * steps
    for call in ("put_reports", "lead", "members", "usage", "reports", "publish", "plans"):
        # One a round for the whole cluster, 20 rounds a second, 3 verifiers.
        assert figures.store_calls[call] == pytest.approx(20 / 3, rel=0.1)
    assert figures.store_calls["acquire"] == pytest.approx(figures.store_calls["release"], rel=0.2)


def test_a_saturated_drafter_is_no_worse_shared_by_plan() -> None:
    """Three fast verifiers and a slow one on one drafter that cannot serve all."""
    config = config_of(
        {
            **table(RISING, acceptance=0.9),
            "verifiers": [
                {"step_cost": RISING, "prefills": False, "count": 3, "groups": 2},
                {"step_cost": RISING, "prefills": False, "slowdown": 3.0, "groups": 2},
            ],
            "arms": [{"policy": "top-k"}, {"policy": "central"}],
            "drafters": [{"tokens_per_s": 900.0, "max_batch": 16}],
            "drafting": {"gamma": 5},
            "arrivals": {"users": 24, "answer": 200},
            "warmup_s": 4.0,
        }
    )
    local, central = simulated(config)
    assert local.drafters_busy > 0.85
    assert central.throughput > 0.97 * local.throughput


def test_a_saturated_drafter_goes_where_drafts_bring_most() -> None:
    """Its time hides behind the slow verifier's steps, so that one asks for all it can use, though
    it gains little; the plan gives most to the fast one."""
    both = {"prefills": False, "kv_tokens": 10**9, "groups": 2}
    fast = {"step_cost": {"tokens": [1], "table_s": [0.01]}, "max_sequences": 16}
    slow = {"step_cost": {"tokens": [1, 101], "table_s": [0.03, 0.23]}, "max_sequences": 48}
    config = config_of(
        {
            **table(acceptance=0.9),
            "verifiers": [{**both, **fast}, {**both, **slow}],
            "arms": [{"policy": "top-k"}, {"policy": "central"}],
            "drafters": [{"tokens_per_s": 3500.0}],
            "arrivals": {"users": 80, "answer": 200},
            "duration_s": 8.0,
            "warmup_s": 3.0,
        }
    )
    local, central = simulated(config)
    assert local.drafters_busy > 0.95
    assert central.throughput > 1.1 * local.throughput


def test_deadlines_and_floors_are_told() -> None:
    config = configured(
        policies=["none"],
        tenants=[
            {"name": "urgent", "deadline_s": 1.5},
            {"name": "fast", "floor_tps": 60.0},
        ],
        objectives={"ttft_s": 1.0, "tpot_s": 0.019},
        arrivals={"users": 4, "answer": 100},
    )
    figures = one(config)
    # 100 tokens take 2 s: too late for every deadline, and 50 tokens a second.
    assert figures.misses == {"ttft": 0.0, "tpot": 1.0, "deadline": 1.0, "floor": 1.0}


def test_what_cannot_be_in_time_is_refused() -> None:
    config = configured(
        policies=["none"],
        tenants=[{"name": "hopeless", "deadline_s": 0.2}],
        arrivals={"kind": "poisson", "rate": 20.0, "answer": 100},
        duration_s=5.0,
    )
    figures = one(config)
    assert figures.late_refused > 50
    assert figures.answered == 0


def test_a_full_cluster_refuses_and_users_come_again() -> None:
    config = configured(
        policies=["none"],
        verifier={"max_sequences": 2, "max_waiting": 2},
        arrivals={"users": 8, "answer": 20},
        duration_s=10.0,
    )
    figures = one(config)
    assert figures.refused > 0
    assert figures.throughput == pytest.approx(2 / 0.02, rel=0.05)


def test_bursts_come_at_their_mean_rate() -> None:
    config = configured(
        policies=["none"],
        arrivals={
            "kind": "bursts", "rate": 30.0, "quiet_rate": 2.0, "on_s": 1.0, "off_s": 3.0,
            "answer": 5,
        },
        duration_s=200.0,
        scheduler={"interval_s": 1.0},
    )  # fmt: skip
    figures = one(config)
    assert figures.answered / 200 == pytest.approx((30 * 1 + 2 * 3) / 4, rel=0.2)


def test_confidence_knows_the_rate_and_not_the_outcome() -> None:
    """Calibrated without noise: among blocks of about the same survival as many stand as it says.
    With a temperature they are too sure, and dividing by it puts them right."""
    rng = np.random.default_rng(3)
    domain = Domain("d", 0.7, spread=0.25, temperature=2.0)
    blocks = draw(domain, 40_000, 3, rng)
    right = survival(blocks.logits, np.array([[2.0] * 3, [0.0] * 3]))
    stands = blocks.stands[:, None] > np.arange(3)
    for low in (0.1, 0.3, 0.5, 0.7):
        near = (right >= low) & (right < low + 0.2)
        assert stands[near].mean() == pytest.approx(right[near].mean(), abs=0.02)
    raw = survival(blocks.logits, np.array([[1.0] * 3, [0.0] * 3]))
    sure = raw[:, 0] > 0.9
    assert stands[sure, 0].mean() < raw[sure, 0].mean() - 0.02
    assert stands[:, 0].mean() == pytest.approx(0.7, abs=0.01)


def test_noise_makes_confidence_say_less() -> None:
    def told(noise: float) -> float:
        blocks = draw(
            Domain("d", 0.7, spread=0.25, noise=noise), 20_000, 1, np.random.default_rng(4)
        )
        logits, stood = blocks.logits[:, 0], blocks.stands > 0
        order = np.argsort(logits)
        rank = np.empty(len(order))
        rank[order] = np.arange(len(order))
        n = stood.sum()
        return float((rank[stood].sum() - n * (n - 1) / 2) / (n * (~stood).sum()))

    assert told(0.0) > told(1.0) + 0.02 > told(4.0) + 0.06


def test_the_fewest_drafters_that_are_enough() -> None:
    config = configured(
        policies=["fixed:3"],
        drafters=[{"tokens_per_s": 400.0}],
        arrivals={"users": 4, "answer": 400},
        sweep={"drafters": [1, 4, 8, 16]},
        duration_s=6.0,
        warmup_s=1.0,
    )
    found = simulated(config)
    ((arm, count, figures),) = enough_drafters(found)
    assert arm == "fixed:3"
    best = max(point.throughput for point in found)
    assert figures.throughput >= 0.98 * best
    assert all(p.throughput < 0.98 * best for p in found if p.value < count)


def test_stopped_early_it_says_what_is_done() -> None:
    config = configured(
        policies=["none", "fixed:1", "fixed:2"],
        arrivals={"users": 32, "answer": 8},
        duration_s=12.0,
    )
    seen: list[tuple[int, float]] = []

    def stop() -> bool:
        return bool(seen) and seen[-1][0] == 2

    points = asyncio.run(
        sweep(config, Guidance, lambda told: seen.append((told.point, told.done)), stop)
    )
    assert [(p.figures.arm, p.figures.whole) for p in points] == [
        ("none", True),
        ("fixed:1", False),
    ]
    assert points[1].figures.seconds < 12.0
    assert points[1].figures.throughput > 0
    done = [part for point, part in seen if point == 1]
    assert done == sorted(done)
    assert len(done) >= 2


def test_it_ends_with_so_many_answers() -> None:
    config = configured(policies=["none"], arrivals={"users": 4, "answer": 5}, requests=100)
    figures = one(config)
    assert 100 <= figures.answered < 108
    assert figures.seconds < 20.0


def test_a_central_arm_needs_a_guide() -> None:
    with pytest.raises(ValueError, match="guide"):
        Simulation(configured(), Arm("central"))
