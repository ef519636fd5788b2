"""What the planner knows of the cluster: reports of many intervals, smoothed. A value in and out.

One interval is a step or two and says little; one without drafts says nothing of drafts and must
not make the plan forget what they are worth. What two planners of the same reports must agree on is
all in here.

Arrays are over V verifiers, or over C *cells*: a tenant at a verifier, a verifier's cells side by
side and at least one each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import InvalidRequest
from dspark.core.reports import SURVIVAL_BINS, Report
from dspark.scheduler.joint.steps import FloatArray, IntArray, Tables
from dspark.scheduler.step_cost import StepCost

# Seconds after which an observation weighs 1/e of a new one. A step's size changes as fast as
# requests come and go; what drafts are worth and what is served changes with what is asked.
STEP_MEMORY_S = 0.3
DRAFT_MEMORY_S = 2.0
SERVED_MEMORY_S = 3.0
# No interval counts for more, however the reporter's clock jumps.
LONGEST_INTERVAL_S = 1.0
# A tenant that a verifier says nothing of is forgotten after so many plans (5 s at 50 ms).
FORGOTTEN_AFTER = 100
MAX_CELLS = 256  # a verifier
# What came under a budget is scaled up by at most 1 / this; a drafter with less of a verifier's
# drafts than this part of the most is none of its drafters any more.
SMALLEST_PART = 0.02
SMALLEST_LINK = 1e-3

_NO_SURVIVALS = (0,) * SURVIVAL_BINS


@dataclass(frozen=True, slots=True)
class VerifierView:
    """A verifier as the planner gets it. gamma: draft tokens of a whole block of its drafters.
    report: the newest, checked (`check_report`); None if none came yet, and the same again is fine.
    drafters: by drafter replica, the runs it holds that were given this drafter; empty: as the
    drafts come that it reports."""

    step_cost: StepCost
    gamma: int
    report: Report | None = None
    drafters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything a joint plan is made from. drafters: by replica, draft tokens a second that it
    could make; 0 if not measured, and then it bounds nothing. shares: by tenant, what it should get
    beside others where more is asked than can be served; the rest have default_share. Raises
    `InvalidRequest` naming the field."""

    verifiers: Mapping[str, VerifierView]
    drafters: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    default_share: float = 1.0

    def __post_init__(self) -> None:
        for name, capacity in self.drafters.items():
            if not (math.isfinite(capacity) and capacity >= 0):
                raise InvalidRequest(f"drafters[{name!r}]", capacity, "must be a rate of 0 or more")
        shares = [("default_share", self.default_share)]
        shares += [(f"shares[{name!r}]", share) for name, share in self.shares.items()]
        for field_name, share in shares:
            if not (math.isfinite(share) and share > 0):
                raise InvalidRequest(field_name, share, "must be a number above 0")
        for name, view in self.verifiers.items():
            if not 1 <= view.gamma <= MAX_GAMMA:
                limit = f"must be in [1, {MAX_GAMMA}]"
                raise InvalidRequest(f"verifiers[{name!r}].gamma", view.gamma, limit)
            for drafter, runs in view.drafters.items():
                if not (math.isfinite(runs) and runs >= 0):
                    at = f"verifiers[{name!r}].drafters[{drafter!r}]"
                    raise InvalidRequest(at, runs, "must be a number of 0 or more")


def _zeros(*shape: int) -> FloatArray:
    return np.zeros(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """rows: by verifier, its cell of each tenant, cells numbered in order of `verifiers`.

    Of verifiers [V]: epoch, seen_through; requests (R), prefill (P), context: means of a step, 0
    before the first; exposed_s: draft time that a round waited for. starts: first cell.
    Of cells [C]: of (verifier), tenant (index into `tenants`); active, queued, floor_tps: newest;
    served: tokens a second; survivals [C, 64]: counts that fade; silent: plans since it was named.
    What the last plan leaves to the next: weight [C] that floors asked for beyond 1; alone [C]
    tokens a second of the verifier if it had this tenant only, 0 if not worked out; by tenant, log
    corrections of shares (lean) and log prices; blend of own and central shares; granted, by
    verifier and drafter with a budget, the part of what it could use.
    links: by verifier, draft tokens a second that it would have of each drafter of the pool.
    interval_s: mean of what the newest reports cover, 0 if none came. plans: made so far.
    """

    verifiers: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: MappingProxyType({}))
    tables: Tables | None = None
    epoch: tuple[int, ...] = ()
    seen_through: tuple[int, ...] = ()
    requests: FloatArray = field(default_factory=lambda: _zeros(0))
    prefill: FloatArray = field(default_factory=lambda: _zeros(0))
    context: FloatArray = field(default_factory=lambda: _zeros(0))
    exposed_s: FloatArray = field(default_factory=lambda: _zeros(0))
    starts: IntArray = field(default_factory=lambda: np.zeros(0, np.intp))
    of: IntArray = field(default_factory=lambda: np.zeros(0, np.intp))
    tenant: IntArray = field(default_factory=lambda: np.zeros(0, np.intp))
    active: FloatArray = field(default_factory=lambda: _zeros(0))
    queued: FloatArray = field(default_factory=lambda: _zeros(0))
    floor_tps: FloatArray = field(default_factory=lambda: _zeros(0))
    served: FloatArray = field(default_factory=lambda: _zeros(0))
    survivals: FloatArray = field(default_factory=lambda: _zeros(0, SURVIVAL_BINS))
    silent: FloatArray = field(default_factory=lambda: _zeros(0))
    weight: FloatArray = field(default_factory=lambda: _zeros(0))
    alone: FloatArray = field(default_factory=lambda: _zeros(0))
    lean: Mapping[str, float] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    blend: float = 1.0
    granted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    interval_s: float = 0.0
    plans: int = 0


def observed(before: Outlook, cluster: Cluster) -> Outlook:
    """`before` with the cluster's new reports taken in.

    A report of an older epoch, or that has seen less than one already taken in, is late and
    changes nothing; one that has seen no newer draft is a repetition as far as drafts go. A
    verifier that is not in the cluster any more is forgotten.
    """
    was = {name: v for v, name in enumerate(before.verifiers)}
    epoch, seen_through, news = [], [], []
    for v, (name, view) in enumerate(cluster.verifiers.items()):
        old, report = was.get(name), view.report
        mark = (before.epoch[old], before.seen_through[old]) if old is not None else (-1, -1)
        if report is not None and (report.epoch, report.seen_through) >= mark:
            repeated = (report.epoch, report.seen_through) == mark
            news.append(_News(v, report, min(report.interval_s, LONGEST_INTERVAL_S), repeated))
            mark = (report.epoch, report.seen_through)
        epoch.append(mark[0])
        seen_through.append(mark[1])
    outlook = _as_before(before, cluster, news) or _laid_out(before, cluster, news)
    _take_means(outlook, news)
    _take_tenants(outlook, news)
    _take_survivals(outlook, news)
    return replace(
        outlook,
        links={**outlook.links, **_links(outlook, before.granted, cluster, news)},
        epoch=tuple(epoch),
        seen_through=tuple(seen_through),
        tables=Tables.of([v.step_cost for v in cluster.verifiers.values()], before.tables),
        interval_s=float(np.mean([new.interval_s for new in news])) if news else 0.0,
        plans=before.plans + 1,
    )


@dataclass(frozen=True, slots=True)
class _News:
    """A report to take in. repeated: its drafts were taken in already."""

    verifier: int
    report: Report
    interval_s: float
    repeated: bool


def _as_before(before: Outlook, cluster: Cluster, news: Sequence[_News]) -> Outlook | None:
    """A copy, if the rows and cells of the cluster are still the same."""
    names = tuple(cluster.verifiers)
    if names != before.verifiers or (before.silent >= FORGOTTEN_AFTER).any():
        return None
    for new in news:
        row = before.rows[names[new.verifier]]
        if not all(t.tenant in row for t in new.report.tenants):
            return None
    arrays = {name: getattr(before, name).copy() for name in (*_OF_VERIFIERS, *_OF_CELLS)}
    return replace(before, **arrays)


def _laid_out(before: Outlook, cluster: Cluster, news: Sequence[_News]) -> Outlook:
    """Rows and cells of the cluster as it is now, with what `before` held of them, copied."""
    reports = {new.verifier: new.report for new in news}
    was = {name: v for v, name in enumerate(before.verifiers)}
    tenants: dict[str, int] = {}
    rows: dict[str, dict[str, int]] = {}
    of: list[int] = []
    tenant: list[int] = []
    came_from: list[int] = []
    silent = before.silent.tolist()
    for v, name in enumerate(cluster.verifiers):
        old = before.rows.get(name, {})
        report = reports.get(v)
        cells = {t.tenant: old.get(t.tenant, -1) for t in report.tenants} if report else {}
        for known, cell in old.items():
            if silent[cell] < FORGOTTEN_AFTER and len(cells) < MAX_CELLS:
                cells[known] = cell
        cells = cells or {"": -1}
        rows[name] = dict(zip(cells, range(len(of), len(of) + len(cells)), strict=True))
        of += [v] * len(cells)
        tenant += [tenants.setdefault(known, len(tenants)) for known in cells]
        came_from += cells.values()
    old_row = np.array([was.get(name, -1) for name in cluster.verifiers], np.intp)
    old_cell = np.array(came_from, np.intp)
    arrays = {name: _kept(getattr(before, name), old_row) for name in _OF_VERIFIERS}
    arrays |= {name: _kept(getattr(before, name), old_cell) for name in _OF_CELLS}
    return replace(
        before,
        verifiers=tuple(cluster.verifiers),
        tenants=tuple(tenants),
        rows=rows,
        starts=np.searchsorted(of, np.arange(len(rows))).astype(np.intp),
        of=np.array(of, np.intp),
        tenant=np.array(tenant, np.intp),
        lean={name: lean for name, lean in before.lean.items() if name in tenants},
        links={name: before.links.get(name, {}) for name in cluster.verifiers},
        **arrays,  # type: ignore[arg-type]
    )


_OF_VERIFIERS = ("requests", "prefill", "context", "exposed_s")
_OF_CELLS = (
    "active", "queued", "floor_tps", "served", "survivals", "silent", "weight", "alone",
)  # fmt: skip


def _kept(values: FloatArray, at: IntArray) -> FloatArray:
    """Rows `at` of values, 0 where that is −1."""
    if len(values) == 0:
        return np.zeros((len(at), *values.shape[1:]))
    return values[at] * (at >= 0).reshape(-1, *(1,) * (values.ndim - 1))


def _take_means(outlook: Outlook, news: Sequence[_News]) -> None:
    for new in news:
        v, report = new.verifier, new.report
        if report.steps:
            weight = _weight(new.interval_s, STEP_MEMORY_S) if outlook.requests[v] else 1.0
            for mean, value in (
                (outlook.requests, report.requests),
                (outlook.prefill, report.prefill_tokens),
                (outlook.context, report.context),
            ):
                mean[v] += (value - mean[v]) * weight
        if drafted := sum(use.drafted for use in report.drafters):
            exposed_s = sum(use.drafted * use.exposed_s for use in report.drafters) / drafted
            weight = _weight(new.interval_s, DRAFT_MEMORY_S) if outlook.exposed_s[v] else 1.0
            outlook.exposed_s[v] += (exposed_s - outlook.exposed_s[v]) * weight


def _take_tenants(outlook: Outlook, news: Sequence[_News]) -> None:
    """What runs, waits and was served: nothing of a tenant that is not named."""
    reporting = np.zeros(len(outlook.verifiers))
    reporting[[new.verifier for new in news]] = [new.interval_s for new in news]
    interval_s = reporting[outlook.of]
    heard = interval_s > 0
    for values in (outlook.active, outlook.queued, outlook.floor_tps):
        values[heard] = 0.0
    outlook.silent[heard] += 1
    rate = np.zeros(len(outlook.of))
    at: list[int] = []
    said: list[float] = []  # four numbers each
    for new in news:
        row = outlook.rows[outlook.verifiers[new.verifier]]
        seconds = new.report.interval_s
        for t in new.report.tenants:
            at.append(row[t.tenant])
            said += (t.active, t.queued, t.floor_tps, t.tokens / seconds)
    if at:
        columns = np.array(said).reshape(-1, 4).T
        outlook.active[at], outlook.queued[at], outlook.floor_tps[at], rate[at] = columns
        outlook.silent[at] = 0
    weight = 1 - np.exp(-interval_s / SERVED_MEMORY_S)
    outlook.served[:] += (rate - outlook.served) * weight


def _take_survivals(outlook: Outlook, news: Sequence[_News]) -> None:
    at, counts = [], []
    fade = np.ones(len(outlook.of))
    for new in news:
        if new.repeated:
            continue
        row = outlook.rows[outlook.verifiers[new.verifier]]
        kept = math.exp(-new.interval_s / DRAFT_MEMORY_S)
        for t in new.report.tenants:
            if t.survivals and t.survivals != _NO_SURVIVALS:
                at.append(row[t.tenant])
                counts.append(t.survivals)
                fade[row[t.tenant]] = kept
    if at:
        seen = np.fromiter(chain.from_iterable(counts), np.float64, len(at) * SURVIVAL_BINS)
        np.multiply(outlook.survivals, fade[:, None], out=outlook.survivals)
        outlook.survivals[at] += seen.reshape(-1, SURVIVAL_BINS)


def _links(
    outlook: Outlook,
    granted: Mapping[str, Mapping[str, float]],
    cluster: Cluster,
    news: Sequence[_News],
) -> dict[str, dict[str, float]]:
    """Of verifiers that had drafts. A budget hides how much would be asked for without it, so what
    came is divided by the part that was granted."""
    links = {}
    pool = cluster.drafters
    for new in news:
        name = outlook.verifiers[new.verifier]
        if cluster.verifiers[name].drafters:
            continue  # told outright
        came = {use.drafter: use.drafted for use in new.report.drafters if use.drafter in pool}
        if not any(came.values()):
            continue
        part = granted.get(name, {})
        weight = _weight(new.interval_s, DRAFT_MEMORY_S)
        old = outlook.links[name]
        rates = {d: rate * (1 - weight) for d, rate in old.items() if d in pool}
        for d, drafted in came.items():
            asked = drafted / new.report.interval_s / max(part.get(d, 1.0), SMALLEST_PART)
            rates[d] = rates.get(d, 0.0) + weight * asked
        least = SMALLEST_LINK * max(rates.values())
        links[name] = {d: rate for d, rate in rates.items() if rate > least}
    return links


def _weight(interval_s: float, memory_s: float) -> float:
    return 1.0 - math.exp(-interval_s / memory_s)
