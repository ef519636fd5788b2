"""What is remembered of a traced request until somebody makes spans of it: W3C trace context, and
points in time. Plain data: whoever writes these in a step knows nothing of OpenTelemetry.

A request is traced if it carries a `traceparent`. Spans of one part are named from their parent
(`TraceContext.child`), so a child can be sent on its way before its parent is written down, and
nobody has to remember which id was given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from dspark.core.requests import Request

# Rounds of a request that are kept one by one; of all of them there are sums.
TRACED_ROUNDS = 64

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a trace that is sampled. trace_id: 32, span_id: 16 lower hexadecimal digits."""

    trace_id: str
    span_id: str

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"

    def child(self, name: str) -> TraceContext:
        """The span of this name below this one. The same name gives the same span."""
        data = bytes.fromhex(self.trace_id + self.span_id) + name.encode()
        return TraceContext(self.trace_id, blake2b(data, digest_size=8).hexdigest())


@dataclass(frozen=True, slots=True)
class Parent:
    """What a caller says of its own span. sampled: whether it is kept."""

    context: TraceContext
    sampled: bool


def parent_of(traceparent: str) -> Parent | None:
    """A W3C `traceparent` header; None for what is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (found[4] and traceparent.startswith("00")):
        return None
    if not (found[1].strip("0") and found[2].strip("0")):
        return None
    return Parent(TraceContext(found[1], found[2]), bool(int(found[3], 16) & _SAMPLED))


def cleaned(traceparent: str) -> str:
    """What may be handed on of what a stranger sent: this version's, so of one length; or ""."""
    parent = parent_of(traceparent) if traceparent else None
    if parent is None:
        return ""
    told = parent.context.traceparent
    return told if parent.sampled else f"{told[:-1]}0"


def sampled(traceparent: str) -> TraceContext | None:
    """The span that this names, if its trace is kept."""
    if not traceparent:
        return None
    parent = parent_of(traceparent)
    return parent.context if parent is not None and parent.sampled else None


def verify_context(run: TraceContext, choice: int, attempt: int) -> TraceContext:
    """The verifier's span of a run, below the one that the run came with."""
    return run.child(f"verify/{choice}/{attempt}")


def decode_context(run: TraceContext, choice: int, attempt: int) -> TraceContext:
    """Of a run, the span under which drafters put theirs."""
    return verify_context(run, choice, attempt).child("decode")


class Round(NamedTuple):
    """One step of a traced run. Points on the engine's clock, seconds.

    asked, answered: of the draft that this step verified, None without one; a draft of this process
    is answered when it is asked. began, ended: of the step; forward_s: the target's part of it.
    drafter: who made it, a replica id or a local name. linked: in another process.
    """

    number: int
    began: float
    ended: float
    forward_s: float
    asked: float | None = None
    answered: float | None = None
    drafter: str = ""
    linked: bool = False
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0


@dataclass(slots=True)
class RunTrace:
    """One traced choice on a verifier, from submission to its end. Points on the engine's clock.

    drafting: trace context that its DraftRequests carry. admitted: its first step began; first: its
    first token was committed. rounds: the first TRACED_ROUNDS; the sums are of all. error: the kind
    of what ended it, "" for a good end.
    """

    traceparent: str
    drafting: str
    request_id: str
    choice: int
    attempt: int
    prompt_tokens: int
    submitted: float
    admitted: float | None = None
    first: float | None = None
    ended: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    cached_tokens: int = 0
    reason: str = ""
    error: str = ""

    @classmethod
    def of(cls, request: Request, now: float) -> RunTrace | None:
        """Of a run that is submitted now; None if it is not traced."""
        above = sampled(request.traceparent)
        if above is None:
            return None
        return cls(
            request.traceparent,
            decode_context(above, request.choice, request.attempt).traceparent,
            request.request_id,
            request.choice,
            request.attempt,
            len(request.prompt_ids),
            now,
        )

    def add(self, round: Round) -> None:
        """A step that committed something."""
        if self.first is None:
            self.first = round.ended
        if self.steps < TRACED_ROUNDS:
            self.rounds.append(round)
        self.steps += 1
        self.drafted += round.drafted
        self.verified += round.verified
        self.accepted += round.accepted
        self.committed += round.committed


class Drafted(NamedTuple):
    """One request of a drafter's pass. traceparent: of the request. Points on `time.monotonic`:
    when it arrived, when its pass began and ended. batch: requests of the pass. tokens: made."""

    traceparent: str
    round: int
    arrived: float
    began: float
    ended: float
    batch: int
    tokens: int
