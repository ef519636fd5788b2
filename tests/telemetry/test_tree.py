"""One request is one trace: from its client over gateway, scheduler and verifier to the drafter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from dspark.client import AsyncClient
from dspark.core.traces import TRACED_ROUNDS, TraceContext
from dspark.telemetry.rounds import PARTS, means, round_times

from .traced import Traced, traced

CLIENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
PROMPT = "Hello, a prompt that no span may show"

# Each span's name and who tells it, by the name of the one above it.
TREE = {
    "text_completion toy": ("g1", None),
    "dspark.lease": ("g1", "text_completion toy"),
    "dspark.scheduler.lease": ("s1", "dspark.lease"),
    "dspark.run": ("g1", "text_completion toy"),
    "dspark.verify": ("v1", "dspark.run"),
    "dspark.queue": ("v1", "dspark.verify"),
    "dspark.prefill": ("v1", "dspark.verify"),
    "dspark.decode": ("v1", "dspark.verify"),
    "dspark.draft": ("d1", "dspark.decode"),
}


async def by_http(on: Traced, traceparent: str = "", **body: Any) -> httpx.Response:
    headers = {"traceparent": traceparent} if traceparent else {}
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **body}
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{on.http}/v1/completions", json=body, headers=headers)


async def by_sdk(on: Traced, **options: Any) -> Any:
    async with AsyncClient(on.grpc) as client:
        return await client.generate(PROMPT, **{"max_tokens": 24, "temperature": 0, **options})


def check_tree(spans: Mapping[str, Sequence[ReadableSpan]], trace_id: str, above: str) -> None:
    """Every span of the trace stands where TREE says."""
    told = [
        (replica, span)
        for replica, all_of_it in spans.items()
        for span in all_of_it
        if format(span.get_span_context().trace_id, "032x") == trace_id  # type: ignore[union-attr]
    ]
    by_id = {span.get_span_context().span_id: span for _, span in told}  # type: ignore[union-attr]
    assert {span.name for _, span in told} == set(TREE)
    for replica, span in told:
        who, parent = TREE[span.name]
        assert replica == who
        assert span.parent is not None or not above
        if parent is None:
            assert span.parent is None or format(span.parent.span_id, "016x") == above
        else:
            assert span.parent is not None
            assert by_id[span.parent.span_id].name == parent, span.name
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    for name in set(TREE) - {"dspark.draft"}:
        assert len([span for _, span in told if span.name == name]) == 1, name


async def test_one_request_by_http_is_one_tree() -> None:
    async with traced(sample=0.0) as on:
        reply = await by_http(on, CLIENT.traceparent)
        assert reply.status_code == 200
        await on.told("text_completion toy")
        await on.told("dspark.verify")
        await on.told("dspark.draft", 3)
        spans = on.exported()
    check_tree(spans, CLIENT.trace_id, CLIENT.span_id)
    (call,) = [span for span in spans["g1"] if span.name == "text_completion toy"]
    usage = reply.json()["usage"]
    assert call.attributes is not None
    told = dict(call.attributes)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.provider.name"] == "dspark"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "toy"
    assert told["gen_ai.request.max_tokens"] == 24
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 24
    assert told["dspark.accepted"] == usage["speculation"]["accepted"] > 0
    assert said_nowhere(span for all_of_it in spans.values() for span in all_of_it)


def said_nowhere(spans: Iterable[ReadableSpan]) -> bool:
    """Neither the prompt nor a word of the answer."""
    text = " ".join(span.to_json() for span in spans)
    return "no span may show" not in text and "world" not in text


async def test_one_request_by_the_sdk_is_one_tree_below_the_active_span() -> None:
    from opentelemetry import trace

    above = trace.NonRecordingSpan(
        trace.SpanContext(
            int(CLIENT.trace_id, 16), int(CLIENT.span_id, 16), False, trace.TraceFlags(1)
        )
    )
    async with traced(sample=0.0) as on:
        with trace.use_span(above):
            await by_sdk(on)
        await on.told("text_completion toy")
        await on.told("dspark.verify")
        await on.told("dspark.draft", 3)
        spans = on.exported()
    check_tree(spans, CLIENT.trace_id, CLIENT.span_id)


async def test_a_request_without_a_trace_gets_one_by_chance() -> None:
    async with traced(sample=1.0) as on:
        await by_sdk(on)
        (call,) = await on.told("text_completion toy")
        await on.told("dspark.verify")
        await on.told("dspark.draft", 3)
        assert call.parent == ""
        check_tree(on.exported(), call.context.trace_id, "")


async def test_what_is_not_sampled_leaves_no_trace_anywhere() -> None:
    async with traced(sample=0.0) as on:
        await by_sdk(on)
        await by_http(on, CLIENT.traceparent[:-1] + "0")
        await by_http(on, "nonsense")
        assert on.engine.figures.speculation.accepted > 0
        assert on.spans == []
        assert {request.traceparent for request in on.runner.submitted} == {""}


async def test_a_round_s_time_is_read_from_its_trace() -> None:
    async with traced() as on:
        await by_sdk(on, max_tokens=60)
        (decode,) = await on.told("dspark.decode")
        rounds = [e for e in decode.events if e.attributes.get("dspark.linked")]
        assert rounds, "nothing was drafted elsewhere"
        await on.told("dspark.draft", len(rounds))
        times = list(round_times(on.spans))
        mean = means(times)
    elsewhere = [time for time in times if time.drafted]
    assert len(elsewhere) == len(rounds)
    for time in elsewhere:
        assert time.draft > 0
        assert time.wire > 0
        assert time.verify > 0
        parts = time.draft + time.wire + time.wait + time.verify
        assert parts <= time.total * 1.02 + 0.05  # the clock's own grain
    assert sum(mean[part] for part in PARTS) == pytest.approx(mean["total"], rel=0.02, abs=0.05)


async def test_rounds_of_a_long_answer_have_spans_up_to_a_bound() -> None:
    async with traced() as on:
        await by_sdk(on, max_tokens=600)
        (verify,) = await on.told("dspark.verify")
        assert verify.attributes["dspark.rounds"] > TRACED_ROUNDS + 20
        assert len(on.named("dspark.draft")) <= TRACED_ROUNDS
        (decode,) = on.named("dspark.decode")
        assert len(decode.events) < TRACED_ROUNDS


async def test_choices_are_siblings() -> None:
    async with traced() as on:
        await by_http(on, n=2)
        runs, verifies = await on.told("dspark.run", 2), await on.told("dspark.verify", 2)
        (call,) = await on.told("text_completion toy")
    assert {run.parent for run in runs} == {call.context.span_id}
    assert {verify.parent for verify in verifies} == {run.context.span_id for run in runs}
    assert call.attributes["gen_ai.request.choice.count"] == 2


async def test_a_refused_request_says_why_and_not_what() -> None:
    async with traced() as on:
        reply = await by_http(on, max_tokens=10**6)
        assert reply.status_code == 400
        (call,) = await on.told("text_completion toy")
        assert call.error == "InvalidRequest"
        assert "no span may show" not in repr(call)


async def test_without_a_tracer_a_trace_goes_through_as_it_came() -> None:
    async with traced(traces=False) as on:
        await by_http(on, CLIENT.traceparent)
        assert [request.traceparent for request in on.runner.submitted] == [CLIENT.traceparent]
