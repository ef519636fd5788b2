"""Figures in Prometheus' text format, on a registry of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dspark.core.requests import SpeculationFigures
from dspark.gateway.answers import Timing

if TYPE_CHECKING:
    from dspark.verifier.engine import Engine

# Seconds. A first token takes from a cached prompt's one step to minutes of queue.
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
# Seconds between two looks at the event loop; each costs about 10 microseconds.
LAG_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an engine says of itself at one moment; totals since its start, seconds of its thread.

    blocks_free: that a new sequence can take, cached prefixes included.
    """

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_owned: int = 0
    preemptions: int = 0
    steps: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    draft_s: float = 0.0
    prefill_tokens: int = 0
    committed_tokens: int = 0
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)


ReadEngine = Callable[[], EngineReading]


def reads(engine: Engine) -> ReadEngine:
    """Of an engine in this process. Plain numbers: any thread may look at them at any time."""

    def read() -> EngineReading:
        figures, pool = engine.figures, engine.cache.pool
        running = len(engine.running)
        return EngineReading(
            running=running,
            waiting=max(engine.active - running, 0),
            blocks_free=pool.available,
            blocks_owned=pool.owned,
            preemptions=engine.preemptions,
            steps=figures.steps,
            step_s=figures.step_s,
            forward_s=figures.forward_s,
            draft_s=figures.draft_s,
            prefill_tokens=figures.prefill_tokens,
            committed_tokens=figures.committed_tokens,
            speculation=figures.speculation,
        )

    return read


class Metrics:
    """What is counted here, and an engine's own figures as they are when somebody asks."""

    def __init__(self, read_engine: ReadEngine | None = None) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "dspark_requests",
            "Requests by protocol, route and status",
            ("protocol", "route", "status"),
            registry=self.registry,
        )
        self._inside = Gauge(
            "dspark_requests_in_flight",
            "Requests that have no whole response yet",
            ("protocol",),
            registry=self.registry,
        )
        self._first_token = Histogram(
            "dspark_time_to_first_token_seconds",
            "From a choice's start to its first token",
            ("protocol",),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._token = Histogram(
            "dspark_time_per_output_token_seconds",
            "Mean time of a choice's tokens after the first",
            ("protocol",),
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._lag = Histogram(
            "dspark_event_loop_lag_seconds",
            "How late the event loop comes to what was due",
            buckets=LAG_BUCKETS,
            registry=self.registry,
        )
        if read_engine is not None:
            self.registry.register(EngineCollector(read_engine))

    def answered(self, protocol: str, timing: Timing, tokens: int) -> None:
        """A choice ended well. tokens: that it made, those it was resumed with not counted."""
        if tokens > 0:
            self._first_token.labels(protocol).observe(timing.ttft_s)
        if tokens > 1:
            self._token.labels(protocol).observe(timing.tpot_s)

    @contextmanager
    def request(self, protocol: str, route: str, gone: str) -> Iterator[Responding]:
        """One request, from its begin to the end of its response. gone: the status of one whose
        client hung up."""
        responding = Responding(gone)
        with self._inside.labels(protocol).track_inprogress():
            try:
                yield responding
            finally:
                self._requests.labels(protocol, route, responding.status).inc()

    async def watch_loop(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measures until it is cancelled."""
        while True:
            due = clock() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(clock() - due, 0.0))

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(slots=True)
class Responding:
    """status: of the response, once it is known."""

    status: str


class EngineCollector(Collector):
    def __init__(self, read: ReadEngine) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        speculation = now.speculation
        yield _gauge("requests_running", "Choices that own KV blocks", now.running)
        yield _gauge("requests_waiting", "Choices that wait for KV blocks", now.waiting)
        yield _labelled(
            GaugeMetricFamily("dspark_kv_blocks", "KV blocks by who has them", labels=["state"]),
            {"free": now.blocks_free, "owned": now.blocks_owned},
        )
        yield _counter("preemptions", "Choices put back to wait for room", now.preemptions)
        yield _counter("steps", "Steps of the engine", now.steps)
        yield _labelled(
            CounterMetricFamily("dspark_step_seconds", "Time in steps by part", labels=["part"]),
            {
                "forward": now.forward_s,
                "draft": now.draft_s,
                "rest": max(now.step_s - now.forward_s - now.draft_s, 0.0),
            },
        )
        yield _labelled(
            CounterMetricFamily("dspark_tokens", "Tokens of the target by kind", labels=["kind"]),
            {"prefill": now.prefill_tokens, "generated": now.committed_tokens},
        )
        yield _counter("verify_rounds", "Verify rounds", speculation.rounds)
        yield _labelled(
            CounterMetricFamily("dspark_draft_tokens", "Draft tokens by stage", labels=["stage"]),
            {
                "drafted": speculation.drafted,
                "verified": speculation.verified,
                "accepted": speculation.accepted,
            },
        )


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"dspark_{name}", what, value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"dspark_{name}", what, value)


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, values: dict[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
