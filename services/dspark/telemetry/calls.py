"""A call at a gateway from its first byte to its last: one span, its durations, its log lines' ids.

Names are those of the semantic conventions for generative AI (version 1.42 of OpenTelemetry's).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from dspark.core.requests import FinishReason, SpeculationFigures, Usage
from dspark.core.sampling import SamplingParams
from dspark.telemetry.logs import about
from dspark.telemetry.tracing import Begun, Kind, Tracer, Value, error_type

PROVIDER = "dspark"


class CallMetrics(Protocol):
    def called(self, operation: str, model: str, seconds: float, error: str) -> None:
        """A call is over. error: its kind, "" for a good end."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """operation: "chat" or "text_completion". tenant, protocol: as the gateway knows them.
    traceparent: W3C trace context that came with the call, or ""."""

    operation: str
    model: str
    request_id: str
    sampling: SamplingParams
    tenant: str = ""
    protocol: str = ""
    traceparent: str = ""

    def attributes(self) -> dict[str, Value]:
        """Without what the user wrote: stop strings are content, too."""
        p = self.sampling
        told: dict[str, Value] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.response.id": self.request_id,
            "gen_ai.request.temperature": p.temperature,
            "gen_ai.request.top_p": p.top_p,
            "dspark.protocol": self.protocol,
            "dspark.mode": p.mode.value,
        }
        optional: dict[str, tuple[Value | None, Value | None]] = {
            "gen_ai.request.max_tokens": (p.max_tokens, None),
            "gen_ai.request.top_k": (float(p.top_k), 0.0),
            "gen_ai.request.seed": (p.seed, None),
            "gen_ai.request.choice.count": (p.n, 1),
            "gen_ai.request.presence_penalty": (p.presence_penalty, 0.0),
            "gen_ai.request.frequency_penalty": (p.frequency_penalty, 0.0),
            "dspark.tenant": (self.tenant, ""),
        }
        told |= {
            name: value
            for name, (value, usual) in optional.items()
            if value is not None and value != usual
        }
        return told


class Answered(Protocol):
    """What one choice came to: a gateway's `Answer`."""

    @property
    def choice(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def speculation(self) -> SpeculationFigures: ...


@dataclass(slots=True)
class Watched:
    """A call that runs. traceparent: for what it asks of others, "" if it is not traced. first:
    seconds to its first token."""

    traceparent: str
    began: float
    first: float | None = None
    answers: dict[int, Answered] = field(default_factory=dict)

    def chunk(self) -> None:
        if self.first is None:
            self.first = time.perf_counter() - self.began

    def answered(self, answer: Answered) -> None:
        self.answers[answer.choice] = answer


@contextmanager
def watched(asked: Asked, metrics: CallMetrics, tracer: Tracer | None) -> Iterator[Watched]:
    """As long as the call runs. Without a tracer its trace context goes on as it came."""
    start = time.perf_counter()
    begun = None if tracer is None else tracer.begin(asked.traceparent)
    above = asked.traceparent if tracer is None else ""
    call = Watched(above if begun is None else begun.context.traceparent, start)
    error = ""
    try:
        with about(asked.request_id, "" if begun is None else begun.context.trace_id):
            yield call
    except BaseException as problem:
        # Nobody has to read on after the last answer.
        over = isinstance(problem, GeneratorExit) and len(call.answers) == asked.sampling.n
        error = "" if over else error_type(problem)
        raise
    finally:
        seconds = time.perf_counter() - start
        metrics.called(asked.operation, asked.model, seconds, error)
        if tracer is not None and begun is not None:
            _record(asked, call, tracer, begun, seconds, error)


def _record(
    asked: Asked, call: Watched, tracer: Tracer, begun: Begun, seconds: float, error: str
) -> None:
    attributes = asked.attributes()
    answers = [call.answers[choice] for choice in sorted(call.answers)]
    if answers:
        speculation = sum((answer.speculation for answer in answers), SpeculationFigures())
        attributes |= {
            "gen_ai.response.finish_reasons": tuple(a.finish_reason.value for a in answers),
            "gen_ai.usage.input_tokens": answers[0].usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": answers[0].usage.cached_tokens,
            "gen_ai.usage.output_tokens": sum(a.usage.completion_tokens for a in answers),
            "dspark.rounds": speculation.rounds,
            "dspark.drafted": speculation.drafted,
            "dspark.verified": speculation.verified,
            "dspark.accepted": speculation.accepted,
        }
    if call.first is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = round(call.first, 6)
    name, start = f"{asked.operation} {asked.model}", tracer.clock() - seconds
    tracer.record(name, Kind.SERVER, begun, start, attributes, error=error)
