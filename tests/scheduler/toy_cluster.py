"""Clusters to plan for, as small as a test needs them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dspark.core.reports import SURVIVAL_BINS, DrafterUse, Report, TenantReport
from dspark.scheduler import StepCost
from dspark.scheduler.joint.outlook import Cluster, VerifierView

# Plans and clusters are dear to make on a busy machine; that says nothing of them.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

GAMMA = 7
GRID = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)

# A step that reads weights, where more tokens are nearly free, and one that computes.
CHEAP = StepCost(GRID, tuple(0.02 + 1e-5 * B for B in GRID))
DEAR = StepCost(GRID, tuple(0.002 + 1e-3 * B for B in GRID))


def bins(survival: Mapping[float, int]) -> tuple[int, ...]:
    """Counts by bin of {survival: tokens}."""
    counts = [0] * SURVIVAL_BINS
    for a, n in survival.items():
        counts[min(int(a * SURVIVAL_BINS), SURVIVAL_BINS - 1)] += n
    return tuple(counts)


def decaying(confidence: float, drafts: int, gamma: int = GAMMA) -> tuple[int, ...]:
    """Of `drafts` whole drafts with the same confidence at each position."""
    counts: dict[float, int] = {}
    for k in range(1, gamma + 1):
        counts[confidence**k] = counts.get(confidence**k, 0) + drafts
    return bins(counts)


def tenant(
    name: str,
    active: int = 10,
    confidence: float | None = 0.9,
    queued: int = 0,
    tokens: int = 0,
    floor_tps: float = 0.0,
) -> TenantReport:
    """floor_tps: of each of its requests. Drafts enough to drown what is known beforehand."""
    survivals = () if confidence is None else decaying(confidence, 10_000)
    return TenantReport(name, active, queued, tokens, floor_tps * active, survivals)


def report(
    verifier: str,
    tenants: Sequence[TenantReport] = (),
    seen_through: int = 1,
    R: float | None = None,
    **more: Any,
) -> Report:
    R = float(sum(t.active for t in tenants)) if R is None else R
    fields = {"epoch": 1, "interval_s": 1.0, "steps": 20, "requests": R, **more}
    return Report(verifier=verifier, seen_through=seen_through, tenants=tuple(tenants), **fields)


def view(
    cost: StepCost,
    *tenants: TenantReport,
    name: str = "v",
    drafters: Mapping[str, float] | None = None,
    gamma: int = GAMMA,
    **more: Any,
) -> VerifierView:
    uses = tuple(DrafterUse(d, 1000, 0.0) for d in drafters or {})
    more = {"drafters": uses, **more}
    return VerifierView(cost, gamma, report(name, tenants, **more), drafters or {})


def cluster(
    verifiers: Mapping[str, VerifierView],
    drafters: Mapping[str, float] | None = None,
    shares: Mapping[str, float] | None = None,
) -> Cluster:
    return Cluster(dict(verifiers), drafters or {}, shares or {})


@st.composite
def step_costs(draw: st.DrawFn, convex: bool = False) -> StepCost:
    """T at some B of 1..300, with stairs unless convex."""
    tokens = sorted(draw(st.lists(st.integers(1, 300), min_size=2, max_size=8, unique=True)))
    rise = st.one_of(st.just(0.0), st.floats(0.0, 1e-3), st.floats(0.0, 0.02))
    slopes = draw(st.lists(rise, min_size=len(tokens) - 1, max_size=len(tokens) - 1))
    slopes = sorted(slopes) if convex else slopes
    widths = np.diff(tokens).tolist()
    rises = [slope * width for slope, width in zip(slopes, widths, strict=True)]
    first = draw(st.floats(0.005, 0.1))
    return StepCost(
        tuple(tokens),
        tuple(itertools.accumulate(rises, initial=first)),
        draw(st.floats(0.0, 1e-3)),
        draw(st.floats(0.0, 1e-6)),
        0.0 if convex else draw(st.sampled_from([0.0, 1e-3])),
    )


@st.composite
def clusters(draw: st.DrawFn, waiting: bool = True) -> Cluster:
    """Up to four verifiers and three drafters, two tenants; anything may be scarce."""
    names = [f"v{i}" for i in range(draw(st.integers(1, 4)))]
    pool = [f"d{i}" for i in range(draw(st.integers(0, 3)))]
    confidence = st.floats(0.05, 0.98)
    verifiers = {}
    for name in names:
        tenants = [
            tenant(t, draw(st.integers(1, 20)), draw(confidence), draw(queued(waiting)))
            for t in ("a", "b")
        ]
        links = {d: float(draw(st.integers(1, 20))) for d in pool if draw(st.booleans())}
        exposed = draw(st.sampled_from([0.0, 0.0, 0.005]))
        uses = tuple(DrafterUse(d, 100, exposed) for d in links)
        sent = report(name, tenants, drafters=uses)
        verifiers[name] = VerifierView(draw(step_costs()), GAMMA, sent, links)
    capacity = {d: draw(st.floats(50.0, 5000.0)) for d in pool}
    return Cluster(verifiers, capacity, {"a": 1.0, "b": draw(st.sampled_from([1.0, 3.0]))})


def queued(waiting: bool) -> st.SearchStrategy[int]:
    return st.integers(0, 20) if waiting else st.just(0)
