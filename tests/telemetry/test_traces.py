"""Trace context, who is traced, and spans made from what a verifier and a drafter remember."""

from __future__ import annotations

import random

import pytest

from dspark.core.requests import Request
from dspark.core.traces import (
    TRACED_ROUNDS,
    Drafted,
    Round,
    RunTrace,
    TraceContext,
    decode_context,
    parent_of,
    sampled,
    verify_context,
)
from dspark.telemetry.spans import drafted_spans, run_spans
from dspark.telemetry.tracing import Kind, Span, Tracer, error_type, part

ABOVE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def wall(at: float) -> int:
    return round(at * 1e9)


# --- W3C trace context


@pytest.mark.parametrize(
    "told",
    [
        "",
        "nonsense",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",  # capitals
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",  # no version
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",  # version 0 has no more
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n",
    ],
)
def test_what_is_no_trace_context_is_none(told: str) -> None:
    assert parent_of(told) is None
    assert sampled(told) is None


def test_a_later_version_may_say_more() -> None:
    parent = parent_of("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03-more")
    assert parent is not None
    assert parent.context == ABOVE
    assert parent.sampled


def test_a_trace_that_is_not_kept_is_none_of_ours() -> None:
    told = ABOVE.traceparent[:-1] + "0"
    parent = parent_of(told)
    assert parent is not None
    assert not parent.sampled
    assert sampled(told) is None


def test_children_are_known_by_their_name() -> None:
    assert ABOVE.child("a") == ABOVE.child("a")
    spans = {ABOVE.child(name).span_id for name in ("a", "b", "a/0", "a/1")} | {ABOVE.span_id}
    assert len(spans) == 5
    assert ABOVE.child("a").trace_id == ABOVE.trace_id
    assert parent_of(ABOVE.child("a").traceparent) is not None


# --- who is traced


def test_the_client_decides_and_chance_where_it_says_nothing() -> None:
    never, always = (Tracer(print, sample) for sample in (0.0, 1.0))
    begun = never.begin(ABOVE.traceparent)
    assert begun is not None
    assert (begun.context.trace_id, begun.parent) == (ABOVE.trace_id, ABOVE.span_id)
    assert begun.context.span_id != ABOVE.span_id
    assert always.begin(ABOVE.traceparent[:-1] + "0") is None
    assert never.begin("") is None
    assert never.begin("nonsense") is None
    first = always.begin("nonsense")
    assert first is not None
    assert first.parent == ""
    assert sampled(first.context.traceparent) == first.context


def test_the_share_of_traces_is_the_configured_one() -> None:
    tracer = Tracer(print, 0.25, rng=random.Random(1))
    traced = sum(tracer.begin("") is not None for _ in range(4000))
    assert 900 < traced < 1100


def test_a_part_is_one_span_with_its_error() -> None:
    spans: list[Span] = []
    now = [10.0]
    tracer = Tracer(spans.append, clock=lambda: now[0], wall_ns=lambda: round(now[0] * 1e9))

    def fails() -> None:
        with part(tracer, ABOVE, "x", "x/1", Kind.CLIENT) as running:
            assert running.traceparent == ABOVE.child("x/1").traceparent
            running.attributes["a"] = 1
            now[0] = 12.5
            raise KeyError("what a user wrote")

    with pytest.raises(KeyError):
        fails()
    (span,) = spans
    assert (span.context, span.parent) == (ABOVE.child("x/1"), ABOVE.span_id)
    assert (span.start, span.end) == (10_000_000_000, 12_500_000_000)
    assert (span.error, dict(span.attributes)) == ("KeyError", {"a": 1})
    assert error_type(GeneratorExit()) == "cancelled"
    for off in (
        part(None, ABOVE, "x", "x", Kind.CLIENT),
        part(tracer, None, "x", "x", Kind.CLIENT),
    ):
        with off as running:
            assert running.traceparent == ""
    assert len(spans) == 1


# --- a verifier's run


def a_run(rounds: int) -> RunTrace:
    """Queued 1 s, prefilled 1 s, then a round every 0.1 s: asked at once, answered after 30 ms, and
    a step of 50 ms."""
    run = RunTrace.of(Request("r", (1, 2, 3, 4, 5), traceparent=ABOVE.traceparent), 0.0)
    assert run is not None
    run.admitted = 1.0
    run.add(Round(0, 1.5, 2.0, 0.4, committed=1))
    for n in range(1, rounds + 1):
        end = 2.0 + 0.1 * n
        run.add(
            Round(n, end - 0.05, end, 0.04, end - 0.1, end - 0.07, "d1", True, 4, 3, 2, committed=3)
        )
    run.ended, run.reason = 2.0 + 0.1 * rounds, "length"
    return run


def test_a_run_is_a_tree_of_queue_prefill_and_decode() -> None:
    verify, queue, prefill, decode = run_spans(a_run(3), wall, "v1")
    assert verify.context == verify_context(ABOVE, 0, 0)
    assert verify.parent == ABOVE.span_id
    assert [span.name for span in (queue, prefill, decode)] == [
        "dspark.queue",
        "dspark.prefill",
        "dspark.decode",
    ]
    assert {span.parent for span in (queue, prefill, decode)} == {verify.context.span_id}
    assert [(span.start, span.end) for span in (queue, prefill, decode)] == [
        (0, wall(1.0)),
        (wall(1.0), wall(2.0)),
        (wall(2.0), wall(2.3)),
    ]
    assert verify.attributes["dspark.accepted"] == 6
    assert verify.attributes["gen_ai.usage.output_tokens"] == 10
    assert decode.context == decode_context(ABOVE, 0, 0)


def test_a_round_says_where_its_time_went() -> None:
    *_, decode = run_spans(a_run(2), wall)
    told = decode.events[1].attributes
    parts = [told[f"dspark.{name}_ms"] for name in ("total", "draft", "wait", "verify")]
    assert parts == pytest.approx([100, 30, 20, 50])
    assert told["dspark.drafter"] == "d1"


def test_rounds_are_bounded_and_sums_are_whole() -> None:
    run = a_run(500)
    verify, *_, decode = run_spans(run, wall)
    assert len(run.rounds) == TRACED_ROUNDS
    assert len(decode.events) == TRACED_ROUNDS - 1
    assert verify.attributes["dspark.drafted"] == 4 * 500


def test_a_run_that_never_began_has_waited() -> None:
    run = RunTrace.of(Request("r", (1,), traceparent=ABOVE.traceparent), 1.0)
    assert run is not None
    run.ended, run.error = 3.0, "DeadlineExceeded"
    verify, queue = run_spans(run, wall)
    assert (verify.error, queue.end) == ("DeadlineExceeded", wall(3.0))


def test_choices_and_attempts_have_spans_of_their_own() -> None:
    names = {verify_context(ABOVE, c, a).span_id for c in range(3) for a in range(3)}
    assert len(names) == 9


# --- a drafter's pass


def test_each_traced_request_of_a_pass_has_a_span_below_its_decode() -> None:
    run = RunTrace.of(Request("r", (1,), traceparent=ABOVE.traceparent), 1.0)
    assert run is not None
    told = run.drafting
    drafted = [Drafted(told, 7, 1.0, 1.25, 1.5, batch=3, tokens=5), Drafted("", 1, 1, 1, 2, 3, 5)]
    (span,) = drafted_spans(drafted, wall, "d1")
    assert span.parent == decode_context(ABOVE, 0, 0).span_id
    assert (span.start, span.end) == (wall(1.0), wall(1.5))
    told_of = {name: span.attributes[f"dspark.{name}"] for name in ("round", "queue_ms", "pass_ms")}
    assert told_of == {"round": 7, "queue_ms": 250, "pass_ms": 250}
