"""Spans and metrics to a collector: with `otlp_metrics` the only module that knows OpenTelemetry.

One thread does all of it. Whoever traces appends to a queue that is bounded: while the collector is
away spans are dropped and counted, and nothing waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from prometheus_client import CollectorRegistry

from dspark.core.errors import ConfigError
from dspark.telemetry.config import HEADERS_VARIABLE, OtlpSection
from dspark.telemetry.otlp_metrics import MetricsExport
from dspark.telemetry.tracing import Kind, Span

log = logging.getLogger(__name__)

# Spans that wait. A traced request has about ten, a round that is drafted elsewhere one more.
MOST_SPANS = 8192
# Of one export, and seconds between two looks: a trace is complete that much after its request.
BATCH = 512
EVERY_S = 1.0
# Their exporter says at each try what we say once.
THEIR_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"

_KINDS = {
    Kind.INTERNAL: SpanKind.INTERNAL,
    Kind.SERVER: SpanKind.SERVER,
    Kind.CLIENT: SpanKind.CLIENT,
}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class MetricsSink(Protocol):
    """interval_s: between two exports."""

    interval_s: float

    def export(self) -> bool:
        """Whether it arrived. Bounded by its exporter's timeout."""
        ...

    def shutdown(self) -> None: ...


class Export:
    """`put` takes spans from any thread. outcomes: spans exported, and dropped.

    exporter: of spans; it is shut down at `close`. metrics: exported in the same thread.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        attributes: Mapping[str, str],
        *,
        metrics: MetricsSink | None = None,
        most: int = MOST_SPANS,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcomes: Counter[str] = Counter(exported=0, dropped=0)
        self._exporter = exporter
        self._resource = Resource(dict(attributes))
        self._scope = InstrumentationScope("dspark", attributes.get("service.version"))
        self._metrics = metrics
        self._most = most
        self._every_s = every_s
        self._clock = clock
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._away = False
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        if self._closing or len(self._queue) >= self._most:
            self.outcomes["dropped"] += 1
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH:
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Export what waits, for at most so long. Blocks."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()
        if self._metrics is not None:
            self._metrics.shutdown()

    # --- the thread's own -------------------------------------------------------------------------

    def _run(self) -> None:
        metrics_due = self._clock()
        while True:
            self._wake.wait(self._every_s)
            self._wake.clear()
            closing = self._closing
            self._export_spans()
            metrics = self._metrics
            if metrics is not None and (closing or self._clock() >= metrics_due):
                metrics_due = self._clock() + metrics.interval_s
                self._told(self._tried(metrics.export))
            if closing:
                return

    def _export_spans(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH))]
            arrived = self._tried(partial(self._send, batch))
            self.outcomes["exported" if arrived else "dropped"] += len(batch)
            self._told(arrived)

    def _send(self, batch: list[Span]) -> bool:
        readable = [self._readable(span) for span in batch]
        return self._exporter.export(readable) is SpanExportResult.SUCCESS

    def _tried(self, export: Callable[[], bool]) -> bool:
        try:
            return export()
        except Exception:  # a bug in an exporter costs its batch, and not the thread
            log.exception("telemetry could not be exported")
            return False

    def _told(self, arrived: bool) -> None:
        """Once when that changes."""
        if self._away == arrived:
            self._away = not arrived
            log.warning("the collector is %s", "back" if arrived else "away: spans are dropped")

    def _readable(self, span: Span) -> ReadableSpan:
        trace_id = int(span.context.trace_id, 16)
        attributes = dict(span.attributes)
        status = Status(StatusCode.UNSET)
        if span.error:
            attributes["error.type"] = span.error
            if span.error != "cancelled":  # a client that hung up is no failure of ours
                status = Status(StatusCode.ERROR)
        return ReadableSpan(
            span.name,
            context=SpanContext(trace_id, int(span.context.span_id, 16), False, _SAMPLED),
            parent=SpanContext(trace_id, int(span.parent, 16), True, _SAMPLED)
            if span.parent
            else None,
            resource=self._resource,
            attributes=attributes,
            events=tuple(Event(name, dict(told), at) for name, at, told in span.events),
            kind=_KINDS[span.kind],
            status=status,
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=self._scope,
        )


def to_collector(
    config: OtlpSection,
    attributes: Mapping[str, str],
    environment: Mapping[str, str],
    registry: CollectorRegistry | None,
) -> Export:
    """Spans, and the registry's metrics if there is one, to a collector over gRPC. Raises
    ConfigError for a certificate that cannot be read."""
    logging.getLogger(THEIR_LOGGER).setLevel(logging.CRITICAL)
    insecure = config.endpoint.startswith("http://")
    credentials = None if insecure else grpc.ssl_channel_credentials(_read(config.ca))
    headers = environment.get(HEADERS_VARIABLE)
    metrics = None
    if registry is not None and config.metrics_interval_s:
        exporter = OTLPMetricExporter(
            config.endpoint, insecure, credentials, headers, config.timeout_s
        )
        metrics = MetricsExport(exporter, registry, attributes, config.metrics_interval_s)
    spans = OTLPSpanExporter(config.endpoint, insecure, credentials, headers, config.timeout_s)
    return Export(spans, attributes, metrics=metrics)


def _read(ca: str | None) -> bytes | None:
    try:
        return None if ca is None else Path(ca).read_bytes()
    except OSError as error:
        raise ConfigError(f"telemetry.otlp.ca: {ca}: {error.strerror}") from None
