"""What a process tells of itself, and to whom: the `telemetry` section of a configuration.

Importing this is light: nothing of OpenTelemetry or Prometheus.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dspark.gateway.strict_file import Strict

# OpenTelemetry's own name: a list "key=value,key=value", values percent-encoded.
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
# Where Prometheus exporters of OpenTelemetry listen. So many replicas of one machine find a port.
METRICS_PORT = 9464
METRICS_PORTS = 16


class OtlpSection(Strict):
    """endpoint: of a collector's gRPC receiver, http:// without TLS or https:// with the system's
    authorities, or with `ca` (a PEM file). metrics_interval_s: seconds between two exports of
    metrics; 0 sends traces only. timeout_s: of one export."""

    endpoint: str
    ca: str | None = None
    metrics_interval_s: float = Field(15.0, ge=0, le=3600)
    timeout_s: float = Field(5.0, gt=0, le=60)

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("must be http://host:port or https://host:port")
        if url.username or url.password or url.query:
            raise ValueError(f"secrets go into the environment, as {HEADERS_VARIABLE}")
        return endpoint


class MetricsListen(Strict):
    """Where Prometheus may ask. host: loopback unless you mean it. port: the first of
    METRICS_PORTS; 0 is any free one."""

    host: str = "127.0.0.1"
    port: int = Field(METRICS_PORT, ge=0, le=65_535)

    @field_validator("port")
    @classmethod
    def _is_not_rays(cls, port: int) -> int:
        if 10_000 <= port <= 19_999:
            raise ValueError("is in 10000 to 19999, which Ray's workers take")
        return port


class TelemetryConfig(Strict):
    """All off by default. sample: share of requests that are traced where the client does not say;
    one that says is believed. attributes: of the process, for every trace and metric
    ("deployment.environment.name": "staging"). log_format: json is one object a line."""

    otlp: OtlpSection | None = None
    sample: float = Field(default=0.1, ge=0, le=1)
    metrics: MetricsListen | None = None
    attributes: dict[str, str] = Field(default_factory=dict, max_length=32)
    log_format: Literal["text", "json"] = "text"
