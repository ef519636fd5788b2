"""What an engine has seen since its last report to the scheduler, and the reports made of it.

The engine's thread only appends to lists and adds numbers; the histograms are made elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dspark.core.reports import (
    SURVIVAL_BINS,
    Counts,
    DrafterUse,
    Report,
    TenantReport,
    VerdictCounts,
)
from dspark.core.requests import Request
from dspark.core.sampling import SamplingMode
from dspark.scheduler import sts
from dspark.scheduler.intake import MAX_TENANTS

Table = tuple[Counts, ...]
Verdicts = tuple[VerdictCounts, ...]

# What covers no time cannot be a rate.
SHORTEST_S = 1e-6
# A second of 256 sequences at 16 steps.
MAX_DRAFTS = 4096
# Seconds of verdicts that go up together.
VERDICTS_S = 1.0
# Reports that the same verdicts go up in, where no plan says that they were seen.
TELLINGS = 5
# Plan intervals between two reports of an idle engine, which says no more than that it is there.
IDLE_INTERVALS = 10


@dataclass(frozen=True, slots=True)
class FinishedDraft:
    """A draft whose verdict is in. number: of its arrival. logits, survival: [γ], the second may
    end early (L5). judged: of its tokens, those whose verdict was seen and stands in the text;
    accepted: of those. source: who made it, a replica id or a local drafter's name."""

    number: int
    tenant: str
    drafter_id: str
    mode: SamplingMode
    logits: NDArray[np.float32]
    survival: NDArray[np.float64]
    judged: int
    accepted: int
    source: str = ""


@dataclass(slots=True)
class Tally:
    """Sums over steps since `since` (seconds on the engine's clock). Of drafts the newest
    MAX_DRAFTS are kept: with nobody to report to they must not pile up. draft_s: by source, seconds
    that rounds waited for drafts and nothing else was done, summed over rounds. last_step: whose
    requests were in it."""

    since: float
    steps: int = 0
    requests: int = 0
    prefill_tokens: int = 0
    context: int = 0
    residual_s: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    drafts: deque[FinishedDraft] = field(default_factory=lambda: deque(maxlen=MAX_DRAFTS))
    draft_s: dict[str, float] = field(default_factory=dict)
    last_step: list[Request] = field(default_factory=list)

    def add_step(self, R: int, P: int, context: int, residual_s: float) -> None:
        self.steps += 1
        self.requests += R
        self.prefill_tokens += P
        self.context += context
        self.residual_s += residual_s

    def add_tokens(self, tenant: str, count: int) -> None:
        self.tokens[tenant] = self.tokens.get(tenant, 0) + count


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who is here now. seen_through: newest draft with a verdict. By tenant: active, queued: runs
    in steps and waiting; floors: tokens a second that the active ones should have together."""

    now: float
    seen_through: int
    free_blocks: int
    active: Counter[str] = field(default_factory=Counter)
    queued: Counter[str] = field(default_factory=Counter)
    floors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        now: float,
        seen_through: int,
        free_blocks: int,
        *,
        running: Sequence[Request],
        waiting: Iterable[Request],
    ) -> Crowd:
        floors: dict[str, float] = {}
        for request in running:
            if request.floor_tps:
                floors[request.tenant] = floors.get(request.tenant, 0.0) + request.floor_tps
        active = Counter(request.tenant for request in running)
        queued = Counter(request.tenant for request in waiting)
        return cls(now, seen_through, free_blocks, active, queued, floors)


class Reporter:
    """Makes the reports of a verifier's life `epoch`, one for each tally.

    Verdict counts are the larger part of a report, and what they are for, calibration, takes
    minutes: they are kept for VERDICTS_S and go up together. The scheduler keeps a verifier's last
    report only, so the same are told again until a plan has seen them, or TELLINGS times.
    """

    def __init__(self, verifier: str, epoch: int) -> None:
        self._verifier = verifier
        self._epoch = epoch
        self._judged: deque[FinishedDraft] = deque(maxlen=MAX_DRAFTS)
        self._told_at = -math.inf
        self._told_through = 0
        self._telling: Mapping[str, Verdicts] = {}
        self._tellings = 0
        self._idle = 0

    def report(self, tally: Tally, crowd: Crowd) -> Report | None:
        """None where there is nothing to say: an idle verifier only says now and then that it is
        there."""
        self._judged += tally.drafts
        verdicts = self._due(crowd)
        self._idle = 0 if tally.steps or crowd.active or crowd.queued else self._idle + 1
        if self._idle % IDLE_INTERVALS > 1 and not verdicts:
            return None
        through = self._told_through if verdicts else 0
        return report_of(tally, crowd, self._verifier, self._epoch, verdicts, through)

    def heard(self, seen_through: int) -> None:
        """A plan for this life has come that was made of a report with this seen_through. All of
        them since the verdicts were told first had them too."""
        if seen_through >= self._told_through:
            self._telling = {}

    def _due(self, crowd: Crowd) -> Mapping[str, Verdicts]:
        """Verdicts to be told now. New ones are told apart by what was seen, so there must be
        something new."""
        if crowd.now - self._told_at >= VERDICTS_S and crowd.seen_through > self._told_through:
            self._telling = verdicts_of(self._judged)
            self._judged.clear()
            self._told_at, self._told_through = crowd.now, crowd.seen_through
            self._tellings = 0
        if self._tellings >= TELLINGS:
            return {}
        self._tellings += 1
        return self._telling


def report_of(
    tally: Tally,
    crowd: Crowd,
    verifier: str,
    epoch: int,
    told: Mapping[str, Verdicts] = MappingProxyType({}),
    told_through: int = 0,
) -> Report:
    """One report. told: by tenant, the verdicts in it; told_through: Report.verdicts_through.

    Of more tenants than a report may name, those with most in steps are named, then those with most
    waiting: what is summed over all (means, queue, drafters) is whole.
    """
    steps = max(tally.steps, 1)
    drafts = _by_tenant(tally.drafts)
    names = sorted({*crowd.active, *crowd.queued, *tally.tokens, *drafts, *told})
    if len(names) > MAX_TENANTS:
        names.sort(key=lambda name: (-crowd.active[name], -crowd.queued[name]))
        names = sorted(names[:MAX_TENANTS])
    return Report(
        verifier=verifier,
        epoch=epoch,
        seen_through=crowd.seen_through,
        interval_s=max(crowd.now - tally.since, SHORTEST_S),
        steps=tally.steps,
        requests=tally.requests / steps,
        prefill_tokens=tally.prefill_tokens / steps,
        context=tally.context / steps,
        step_residual_s=tally.residual_s / steps,
        free_blocks=crowd.free_blocks,
        queue=crowd.queued.total(),
        tenants=tuple(
            _tenant(
                name, crowd, tally.tokens.get(name, 0), drafts.get(name, ()), told.get(name, ())
            )
            for name in names
        ),
        drafters=_uses(tally),
        verdicts_through=told_through,
    )


def verdicts_of(judged: Iterable[FinishedDraft]) -> dict[str, Verdicts]:
    """By tenant, of those that have any."""
    counts = {name: verdict_counts(drafts) for name, drafts in _by_tenant(judged).items()}
    return {name: verdicts for name, verdicts in counts.items() if verdicts}


def _by_tenant(drafts: Iterable[FinishedDraft]) -> dict[str, list[FinishedDraft]]:
    by_tenant: dict[str, list[FinishedDraft]] = {}
    for draft in drafts:
        by_tenant.setdefault(draft.tenant, []).append(draft)
    return by_tenant


def _tenant(
    name: str,
    crowd: Crowd,
    tokens: int,
    drafts: Sequence[FinishedDraft],
    verdicts: Verdicts,
) -> TenantReport:
    return TenantReport(
        tenant=name,
        active=crowd.active[name],
        queued=crowd.queued[name],
        tokens=tokens,
        floor_tps=crowd.floors.get(name, 0.0),
        survivals=survival_histogram([draft.survival for draft in drafts]),
        verdicts=verdicts,
    )


def survival_histogram(survivals: list[NDArray[np.float64]]) -> tuple[int, ...]:
    """[SURVIVAL_BINS] tokens by a_k, 1 in the last bin; empty for none."""
    if not survivals:
        return ()
    a = np.concatenate(survivals)
    bins = np.minimum((a * SURVIVAL_BINS).astype(np.intp), SURVIVAL_BINS - 1)
    return tuple(np.bincount(bins, minlength=SURVIVAL_BINS).tolist())


def verdict_counts(drafts: Iterable[FinishedDraft]) -> tuple[VerdictCounts, ...]:
    """By drafter and mode, of drafts with a verdict."""
    groups: dict[tuple[str, SamplingMode], list[FinishedDraft]] = {}
    for draft in drafts:
        if draft.judged:
            groups.setdefault((draft.drafter_id, draft.mode), []).append(draft)
    return tuple(
        VerdictCounts(drafter_id, mode, *_reached_and_accepted(group))
        for (drafter_id, mode), group in sorted(groups.items())
    )


def _reached_and_accepted(drafts: list[FinishedDraft]) -> tuple[Table, Table]:
    gamma = max(draft.judged for draft in drafts)
    logits = np.zeros((len(drafts), gamma))
    for row, draft in zip(logits, drafts, strict=True):
        row[: draft.judged] = draft.logits[: draft.judged]
    judged = [draft.judged for draft in drafts]
    reached, accepted = sts.tally(logits, judged, [draft.accepted for draft in drafts])
    return _rows(reached), _rows(accepted)


def _uses(tally: Tally) -> tuple[DrafterUse, ...]:
    drafted: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    for draft in tally.drafts:
        drafted[draft.source] += len(draft.logits)
        rounds[draft.source] += 1
    return tuple(
        DrafterUse(name, drafted[name], tally.draft_s.get(name, 0.0) / rounds[name])
        for name in sorted(drafted)
    )


def _rows(counts: NDArray[np.int64]) -> Table:
    return tuple(tuple(row) for row in counts.tolist())
