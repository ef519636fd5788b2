"""What arrives at a collector, and what becomes of spans while there is none."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import ValidationError

from dspark.core.errors import ConfigError
from dspark.core.traces import TraceContext
from dspark.gateway import strict_file
from dspark.telemetry.config import OtlpSection, TelemetryConfig
from dspark.telemetry.otlp import Export
from dspark.telemetry.otlp_metrics import converted, name_and_unit
from dspark.telemetry.process import telemetry
from dspark.telemetry.tracing import Kind, Span, SpanEvent

from .collector import attributes, collecting

ABOVE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
ADDRESS_THAT_NOBODY_HAS = "http://127.0.0.1:1"


def a_span(name: str = "x", error: str = "") -> Span:
    return Span(
        name,
        Kind.SERVER,
        ABOVE.child(name),
        ABOVE.span_id,
        10,
        20,
        {"a": 1, "many": ("b", "c")},
        (SpanEvent("e", 15, {"ms": 1.5}),),
        error,
    )


def config(endpoint: str, **rest: Any) -> TelemetryConfig:
    return TelemetryConfig.model_validate(
        {"otlp": {"endpoint": endpoint, "timeout_s": 2.0, **rest}, "attributes": {"site": "lab"}}
    )


async def test_spans_arrive_whole_with_the_processs_name_and_the_secret_header() -> None:
    secret = {"OTEL_EXPORTER_OTLP_HEADERS": "x-token=s3cr3t"}
    async with collecting() as found:
        async with telemetry(
            config(found.endpoint),
            pool="verifier",
            replica="v1",
            cluster="c1",
            environment=secret,
        ) as told:
            assert told.tracer is not None
            told.tracer.sink(a_span())
            told.tracer.sink(a_span("bad", "KeyError"))
            told.tracer.sink(a_span("gone", "cancelled"))
        span, bad, gone = found.spans
    assert span.trace_id.hex() == ABOVE.trace_id
    assert span.span_id.hex() == ABOVE.child("x").span_id
    assert span.parent_span_id.hex() == ABOVE.span_id
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (10, 20)
    assert attributes(span) == {"a": 1, "many": ["b", "c"]}
    assert [(e.name, e.time_unix_nano, attributes(e)) for e in span.events] == [
        ("e", 15, {"ms": 1.5})
    ]
    assert (span.kind, span.status.code) == (2, 0)  # SERVER, unset
    assert (bad.status.code, attributes(bad)["error.type"]) == (2, "KeyError")
    assert gone.status.code == 0
    assert found.headers[0]["x-token"] == "s3cr3t"
    assert found.resource == {
        "service.name": "dspark-verifier",
        "service.namespace": "c1",
        "service.instance.id": "v1",
        "service.version": found.resource["service.version"],
        "dspark.pool": "verifier",
        "site": "lab",
    }


async def test_metrics_arrive_by_their_names_and_units() -> None:
    async with (
        collecting() as found,
        telemetry(config(found.endpoint, metrics_interval_s=0.05), pool="verifier") as told,
    ):
        assert told.registry is not None
        Counter("dspark_steps", "", registry=told.registry).inc(3)
        await found.until(lambda: "dspark.steps" in found.metrics)
        await found.until(lambda: found.metrics["dspark.steps"].sum.data_points[0].as_double == 3)
        assert found.metrics["dspark.steps"].sum.is_monotonic
        await found.until(lambda: "dspark.event_loop_lag" in found.metrics)
        assert found.metrics["dspark.event_loop_lag"].unit == "s"


def test_figures_are_the_same_told_either_way() -> None:
    registry = CollectorRegistry()
    Counter("dspark_wire_bytes", "", ("direction",), registry=registry).labels("sent").inc(7)
    Gauge("dspark_draft_wait_seconds", "", registry=registry).set(0.5)
    usage = Histogram(
        "gen_ai_client_token_usage",
        "",
        ("gen_ai_token_type", "error_type"),
        buckets=(1, 4, 16),
        registry=registry,
    )
    for tokens in (1, 2, 3, 100):
        usage.labels("input", "").observe(tokens)
    found = {metric.name: metric for metric in converted(registry.collect(), 1, 2)}
    assert set(found) == {"dspark.wire", "dspark.draft_wait", "gen_ai.client.token.usage"}
    assert found["dspark.wire"].unit == "By"
    (point,) = found["gen_ai.client.token.usage"].data.data_points
    assert (point.count, point.sum) == (4, 106)
    assert list(point.bucket_counts) == [1, 2, 0, 1]
    assert list(point.explicit_bounds) == [1, 4, 16]
    assert point.attributes == {"gen_ai.token.type": "input"}
    assert name_and_unit("gen_ai_server_request_duration_seconds") == (
        "gen_ai.server.request.duration",
        "s",
    )


class Slow(SpanExporter):
    """Takes spans when it is let, or fails."""

    def __init__(self, works: bool = True) -> None:
        self.go_on = threading.Event()
        self.works = works
        self.came: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.go_on.wait(30)
        if not self.works:
            raise RuntimeError("a bug of theirs")
        self.came += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.go_on.set()


def test_a_collector_that_is_slow_costs_spans_and_no_memory() -> None:
    exporter = Slow()
    export = Export(exporter, {}, most=4, every_s=0.01)
    for n in range(50):
        export.put(a_span(str(n)))
    assert export.outcomes["dropped"] >= 50 - 4 - 4  # those that wait, and those under way
    exporter.go_on.set()
    export.close(30)
    assert export.outcomes["exported"] + export.outcomes["dropped"] == 50
    assert export.outcomes["exported"] == len(exporter.came)


def test_an_exporter_that_raises_is_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Slow(works=False)
    exporter.go_on.set()
    with caplog.at_level(logging.WARNING):
        export = Export(exporter, {}, every_s=0.01)
        export.put(a_span())
        while export.outcomes["dropped"] < 1:
            export._wake.wait(0.01)
        exporter.works = True
        export.put(a_span())
        export.close(30)
    assert dict(export.outcomes) == {"exported": 1, "dropped": 1}
    assert "the collector is away" in caplog.text
    assert "the collector is back" in caplog.text


async def test_without_a_collector_nothing_waits_and_all_is_counted() -> None:
    async with telemetry(config(ADDRESS_THAT_NOBODY_HAS, timeout_s=0.2), pool="gateway") as told:
        assert told.tracer is not None
        for n in range(3):
            told.tracer.sink(a_span(str(n)))


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("collector:4317", "must be http://host:port or https://host:port"),
        ("ftp://collector", "must be http"),
        ("http://user:s3cr3t@collector:4317", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_without_its_secret(endpoint: str, told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        OtlpSection(endpoint=endpoint)
    line = strict_file.told(refused.value)
    assert told in line
    assert "s3cr3t" not in line


async def test_a_certificate_that_is_not_there_is_a_clear_error() -> None:
    broken = config("https://127.0.0.1:1", ca="/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=r"telemetry\.otlp\.ca: /nowhere/ca\.pem: No such file"):
        async with telemetry(broken, pool="gateway"):
            pass
