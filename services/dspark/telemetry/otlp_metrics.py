"""A Prometheus registry's figures as OpenTelemetry's: defined once, told twice.

`dspark_kv_blocks` is `dspark.kv_blocks` there; `_total` goes, and `_seconds` and `_bytes` become
the unit. The names of the semantic conventions are given in full.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtelMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

SEMANTIC_NAMES = {
    "gen_ai_server_request_duration_seconds": ("gen_ai.server.request.duration", "s"),
    "gen_ai_server_time_to_first_token_seconds": ("gen_ai.server.time_to_first_token", "s"),
    "gen_ai_server_time_per_output_token_seconds": ("gen_ai.server.time_per_output_token", "s"),
    "gen_ai_client_operation_duration_seconds": ("gen_ai.client.operation.duration", "s"),
    "gen_ai_client_token_usage": ("gen_ai.client.token.usage", "{token}"),
}
SEMANTIC_LABELS = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "gen_ai_token_type": "gen_ai.token.type",
    "error_type": "error.type",
}
UNITS = {"_seconds": "s", "_bytes": "By"}

Labels = tuple[tuple[str, str], ...]


class MetricsExport:
    """interval_s: between two exports."""

    def __init__(
        self,
        exporter: MetricExporter,
        registry: CollectorRegistry,
        attributes: Mapping[str, str],
        interval_s: float,
    ) -> None:
        self.interval_s = interval_s
        self._exporter = exporter
        self._registry = registry
        self._resource = Resource(dict(attributes))
        self._scope = InstrumentationScope("dspark", attributes.get("service.version"))
        self._began = time.time_ns()

    def export(self) -> bool:
        metrics = list(converted(self._registry.collect(), self._began, time.time_ns()))
        data = MetricsData([ResourceMetrics(self._resource, [self._told(metrics)], "")])
        return self._exporter.export(data) is MetricExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _told(self, metrics: list[OtelMetric]) -> ScopeMetrics:
        return ScopeMetrics(self._scope, metrics, "")


def converted(families: Iterable[Metric], began: int, now: int) -> Iterator[OtelMetric]:
    """began, now: nanoseconds since 1970. A family without a value is left out."""
    cumulative = AggregationTemporality.CUMULATIVE
    for family in families:
        name, unit = name_and_unit(family.name)
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            data = Histogram(_histograms(family, began, now), cumulative)
        elif family.type == "counter":
            totals = [s for s in family.samples if s.name == f"{family.name}_total"]
            data = Sum(_numbers(totals, began, now), cumulative, is_monotonic=True)
        else:
            data = Gauge(_numbers(family.samples, began, now))
        if data.data_points:
            yield OtelMetric(name, family.documentation, unit, data)


def name_and_unit(name: str) -> tuple[str, str]:
    """name: of a family, so without `_total`."""
    if name in SEMANTIC_NAMES:
        return SEMANTIC_NAMES[name]
    part, _, rest = name.partition("_")
    for suffix, unit in UNITS.items():
        if rest.endswith(suffix):
            return f"{part}.{rest.removesuffix(suffix)}", unit
    return f"{part}.{rest}" if rest else part, "1"


def _numbers(samples: Iterable[Sample], began: int, now: int) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(_attributes(sample.labels.items()), began, now, sample.value)
        for sample in samples
    ]


def _histograms(family: Metric, began: int, now: int) -> list[HistogramDataPoint]:
    buckets: dict[Labels, list[tuple[float, float]]] = {}
    sums: dict[Labels, float] = {}
    for sample in family.samples:
        labels = tuple(pair for pair in sample.labels.items() if pair[0] != "le")
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, cumulative in buckets.items():
        cumulative.sort()
        counts, before = [], 0.0
        for _, value in cumulative:
            counts.append(int(value - before))
            before = value
        points.append(
            HistogramDataPoint(
                _attributes(labels),
                began,
                now,
                count=int(before),
                sum=sums.get(labels, math.nan),
                bucket_counts=counts,
                explicit_bounds=[bound for bound, _ in cumulative if bound < math.inf],
                # Prometheus knows neither, and the wire leaves out what is None.
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )
        )
    return points


def _attributes(labels: Iterable[tuple[str, str]]) -> dict[str, str]:
    """`error.type` of what went well is left out."""
    return {
        SEMANTIC_LABELS.get(name, name): value
        for name, value in labels
        if value or name != "error_type"
    }
