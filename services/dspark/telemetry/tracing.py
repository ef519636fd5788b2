"""Which requests are traced, and spans as plain data. Nothing here knows OpenTelemetry.

A span is written down once, when it is over, from points in time: an append to a queue. What
is made of it, and where it goes, is a sink's, on its own thread.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dspark.core.traces import TraceContext, parent_of

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]


class Kind(Enum):
    """INTERNAL: within a process. SERVER: of a call that came; CLIENT: of one that is made."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class SpanEvent(NamedTuple):
    """at: nanoseconds since 1970."""

    name: str
    at: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Span:
    """start, end: nanoseconds since 1970. parent: span id, "" for a trace's first. error: the kind
    of what went wrong, "" where nothing did."""

    name: str
    kind: Kind
    context: TraceContext
    parent: str
    start: int
    end: int
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    error: str = ""


Sink = Callable[[Span], None]


class Begun(NamedTuple):
    """A span that runs. parent: span id, or ""."""

    context: TraceContext
    parent: str


class Tracer:
    """sink: takes spans that are over, and must not block. sample: share of requests without a
    trace of their own. clock: seconds, of all points in time that spans are made from; wall_ns:
    nanoseconds since 1970."""

    def __init__(
        self,
        sink: Sink,
        sample: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        rng: random.Random | None = None,
    ) -> None:
        self.sink = sink
        self.clock = clock
        self._sample = sample
        self._wall_ns = wall_ns
        self._rng = rng or random.Random()

    def begin(self, traceparent: str) -> Begun | None:
        """A request comes in. Whether it is traced its client says, and if that says nothing,
        chance. None: it is not."""
        parent = parent_of(traceparent) if traceparent else None
        if parent is None:
            if self._rng.random() >= self._sample:
                return None
            return Begun(TraceContext(self._id(128), self._id(64)), "")
        if not parent.sampled:
            return None
        return Begun(TraceContext(parent.context.trace_id, self._id(64)), parent.context.span_id)

    def wall(self) -> Callable[[float], int]:
        """From points on the clock to nanoseconds since 1970, as of now."""
        offset = self._wall_ns() - round(self.clock() * 1e9)
        return lambda at: offset + round(at * 1e9)

    def record(
        self,
        name: str,
        kind: Kind,
        begun: Begun,
        start: float,
        attributes: Attributes,
        *,
        events: Sequence[tuple[str, float]] = (),
        error: str = "",
    ) -> None:
        """A span ends now. start, and the time of each event: on the clock."""
        wall = self.wall()
        self.sink(
            Span(
                name,
                kind,
                begun.context,
                begun.parent,
                wall(start),
                wall(self.clock()),
                attributes,
                tuple(SpanEvent(what, wall(at), {}) for what, at in events),
                error,
            )
        )

    def _id(self, bits: int) -> str:
        return f"{self._rng.getrandbits(bits) or 1:0{bits // 4}x}"


@dataclass(slots=True)
class Part:
    """A span that runs. traceparent: for those below it, "" if it is not traced. error: the kind of
    what went wrong, where no exception says it."""

    traceparent: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""


@contextmanager
def part(
    tracer: Tracer | None, above: TraceContext | None, name: str, key: str, kind: Kind
) -> Iterator[Part]:
    """A span below another, as long as the context. key: what no other below the same has. Nothing
    is traced without a tracer or without a span above."""
    if tracer is None or above is None:
        yield Part()
        return
    context, start = above.child(key), tracer.clock()
    running = Part(context.traceparent)
    try:
        yield running
    except BaseException as error:
        running.error = error_type(error)
        raise
    finally:
        begun = Begun(context, above.span_id)
        tracer.record(name, kind, begun, start, running.attributes, error=running.error)


def error_type(error: BaseException) -> str:
    """What `error.type` says of it: never its message, which may quote a user."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return type(error).__name__
