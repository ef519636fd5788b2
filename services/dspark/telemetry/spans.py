"""From what a replica remembers of a traced request to its spans. Pure; points in time in, spans
out. Names and attributes: docs/telemetry.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dspark.core.traces import (
    Drafted,
    Round,
    RunTrace,
    sampled,
    verify_context,
)
from dspark.telemetry.tracing import Attributes, Kind, Span, SpanEvent

Wall = Callable[[float], int]


def run_spans(run: RunTrace, wall: Wall, replica: str = "") -> Iterator[Span]:
    """Of one choice on a verifier: verify, and in it queue, prefill, decode with its rounds."""
    above = sampled(run.traceparent)
    if above is None:
        return
    verify = verify_context(above, run.choice, run.attempt)
    end = run.ended
    admitted = end if run.admitted is None else run.admitted
    first = end if run.first is None else run.first
    yield Span(
        "dspark.verify",
        Kind.SERVER,
        verify,
        above.span_id,
        wall(run.submitted),
        wall(end),
        {
            "dspark.replica": replica,
            "dspark.request.id": run.request_id,
            "dspark.choice": run.choice,
            "dspark.attempt": run.attempt,
            "gen_ai.usage.input_tokens": run.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": run.cached_tokens,
            "gen_ai.usage.output_tokens": run.committed,
            "gen_ai.response.finish_reasons": (run.reason,),
            "dspark.rounds": run.steps,
            "dspark.drafted": run.drafted,
            "dspark.verified": run.verified,
            "dspark.accepted": run.accepted,
        },
        error=run.error,
    )

    def part(name: str, begin: float, stop: float, events: tuple[SpanEvent, ...] = ()) -> Span:
        return Span(
            f"dspark.{name}",
            Kind.INTERNAL,
            verify.child(name),
            verify.span_id,
            wall(begin),
            wall(stop),
            events=events,
        )

    yield part("queue", run.submitted, admitted)
    if run.admitted is not None:
        yield part("prefill", admitted, first)
    if run.first is not None:
        yield part("decode", first, end, tuple(_rounds(run, wall)))


def _rounds(run: RunTrace, wall: Wall) -> Iterator[SpanEvent]:
    """The rounds after the first token, which prefill made. `since`: the end of the round before,
    when the draft could be asked for."""
    since = run.first
    for round in run.rounds[1:]:
        assert since is not None
        yield SpanEvent("dspark.round", wall(round.ended), _round(round, since))
        since = round.ended


def _round(round: Round, since: float) -> Attributes:
    """Milliseconds: total, from the round before to this one's end; draft, from asking to the
    answer (wire and drafter together where it is another process); wait, from then (or from the
    round before, without a draft) to the step; verify, the step."""
    told: dict[str, str | bool | int | float] = {
        "dspark.round": round.number,
        "dspark.total_ms": _ms(round.ended - since),
        "dspark.verify_ms": _ms(round.ended - round.began),
        "dspark.forward_ms": _ms(round.forward_s),
        "dspark.drafted": round.drafted,
        "dspark.verified": round.verified,
        "dspark.accepted": round.accepted,
        "dspark.committed": round.committed,
    }
    ready = since
    if round.asked is not None and round.answered is not None:
        told["dspark.drafter"] = round.drafter
        told["dspark.linked"] = round.linked
        told["dspark.draft_ms"] = _ms(round.answered - round.asked)
        ready = round.answered
    told["dspark.wait_ms"] = _ms(max(round.began - ready, 0.0))
    return told


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def drafted_spans(told: list[Drafted], wall: Wall, replica: str = "") -> Iterator[Span]:
    """Of a drafter's pass: one span for each traced request in it, below its verifier's decode."""
    for drafted in told:
        above = sampled(drafted.traceparent)
        if above is None:
            continue
        yield Span(
            "dspark.draft",
            Kind.SERVER,
            above.child(f"draft/{replica}/{drafted.round}"),
            above.span_id,
            wall(drafted.arrived),
            wall(drafted.ended),
            {
                "dspark.replica": replica,
                "dspark.round": drafted.round,
                "dspark.queue_ms": _ms(drafted.began - drafted.arrived),
                "dspark.pass_ms": _ms(drafted.ended - drafted.began),
                "dspark.batch": drafted.batch,
                "dspark.drafted": drafted.tokens,
            },
        )
