"""What telemetry costs: a request at the gateway, a step of the engine, a span, a scrape.

    python benchmarks/telemetry_cost.py [--rounds 40]

Three ways are measured in turn, round by round: off (no tracer), untraced (a tracer that does not
pick this request) and traced (every request). Times are processor time of this process, so that a
busy machine hardly matters; the target is a toy, so that the differences are telemetry's. Printed
are medians, and the median of the differences to `off` of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' toys

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from tests.gateway.openai.served import tokenizer
from tests.verifier.toy import ToyBackend, greedy, history_rule, lookup, request, toy_engine

from dspark.core.requests import Committed, Event, Finished, FinishReason, Limits, Request, Usage
from dspark.core.sampling import SamplingParams
from dspark.core.traces import TraceContext
from dspark.gateway.gateway import Call, Gateway, ServedModel
from dspark.gateway.metrics import Metrics
from dspark.gateway.prompts import Prompt
from dspark.telemetry.otlp import Export
from dspark.telemetry.process import Telemetry
from dspark.telemetry.spans import run_spans
from dspark.telemetry.tracing import Span, Tracer

WAYS = ("off", "untraced", "traced")
V = 50
RULE = history_rule(V)
ABOVE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7").traceparent


class Null:
    """A target that answers at once: what is left is the gateway."""

    async def run(self, asked: Request) -> AsyncGenerator[Event, None]:
        yield Committed(0, (40,))
        yield Finished(FinishReason.LENGTH, Usage(len(asked.prompt_ids), 1))


def tracer(way: str, sink: Callable[[Span], None]) -> Tracer | None:
    return None if way == "off" else Tracer(sink, float(way == "traced"))


def gateway_s(requests: int, way: str) -> float:
    """Processor seconds of a request."""
    spans: list[Span] = []
    front = Gateway(
        Null(),
        tokenizer(),
        ServedModel("toy", "toy", Limits(tokenizer().vocab_size, 4096, 4096)),
        metrics=Metrics(),
        tracer=tracer(way, spans.append),
    )
    call = Call(Prompt(ids=(1, 2, 3)), SamplingParams(temperature=0.0, max_tokens=1))

    async def all_of_them() -> float:
        begin = time.process_time()
        for _ in range(requests):
            async for _ in front.generate(call):
                pass
        return time.process_time() - begin

    spent = asyncio.run(all_of_them())
    assert len(spans) == (requests if way == "traced" else 0)
    return spent / requests


def step_s(requests: int, way: str) -> float:
    """Processor seconds of a step."""
    engine = toy_engine(ToyBackend(RULE, V), lookup(), clock=time.monotonic, kv_tokens=65_536)
    engine.traces.wanted = way != "off"
    traceparent = ABOVE if way == "traced" else ""
    for n in range(requests):
        asked = request(f"r{n}", [n % V, 1, 2], greedy(400), traceparent=traceparent)
        engine.submit(asked)
    for _ in range(20):
        engine.step()
    before, begin = engine.figures.steps, time.process_time()
    for _ in range(60):  # nobody has finished: all of them are in every step
        engine.step()
        engine.traces.take()
    return (time.process_time() - begin) / (engine.figures.steps - before)


def paired(measure: Callable[[str], float], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for n in range(rounds):
        for way in WAYS[n % 3 :] + WAYS[: n % 3]:  # nobody is always first
            found[way].append(measure(way))
    return found


def told(what: str, found: dict[str, list[float]]) -> None:
    off = found["off"]
    parts = [f"off {1e6 * statistics.median(off):.1f} µs"]
    for way in WAYS[1:]:
        extra = [b - a for a, b in zip(off, found[way], strict=True)]
        low, middle, high = statistics.quantiles(extra, n=4)
        parts.append(f"{way} {1e6 * middle:+.1f} (quartiles {1e6 * low:+.1f}, {1e6 * high:+.1f})")
    print(f"{what}: {', '.join(parts)}")


def spans_told() -> None:
    """A run of 64 rounds: its spans in the event loop, and their export in the thread."""
    engine = toy_engine(ToyBackend(RULE, V), lookup(), clock=time.monotonic, kv_tokens=65_536)
    engine.traces.wanted = True
    engine.submit(request("r", [1, 2, 3], greedy(300), traceparent=ABOVE))
    while not engine.idle:
        engine.step()
    (run,) = engine.traces.take()
    wall = Tracer(print).wall()
    begin, times = time.process_time(), 200
    for _ in range(times):
        spans = list(run_spans(run, wall, "v1"))
    loop_s = (time.process_time() - begin) / times
    memory = InMemorySpanExporter()
    export = Export(memory, {}, every_s=0.01)
    begin = time.process_time()
    for _ in range(times):
        for span in spans:
            export.put(span)
        while len(export._queue) > 1000:
            time.sleep(0.001)
    export.close(60)
    thread_s = (time.process_time() - begin) / times
    events = sum(len(span.events) for span in spans)
    print(
        f"a traced run of {run.steps} rounds ({len(spans)} spans, {events} events): "
        f"{1e6 * loop_s:.0f} µs in the event loop, {1e6 * thread_s:.0f} µs in the exporter's thread"
    )


def scrape_told() -> None:
    engine = toy_engine(ToyBackend(RULE, V), lookup(), clock=time.monotonic)
    told = Telemetry("v1", registry=CollectorRegistry())
    assert told.registry is not None
    told.watch_engine(engine)
    times, begin = 200, time.process_time()
    for _ in range(times):
        text = generate_latest(told.registry)
    spent = (time.process_time() - begin) / times
    print(f"a scrape of a verifier: {1e6 * spent:.0f} µs, {len(text)} bytes, in a thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    told("a request at the gateway", paired(partial(gateway_s, 200), rounds))
    for requests in (1, 16):
        told(f"a step of {requests} requests", paired(partial(step_s, requests), rounds))
    spans_told()
    scrape_told()


if __name__ == "__main__":
    main()
