"""What the joint plan of a cluster costs (bound: well within the plan interval of 50 ms).

    OMP_NUM_THREADS=1 pytest benchmarks/bench_joint.py -s --benchmark-columns=min,median,max

1,000 verifiers × 8 tenants, each tenant with a histogram in each report, 250 drafters, each
verifier drawing on 4 of them. Prints milliseconds of each part and the memory of the state.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.reports import SURVIVAL_BINS, DrafterUse, Report, TenantReport
from dspark.scheduler import StepCost
from dspark.scheduler.intake import check_report
from dspark.scheduler.joint import plan_jointly
from dspark.scheduler.joint.outlook import Cluster, Outlook, VerifierView, observed

V, TENANTS, DRAFTERS, GAMMA = 1000, 8, 250, 7
GRID = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 4096)


def step_cost(rng: np.random.Generator) -> StepCost:
    """A fixed part, then linear with stairs of 64 tokens; every verifier's its own."""
    slope = 1e-4 * rng.uniform(0.3, 3.0)
    return StepCost(GRID, tuple(0.02 + slope * (-(-B // 64) * 64) for B in GRID), 1e-5, 1e-9)


def report(rng: np.random.Generator, v: int, queued: int, floor_tps: float) -> Report:
    requests = int(rng.integers(50, 150))
    tenants = []
    for i in range(TENANTS):
        active = requests // TENANTS + (i < requests % TENANTS)
        drafts = np.cumprod(rng.beta(1 + i, 2, (2 * active, GAMMA)), axis=1)
        bins = np.bincount((drafts.ravel() * SURVIVAL_BINS).astype(int), minlength=SURVIVAL_BINS)
        tenants.append(
            TenantReport(
                f"t{i}", active, queued, 3 * active, floor_tps * active, tuple(bins.tolist())
            )
        )
    uses = tuple(DrafterUse(f"d{(v + k) % DRAFTERS}", 100, 0.0) for k in range(4))
    return Report(
        f"v{v}", 1, 1, 0.05, 2, requests, 64.0, 1000.0 * requests, 0.0, 100, 8, tuple(tenants), uses
    )  # fmt: skip


def cluster(queued: int, capacity: float, floor_tps: float = 0.0) -> Cluster:
    rng = np.random.default_rng(0)
    views = {
        f"v{v}": VerifierView(
            step_cost(rng),
            GAMMA,
            report(rng, v, queued, floor_tps),
            {f"d{(v + k) % DRAFTERS}": 25.0 for k in range(4)},
        )
        for v in range(V)
    }
    shares = {f"t{i}": 1.0 + i for i in range(TENANTS)}
    return Cluster(views, {f"d{d}": capacity for d in range(DRAFTERS)}, shares)


def later(cluster: Cluster, seen_through: int) -> Cluster:
    """The same cluster, one interval on."""
    views = {}
    for name, view in cluster.verifiers.items():
        assert view.report is not None
        views[name] = replace(view, report=replace(view.report, seen_through=seen_through))
    return replace(cluster, verifiers=views)


def measure(benchmark: Any, name: str, call: Callable[[], Any], rounds: int = 20) -> Any:
    """Wall time goes to the table; processor time, which other work disturbs less, is printed."""
    cpu_ms = []

    def timed() -> Any:
        started = time.process_time()
        result = call()
        cpu_ms.append((time.process_time() - started) * 1e3)
        return result

    result = benchmark.pedantic(timed, rounds=rounds, warmup_rounds=2)
    wall_ms = np.array(benchmark.stats.stats.data) * 1e3
    benchmark.extra_info["cpu_ms"] = float(np.median(cpu_ms[2:]))
    print(f"\n{name}: {np.median(wall_ms):.1f} ms", end="")
    print(f" (processor: median {np.median(cpu_ms[2:]):.1f}, max {max(cpu_ms[2:]):.1f})")
    return result


@pytest.mark.parametrize(
    ("name", "queued", "capacity", "floor_tps"),
    [
        ("drafters with room, nobody waits", 0, 1e9, 0.0),
        ("drafters asked for 1.5 times what they make", 0, 30_000.0, 0.0),
        ("drafters asked for 11 times what they make", 0, 4000.0, 0.0),
        ("drafters with room, all tenants wait", 4, 1e9, 0.0),
        ("drafters full, all tenants wait", 4, 30_000.0, 0.0),
        ("drafters full, all tenants wait, floors missed", 4, 30_000.0, 40.0),
    ],
)
def test_plan(benchmark: Any, name: str, queued: int, capacity: float, floor_tps: float) -> None:
    now = cluster(queued, capacity, floor_tps)
    outlook = Outlook()
    for i in range(3):
        plan, outlook = plan_jointly(later(now, i + 1), outlook)
    assert bool(plan.full) == (capacity < 1e9)
    steps = iter([later(now, 10 + i) for i in range(30)])

    def one() -> None:
        nonlocal outlook
        _, outlook = plan_jointly(next(steps), outlook)

    measure(benchmark, name, one)


def test_reports_taken_in(benchmark: Any) -> None:
    now = cluster(0, 1e9)
    first = observed(Outlook(), now)
    second = later(now, 2)
    measure(benchmark, "1,000 reports taken in", lambda: observed(first, second))


def test_reports_checked(benchmark: Any) -> None:
    reports = [view.report for view in cluster(0, 1e9).verifiers.values()]
    measure(
        benchmark, "1,000 reports checked", lambda: [check_report(r, GAMMA) for r in reports if r]
    )


def test_memory() -> None:
    now = cluster(4, 30_000.0)
    tracemalloc.start()
    started = time.perf_counter()
    _, outlook = plan_jointly(now, Outlook())
    cold_ms = (time.perf_counter() - started) * 1e3
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"\nfirst plan {cold_ms:.0f} ms (traced), state {held / 2**20:.0f} MiB, ", end="")
    print(f"peak {peak / 2**20:.0f} MiB, cells {len(outlook.of)}")
