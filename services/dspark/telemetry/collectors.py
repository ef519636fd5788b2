"""Readings as Prometheus' metrics. Every name stands here or in gateway/metrics.py, and in the
table of docs/telemetry.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dspark.core.status import ClusterStatus
from dspark.telemetry.readings import (
    STEP_BUCKETS,
    DispatchReading,
    DrafterReading,
    EngineReading,
    LinkReading,
    OutageReading,
    positions,
)

STAGES = ("drafted", "verified", "accepted")


class EngineCollector(Collector):
    """Of a verifier's engine."""

    def __init__(self, read: Callable[[], EngineReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield gauge("requests_running", "Choices that own KV blocks", now.running)
        yield gauge("requests_waiting", "Choices that wait for KV blocks", now.waiting)
        yield gauges(
            "kv_blocks",
            "KV blocks by who has them",
            "state",
            {"free": now.blocks_free, "cached": now.blocks_cached, "owned": now.blocks_owned},
        )
        yield counter("preemptions", "Choices put back to wait for room", now.preemptions)
        yield counter("steps", "Steps of the engine", now.steps)
        parts = {"forward": now.forward_s, "draft": now.draft_s}
        parts["rest"] = max(now.step_s - sum(parts.values()), 0.0)
        yield counters("step_seconds", "Time in steps by part", "part", parts)
        if now.step_buckets:
            yield _step_durations(now)
        yield gauge(
            "step_residual_seconds",
            "Measured minus predicted time of the newest steps, mean",
            now.residual_s,
        )
        yield counter(
            "step_residual_abs_seconds",
            "Distance of measured from predicted step times",
            now.residual_abs_s,
        )
        kinds = {"prefill": now.prefill_tokens, "generated": now.committed_tokens}
        yield counters("tokens", "Tokens of the target by kind", "kind", kinds)
        yield counter("residual_fallbacks", "Residuals without mass", now.residual_fallbacks)
        yield from self._drafts(now)
        local = max(now.steps - now.guided_steps, 0)
        sources = {"guided": now.guided_steps, "local": local}
        yield counters("plan_steps", "Steps by whose numbers they used", "source", sources)
        if now.plan_age_s is not None:
            yield gauge("plan_age_seconds", "Since the plan in use came", now.plan_age_s)
        yield counters("plans_dropped", "Plans not followed, by why", "reason", now.plans_dropped)
        yield gauge("calibration_version", "Calibration in use, 0 for none", now.calibration)
        yield from _links(now.links)

    def _drafts(self, now: EngineReading) -> Iterator[Metric]:
        speculation = now.speculation
        yield counter("verify_rounds", "Verify rounds", speculation.rounds)
        totals = (speculation.drafted, speculation.verified, speculation.accepted)
        yield counters(
            "draft_tokens",
            "Draft tokens by stage",
            "stage",
            dict(zip(STAGES, totals, strict=True)),
        )
        by_position = CounterMetricFamily(
            "dspark_draft_tokens_by_position",
            "Draft tokens by stage and position in the block",
            labels=["stage", "position"],
        )
        for stage, by_length in zip(STAGES, now.by_length, strict=True):
            for position, count in enumerate(positions(by_length), 1):
                by_position.add_metric([stage, str(position)], count)
        yield by_position
        yield counter("draft_wait_seconds", "Time that steps waited for drafts", now.draft_wait_s)
        yield counters("draft_answers", "Answers of drafters over the wire", "outcome", now.answers)
        yield counters("draft_faults", "Replies that were no draft, by why", "fault", now.faults)
        yield gauge("groups", "Groups that are drafted and verified in turn", now.groups)


def _step_durations(now: EngineReading) -> Metric:
    buckets, total = [], 0
    for bound, count in zip(STEP_BUCKETS, now.step_buckets, strict=True):
        total += count
        buckets.append(("+Inf" if bound == STEP_BUCKETS[-1] else str(bound), float(total)))
    return HistogramMetricFamily(
        "dspark_step_duration_seconds", "One step", buckets=buckets, sum_value=now.step_s
    )


def _links(links: Iterable[LinkReading]) -> Iterator[Metric]:
    links = list(links)
    states = dict.fromkeys(("up", "draining", "down"), 0)
    for link in links:
        states[link.state] += 1
    yield gauges("drafter_links", "Links to drafter replicas by state", "state", states)
    yield counters(
        "drafter_connections",
        "Streams to a drafter replica so far",
        "drafter",
        {link.drafter: link.connected for link in links},
    )
    yield gauges(
        "drafter_reply_seconds",
        "Mean time from asking a drafter to its answer",
        "drafter",
        {link.drafter: link.reply_s for link in links},
    )
    yield gauges(
        "draft_budget_tokens_per_second",
        "What the plan allows to ask of a drafter",
        "drafter",
        {link.drafter: link.budget for link in links if link.budget is not None},
    )
    for what, values in (
        ("bytes", [(link.bytes_sent, link.bytes_received) for link in links]),
        ("messages", [(link.messages_sent, link.messages_received) for link in links]),
    ):
        family = CounterMetricFamily(
            f"dspark_wire_{what}",
            f"Drafting, {what} by direction and drafter",
            labels=["direction", "drafter"],
        )
        for link, (sent, received) in zip(links, values, strict=True):
            family.add_metric(["sent", link.drafter], sent)
            family.add_metric(["received", link.drafter], received)
        yield family


class DrafterCollector(Collector):
    def __init__(self, read: Callable[[], DrafterReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield gauge("drafter_sessions", "Sessions held", now.sessions)
        yield gauge("drafter_queue", "Requests that wait for a pass", now.queue)
        yield gauge("drafter_streams", "Verifiers that are connected", now.streams)
        yield counter("drafter_passes", "Forward passes", now.passes)
        yield counter("drafter_tokens", "Draft tokens made", now.tokens)
        yield counter("drafter_busy_seconds", "Time in passes", now.busy_s)
        refused = "Requests answered with no draft, by why"
        yield counters("drafter_refused", refused, "reason", now.refused)


class DispatchCollector(Collector):
    """Of a gateway in front of a pool of verifiers."""

    def __init__(self, read: Callable[[], DispatchReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        placed = {"lease": now.leased, "local": now.local}
        yield counters("placements", "Choices placed, by whom", "by", placed)
        yield counter("replays", "Choices that went on on another verifier", now.replays)
        yield gauge("leases_held", "Leases of choices in flight", now.leases)
        yield gauge("verifiers_known", "Verifiers of the last member list", now.verifiers)


class OutageCollector(Collector):
    """what: "scheduler" or "store"."""

    def __init__(self, what: str, read: Callable[[], OutageReading]) -> None:
        self._what = what
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield counter(f"{self._what}_outages", f"Times that the {self._what} went away", now.count)
        yield gauge(f"{self._what}_away", f"1: the {self._what} is away now", float(now.away))


class SchedulerCollector(Collector):
    """status: as the replica sees the cluster. granted, turned_away, refused: leases of this
    replica, and reports, by why."""

    def __init__(
        self,
        status: Callable[[], ClusterStatus],
        granted: Callable[[], int],
        turned_away: Callable[[], Mapping[str, int]],
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        self._status = status
        self._granted = granted
        self._turned_away = turned_away
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        now = self._status()
        members = GaugeMetricFamily(
            "dspark_members", "Replicas that live", labels=["pool", "state"]
        )
        count: dict[tuple[str, str], int] = {}
        for pool in ("gateway", "verifier", "drafter"):
            for state in ("ready", "draining"):
                count[pool, state] = 0
        for status in now.members:
            count[status.member.pool, "draining" if status.member.draining else "ready"] += 1
        for labels, number in count.items():
            members.add_metric(labels, number)
        yield members
        leases = sum(s.runs for s in now.members if s.member.pool == "verifier")
        yield gauge("leases", "Runs under leases that hold now", leases)
        yield counter("leases_granted", "Leases given by this replica", self._granted())
        turned = "Leases refused by this replica, by why"
        yield counters("leases_refused", turned, "reason", self._turned_away())
        yield gauge("scheduler_leader", "1: this replica plans", float(now.leads))
        yield counter("plans_published", "Rounds of plans", now.plans)
        yield counters("reports_refused", "Reports not taken, by why", "reason", self._refused())
        yield gauge("followers", "Verifiers that get their plans here", now.following)
        for name, what, values in (
            ("error", "Expected calibration error of the newest verdicts", "error"),
            ("noise", "What a perfect table would show of so few verdicts", "noise"),
        ):
            family = GaugeMetricFamily(
                f"dspark_calibration_{name}", what, labels=["drafter", "mode"]
            )
            for drift in now.drift:
                family.add_metric([drift.drafter_id, drift.mode.value], getattr(drift, values))
            yield family


class SpansCollector(Collector):
    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield counters("spans", "Spans by what became of them", "outcome", self._read())


class BuildCollector(Collector):
    def __init__(self, version: str, pool: str, replica: str) -> None:
        self._labels = [version, pool, replica]

    def collect(self) -> Iterator[Metric]:
        names = ["version", "pool", "replica"]
        family = GaugeMetricFamily("dspark_build_info", "What runs here", labels=names)
        family.add_metric(self._labels, 1)
        yield family


def gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"dspark_{name}", what, value)


def counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"dspark_{name}", what, value)


def gauges(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(GaugeMetricFamily(f"dspark_{name}", what, labels=[label]), values)


def counters(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(CounterMetricFamily(f"dspark_{name}", what, labels=[label]), values)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]
) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
