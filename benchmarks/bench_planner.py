"""What planning costs a step (bound: 0.2 ms at R = 256, γ = 7; 20 µs for 2,000 points of T).

    pytest benchmarks/bench_planner.py --benchmark-columns=min,median,max

p99 in µs is in `extra_info` of `--benchmark-json`, and printed with `-s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dspark.scheduler import OnlineStepCost, Policy, StepCost, capacity, plan, saving

R, GAMMA = 256, 7
RNG = np.random.default_rng(0)
SURVIVAL = [np.cumprod(RNG.beta(5, 2, GAMMA)) for _ in range(R)]
GRID = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 4096)
# A fixed part, then linear with stairs of 64 tokens: about half of the drafts are worth it.
COST = StepCost(GRID, tuple(0.02 + 1e-4 * (-(-B // 64) * 64) for B in GRID), 1e-4, 1e-8)


def measure(benchmark: Any, name: str, call: Callable[[], Any], rounds: int = 5000) -> Any:
    result = benchmark.pedantic(call, rounds=rounds, warmup_rounds=rounds // 25)
    times = np.array(benchmark.stats.stats.data)
    p99 = float(np.quantile(times, 0.99)) * 1e6
    benchmark.extra_info["p99_us"] = p99
    print(f"\n{name}: median {np.median(times) * 1e6:.1f} µs, p99 {p99:.1f} µs")
    return result


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("early-stop", {}),
        ("top-k", {"capacity": 700}),
        ("top-k, caps and weights", {"capacity": 700, "caps": [5] * R, "weights": [1.0] * R}),
        ("early-stop, caps and weights", {"caps": [5] * R, "weights": [1.0] * R}),
        ("fixed:3", {}),
    ],
)
def test_plan(benchmark: Any, name: str, more: dict[str, Any]) -> None:
    policy = Policy.parse(name.split(",")[0])
    lengths = measure(benchmark, name, lambda: plan(SURVIVAL, COST, 64, R, 60_000, policy, **more))
    assert 0 < lengths.sum() < R * GAMMA


@pytest.mark.parametrize("requests", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("name", ["early-stop", "top-k"])
def test_plan_of_many(benchmark: Any, name: str, requests: int) -> None:
    """No bound beyond R = 256: what a step of so many requests would pay."""
    survival = [SURVIVAL[r % R] for r in range(requests)]
    most = None if name == "early-stop" else 3 * requests
    lengths = measure(
        benchmark,
        f"{name}, R = {requests}",
        lambda: plan(survival, COST, 64, requests, 60_000, Policy.parse(name), most),
        rounds=500,
    )
    assert lengths.sum() <= requests * GAMMA


def test_capacity(benchmark: Any) -> None:
    assert measure(benchmark, "capacity", lambda: capacity(SURVIVAL, COST, 64, R, 60_000)) > 0


def test_curve(benchmark: Any) -> None:
    measure(benchmark, "curve of 2,000", lambda: COST.curve(64, R, 60_000, 2000))


def test_saving(benchmark: Any) -> None:
    lengths = plan(SURVIVAL, COST, 64, R, 60_000, Policy.parse("early-stop"))
    expected = [float(a[:n].sum()) for a, n in zip(SURVIVAL, lengths, strict=True)]
    measure(benchmark, "saving", lambda: saving(expected, lengths.tolist(), 4000.0, 0.05))


def test_observe(benchmark: Any) -> None:
    online = OnlineStepCost(COST)
    measure(benchmark, "observe", lambda: online.observe(64, R, 600, 60_000, 0.11))
