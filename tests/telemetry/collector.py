"""A collector as small as one can be: it keeps what OTLP brings over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2 as metrics_pb,
)
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2_grpc as metrics_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


@dataclass
class Collector:
    """endpoint: where it is. spans, metrics: by name, the newest metric of a name. headers: of the
    calls. resource: of the newest trace."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)
    resource: dict[str, str] = field(default_factory=dict)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    async def until(self, met: Callable[[], bool], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not met():
                await asyncio.sleep(0.01)


def attributes(of: Any) -> dict[str, Any]:
    def value(v: Any) -> Any:
        kind = v.WhichOneof("value")
        return (
            [value(x) for x in v.array_value.values] if kind == "array_value" else getattr(v, kind)
        )

    return {pair.key: value(pair.value) for pair in of.attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    found = Collector()

    class Traces(trace_grpc.TraceServiceServicer):
        async def Export(self, request: Any, context: Any) -> Any:
            found.headers.append(dict(context.invocation_metadata()))
            for resource in request.resource_spans:
                found.resource = attributes(resource.resource)
                for scope in resource.scope_spans:
                    found.spans += scope.spans
            return trace_pb.ExportTraceServiceResponse()

    class Metrics(metrics_grpc.MetricsServiceServicer):
        async def Export(self, request: Any, context: Any) -> Any:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    found.metrics |= {metric.name: metric for metric in scope.metrics}
            return metrics_pb.ExportMetricsServiceResponse()

    server = grpc.aio.server()
    trace_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield found
    finally:
        await server.stop(0)
