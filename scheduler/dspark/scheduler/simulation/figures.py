"""What a simulation says: plain numbers, the same for the same seed, but for `costs` (this
machine's time)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.scheduler.simulation.config import Arm, SimulationConfig
from dspark.scheduler.simulation.requests import Job
from dspark.scheduler.simulation.run import Ran

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm at one load. setting, value: what a sweep varied. seconds: that were measured.

    throughput: tokens a second of all verifiers; per_verifier. per_user: tokens a second of a
    request while it is answered, all tokens behind the first ones over all their seconds. active:
    mean requests in a step. budget: tokens verified of a request in a step, the anchor included
    (1 + ℓ). accepted_length: τ. ttft_s, tpot_s: seconds by percentile. misses: parts of the
    answered requests beyond their objective or deadline. refused, late_refused: requests, for want
    of room, for their deadline. draft_wait_s: mean seconds that a round waited for its draft;
    draft_latency_s: from asking to having. drafters_busy: part of their time. tenants: parts of all
    tokens. store_calls: by method, a second and verifier. whole: false if it was stopped early.
    """

    arm: str
    setting: str
    value: float
    seconds: float
    whole: bool
    answered: int
    throughput: float
    per_verifier: float
    per_user: float
    active: float
    budget: float
    accepted_length: float
    verified: int
    accepted: int
    step_s: float
    busy: float
    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    misses: Mapping[str, float]
    refused: int
    late_refused: int
    draft_wait_s: float
    draft_latency_s: float
    drafts_late: int
    drafters_busy: float
    tenants: Mapping[str, float]
    local_plans: int
    guided_plans: int
    store_calls: Mapping[str, float]


def figures(config: SimulationConfig, arm: Arm, ran: Ran, setting: str, value: float) -> Figures:
    counts, jobs, seconds = ran.measures.counts, ran.measures.jobs, max(ran.seconds, 1e-12)
    verifiers = sum(kind.count for kind in config.verifiers)
    tokens = float(counts.tokens.sum())
    rounds = max(counts.rounds, 1)
    ttft = [job.first_at - job.asked_at for job in jobs]
    decoding = [job for job in jobs if job.answer > job.first_tokens]
    spans = [job.last_at - job.first_at for job in decoding]
    rest = [job.answer - job.first_tokens for job in decoding]
    tpot = [span / n for span, n in zip(spans, rest, strict=True)]
    calls = sum(ran.store_calls.values())
    return Figures(
        arm=arm.label,
        setting=setting,
        value=value,
        seconds=ran.seconds,
        whole=ran.whole,
        answered=len(jobs),
        throughput=tokens / seconds,
        per_verifier=tokens / seconds / verifiers,
        per_user=sum(rest) / sum(spans) if sum(spans) > 0 else 0.0,
        active=counts.rounds / max(counts.steps, 1),
        budget=1 + counts.verified / rounds,
        accepted_length=1 + counts.accepted / rounds,
        verified=counts.verified,
        accepted=counts.accepted,
        step_s=counts.busy_s / max(counts.steps, 1),
        busy=counts.busy_s / seconds / verifiers,
        ttft_s=percentiles(ttft),
        tpot_s=percentiles(tpot),
        misses=_misses(config, jobs, ttft, tpot),
        refused=counts.refused,
        late_refused=counts.late_refused,
        draft_wait_s=counts.draft_wait_s / max(counts.draft_rounds, 1),
        draft_latency_s=counts.latency_s / max(counts.latencies, 1),
        drafts_late=counts.late,
        drafters_busy=sum(ran.drafters_busy)
        / (ran.simulated_s * max(len(ran.drafters_busy), 1) or 1.0),
        tenants={
            tenant.name: float(mine) / max(tokens, 1.0)
            for tenant, mine in zip(config.tenants, counts.tokens, strict=True)
        },
        local_plans=ran.local_plans,
        guided_plans=ran.guided_plans,
        store_calls={
            name: n / max(ran.simulated_s, 1e-12) / verifiers
            for name, n in sorted({**ran.store_calls, "all": calls}.items())
        },
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of none: empty."""
    if not values:
        return {}
    points = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return {f"p{p}": float(point) for p, point in zip(PERCENTILES, points, strict=True)}


def _misses(
    config: SimulationConfig, jobs: Sequence[Job], ttft: Sequence[float], tpot: Sequence[float]
) -> dict[str, float]:
    """Parts of those that have the objective; an objective that nobody has is left out."""
    misses = {}
    for name, limit, values in (
        ("ttft", config.objectives.ttft_s, ttft),
        ("tpot", config.objectives.tpot_s, tpot),
    ):
        if limit and values:
            misses[name] = sum(value > limit for value in values) / len(values)
    tenants = config.tenants
    late = [
        job.last_at - job.asked_at > deadline
        for job in jobs
        if (deadline := tenants[job.tenant].deadline_s)
    ]
    slow = [
        (job.answer - job.first_tokens) < floor * (job.last_at - job.first_at)
        for job in jobs
        if (floor := tenants[job.tenant].floor_tps) and job.last_at > job.first_at
    ]
    for name, missed in (("deadline", late), ("floor", slow)):
        if missed:
            misses[name] = sum(missed) / len(missed)
    return misses


@dataclass(frozen=True, slots=True)
class Costs:
    """What it took on this machine. wall_s: seconds of the whole simulation. look_s, plan_s:
    processor seconds of one round of the central scheduler, by percentile. rounds: that planned.
    """

    wall_s: float
    look_s: Mapping[str, float]
    plan_s: Mapping[str, float]
    rounds: int


def costs(ran: Ran, wall_s: float) -> Costs:
    plan_s = ran.timings.plan_s
    return Costs(wall_s, percentiles(ran.timings.look_s), percentiles(plan_s), len(plan_s))
