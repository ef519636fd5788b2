"""A simulation against what can be worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from .simulated import RISING, configured, jobs, one, simulated


@pytest.mark.parametrize("N", [1, 3, 7])
def test_one_request_alone_gets_its_accepted_length_a_step(N: int) -> None:
    """Every draft stands: N + 1 tokens in T, behind a first step without a draft."""
    config = configured(policies=[f"fixed:{N}"], arrivals={"users": 1, "answer": 1 + 20 * (N + 1)})
    figures = one(config)
    assert figures.per_user == pytest.approx((N + 1) / 0.02, rel=1e-9)
    assert figures.tpot_s["p99"] == pytest.approx(0.02 / (N + 1), rel=1e-9)


def test_the_last_block_is_cut_to_the_answer() -> None:
    config = configured(policies=["fixed:7"], arrivals={"users": 1, "answer": 6}, duration_s=1.0)
    for job in jobs(config, "fixed:7"):
        # One token, then five in one step: a block of four draft tokens at most.
        assert job.last_at - job.first_at == pytest.approx(0.02)
    assert one(config).verified == 4 * one(config).answered


@pytest.mark.parametrize("N", [1, 3, 5])
@pytest.mark.parametrize("p", [0.3, 0.8])
@pytest.mark.parametrize("spread", [0.0, 0.25])
def test_fixed_length_commits_a_geometric_sum(N: int, p: float, spread: float) -> None:
    """E[τ] = (1 − p^(N + 1)) / (1 − p), however much single rates spread about p."""
    config = configured(
        acceptance=p,
        domain={"spread": spread},
        policies=[f"fixed:{N}"],
        arrivals={"users": 40, "answer": 100_000},
        duration_s=4.0,
        warmup_s=0.2,
    )
    figures = one(config)
    assert figures.budget == N + 1
    rounds = 40 * 3.8 / 0.02
    # A block's tokens are between 1 and N + 1: four standard errors at most.
    assert figures.accepted_length == pytest.approx(
        (1 - p ** (N + 1)) / (1 - p), abs=4 * (N / 2) / math.sqrt(rounds)
    )


def test_policy_none_is_requests_over_step_time() -> None:
    cost = {"tokens": [1, 100], "table_s": [0.01, 0.109], "per_sequence_s": 0.001}
    config = configured(
        cost, policies=["none"], arrivals={"users": 30, "answer": 100_000}, warmup_s=1.0
    )
    figures = one(config)
    assert figures.throughput == pytest.approx(30 / (0.01 + 29 * 0.001 + 30 * 0.001), rel=0.005)
    assert (figures.budget, figures.accepted_length, figures.active) == (1.0, 1.0, 30.0)


def test_context_costs_what_the_step_cost_says() -> None:
    """Of one request alone: step i attends to prompt + i tokens."""
    cost = {"tokens": [1], "table_s": [0.01], "per_context_token_s": 1e-5}
    config = configured(
        cost, policies=["none"], arrivals={"users": 1, "prompt": 500, "answer": 101}
    )
    job = jobs(config, "none")[0]
    steps = [0.01 + 1e-5 * (500 + i) for i in range(101)]
    assert job.first_at - job.submitted_at == pytest.approx(steps[0])
    assert job.last_at - job.first_at == pytest.approx(sum(steps[1:]))


def test_a_prompt_is_computed_in_chunks() -> None:
    config = configured(
        RISING,
        verifier={"prefills": True, "prefill_chunk": 400},
        policies=["none"],
        arrivals={"users": 1, "prompt": 1000, "answer": 3},
    )
    job = jobs(config, "none")[0]
    chunks = [0.02 + 0.0005 * (size - 8) for size in (400, 400, 200)]
    assert job.first_at - job.asked_at == pytest.approx(sum(chunks))
    assert job.last_at - job.first_at == pytest.approx(2 * 0.02)


def test_requests_wait_as_in_a_queue_of_constant_service() -> None:
    """M/D/1 (Pollaczek and Khinchine): mean wait ρ D / (2 (1 − ρ))."""
    service, load = 0.02, 0.6
    config = configured(
        verifier={"max_sequences": 1, "max_waiting": 10_000},
        arrivals={"kind": "poisson", "rate": load / service, "answer": 1},
        duration_s=200.0,
        warmup_s=2.0,
        scheduler={"interval_s": 10.0, "heartbeat_s": 10.0},
    )
    waits = [job.first_at - job.submitted_at - service for job in jobs(config, "none")]
    assert len(waits) > 5000
    assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)
    assert np.mean(np.array(waits) < 1e-9) == pytest.approx(1 - load, abs=0.03)


def test_drafting_beside_the_target_adds_its_share_of_a_step() -> None:
    config = configured(
        arms=[{"policy": "fixed:3", "draft_share": 0.25}],
        arrivals={"users": 1, "answer": 1 + 20 * 4},
    )
    figures = one(config)
    assert figures.per_user == pytest.approx(4 / (0.02 * 1.25), rel=1e-9)
    assert figures.draft_wait_s == pytest.approx(0.02 * 0.25)


def test_a_round_waits_for_its_draft_there_and_back() -> None:
    """Network both ways, one forward pass, its tokens."""
    config = configured(
        policies=["fixed:3"],
        drafters=[{"tokens_per_s": 1000.0, "pass_s": 0.004}],
        network_s=0.001,
        arrivals={"users": 1, "answer": 1 + 20 * 4},
    )
    figures = one(config)
    draft_s = 0.001 + 0.004 + 3 / 1000 + 0.001
    assert figures.draft_wait_s == pytest.approx(draft_s)
    assert figures.draft_latency_s == pytest.approx(draft_s)
    assert figures.per_user == pytest.approx(4 / (0.02 + draft_s), rel=1e-9)


def test_two_groups_hide_a_draft_behind_each_others_step() -> None:
    config = configured(
        policies=["fixed:3"],
        verifier={"groups": 2},
        drafters=[{"tokens_per_s": 1000.0, "pass_s": 0.004}],
        arrivals={"users": 2, "answer": 100_000},
        warmup_s=1.0,
    )
    figures = one(config)
    assert figures.draft_wait_s == pytest.approx(0.0, abs=1e-12)
    assert figures.throughput == pytest.approx(4 / 0.02, rel=0.01)
    assert figures.active == 1.0


def test_a_drafter_too_slow_costs_its_timeout_and_no_more() -> None:
    config = configured(
        policies=["fixed:3"],
        drafters=[{"tokens_per_s": 10.0}],
        drafting={"timeout_s": 0.01},
        arrivals={"users": 1, "answer": 50},
    )
    figures = one(config)
    assert figures.accepted_length == 1.0
    assert figures.drafts_late > 0
    # Behind the first token 49 steps; the last has no room for a draft, and waits for none.
    assert figures.per_user == pytest.approx(49 / (48 * 0.03 + 0.02), rel=1e-9)


def test_a_slower_machine_takes_longer_by_its_slowdown() -> None:
    config = configured(
        verifier={"slowdown": 2.5}, policies=["none"], arrivals={"users": 3, "answer": 50}
    )
    assert one(config).per_user == pytest.approx(1 / 0.05, rel=1e-9)


@pytest.mark.parametrize(("policy", "luck"), [("fixed:3", 0.01), ("top-k", 0.03)])
def test_more_drafters_never_hurt(policy: str, luck: float) -> None:
    """luck: by how much two runs of 12 s differ anyway."""
    config = configured(
        acceptance=0.8,
        policies=[policy],
        drafters=[{"tokens_per_s": 2000.0, "pass_s": 0.002, "max_batch": 8}],
        drafting={"gamma": 3},
        arrivals={"users": 16, "answer": {"kind": "geometric", "mean": 80}},
        sweep={"drafters": [1, 2, 4, 8]},
        duration_s=14.0,
        warmup_s=2.0,
    )
    throughput = [figures.throughput for figures in simulated(config)]
    for fewer, more in itertools.pairwise(throughput):
        assert more > (1 - luck) * fewer
    assert throughput[-1] > 1.3 * throughput[0]


def test_noise_of_steps_keeps_their_mean() -> None:
    config = configured(
        verifier={"step_noise": 0.3},
        policies=["none"],
        arrivals={"users": 1, "answer": 100_000},
        duration_s=80.0,
    )
    figures = one(config)
    assert figures.step_s == pytest.approx(0.02, rel=0.02)
