"""Where a round's time goes (draft, wire, wait, verify), from the traces of a cluster that runs.

    python benchmarks/round_times.py --listen 127.0.0.1:4317 --seconds 60

A collector for so long: let the cluster's `telemetry.otlp.endpoint` be http://127.0.0.1:4317 and
its `telemetry.sample` 1, and put load on it meanwhile. Ctrl-C ends it sooner. Prints, as JSON, the
mean round with a draft of another process, of this one, and without, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from dspark.core.traces import TraceContext
from dspark.telemetry.rounds import RoundTime, means, round_times
from dspark.telemetry.tracing import Kind, Span, SpanEvent

NAMES = ("dspark.decode", "dspark.draft")


class Collector(pb_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.other = 0

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.name in NAMES:
                        self.spans.append(read(span))
                    else:
                        self.other += 1
        return pb.ExportTraceServiceResponse()


def read(span: Any) -> Span:
    return Span(
        span.name,
        Kind.INTERNAL,
        TraceContext(span.trace_id.hex(), span.span_id.hex()),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes(span.attributes),
        [SpanEvent(e.name, e.time_unix_nano, attributes(e.attributes)) for e in span.events],
    )


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


async def collect(address: str, seconds: float) -> Collector:
    collector, server, over = Collector(), grpc.aio.server(), asyncio.Event()
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port(address)
    await server.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, over.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()
    await server.stop(1.0)
    return collector


def told(rounds: list[RoundTime]) -> dict[str, float]:
    return {"rounds": len(rounds), **{k: round(v, 3) for k, v in means(rounds).items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:4317")
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    collector = asyncio.run(collect(asked.listen, asked.seconds))
    rounds = list(round_times(collector.spans))
    kinds = {
        "elsewhere": [r for r in rounds if r.drafted and r.linked],
        "here": [r for r in rounds if r.drafted and not r.linked],
        "plain": [r for r in rounds if not r.drafted],
    }
    requests = sum(span.name == NAMES[0] for span in collector.spans)
    found = {kind: told(of_kind) for kind, of_kind in kinds.items() if of_kind}
    print(json.dumps({"requests": requests, "other_spans": collector.other, **found}))


if __name__ == "__main__":
    main()
