"""What is counted while a simulation runs, from the end of its warm-up on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dspark.scheduler.simulation.planning import Step
from dspark.scheduler.simulation.profiles import FloatArray, IntArray
from dspark.scheduler.simulation.requests import Job


@dataclass(slots=True)
class Counts:
    """rounds: sequences in steps; verified, accepted: their draft tokens. tokens: committed, by
    tenant. drafted, draft_wait_s, draft_rounds: draft tokens received; seconds that steps waited
    for drafts, times the sequences that waited; and these. latency_s: from asking to having.
    late: asks whose draft came too late. refused, late_refused: requests, for want of room, for
    their deadline."""

    steps: int = 0
    rounds: int = 0
    verified: int = 0
    accepted: int = 0
    busy_s: float = 0.0
    tokens: FloatArray = field(default_factory=lambda: np.zeros(0))
    drafted: int = 0
    draft_wait_s: float = 0.0
    draft_rounds: int = 0
    latency_s: float = 0.0
    latencies: int = 0
    late: int = 0
    refused: int = 0
    late_refused: int = 0


class Measures:
    """since: from when on things count. jobs: finished since then."""

    def __init__(self, tenants: int, since: float) -> None:
        self.since = since
        self.counts = Counts(tokens=np.zeros(tenants))
        self.jobs: list[Job] = []

    def add_step(
        self,
        now: float,
        step: Step,
        seconds: float,
        accepted: int,
        tokens: IntArray,
        tenants: IntArray,
    ) -> None:
        """tokens, tenants: [n] committed, of whom."""
        if now < self.since:
            return
        counts = self.counts
        counts.steps += 1
        counts.busy_s += seconds
        counts.rounds += step.R
        counts.verified += int(step.lengths.sum())
        counts.accepted += accepted
        counts.tokens += np.bincount(tenants, tokens, len(counts.tokens))

    def add_wait(self, now: float, seconds: float, rounds: int) -> None:
        """Rounds that began after waiting so long for their drafts."""
        if now >= self.since:
            self.counts.draft_wait_s += seconds * rounds
            self.counts.draft_rounds += rounds

    def add_drafts(self, now: float, tokens: int, latency_s: float) -> None:
        if now >= self.since:
            self.counts.drafted += tokens
            self.counts.latency_s += latency_s
            self.counts.latencies += 1

    def add_late(self, now: float) -> None:
        self.counts.late += now >= self.since

    def add_refusal(self, now: float, late: bool) -> None:
        if now >= self.since:
            self.counts.late_refused += late
            self.counts.refused += not late

    def add_job(self, now: float, job: Job) -> None:
        if now >= self.since:
            self.jobs.append(job)
