"""One choice from request to text: a target's events in, pieces of text and a whole answer out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from dspark.core.errors import Unavailable
from dspark.core.requests import (
    Committed,
    Event,
    FinishReason,
    Request,
    SpeculationFigures,
    TokenLogprob,
    Usage,
)
from dspark.gateway.aside import aside
from dspark.gateway.text import TextStream
from dspark.gateway.tokenizer import Tokenizer


class Target(Protocol):
    """Whatever runs a request: an engine in this process, or a verifier behind gRPC."""

    def run(self, request: Request) -> AsyncGenerator[Event, None]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What a client may see next: text, and the ids that came with it (text may lag behind)."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. ttft_s: to the first token. tpot_s: mean of a further token, 0 with only one."""

    ttft_s: float
    tpot_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A choice that ended well. Text, ids and usage are of the whole choice; log-probabilities,
    speculation and timing of what came after the ids it was resumed with."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationFigures
    logprobs: tuple[TokenLogprob, ...]
    timing: Timing


async def stream_answer(
    target: Target,
    tokenizer: Tokenizer,
    request: Request,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncGenerator[Piece | Answer, None]:
    """Pieces as they come, then the Answer. Raises the DsparkError that ended the choice.

    A stop string ends the answer here and cancels the rest in the target: ids after the one that
    completed it are neither shown nor counted. A request with committed_ids is resumed: whoever
    holds them has the text that they release, so pieces carry only what is new.
    """
    params = request.sampling
    text = TextStream(tokenizer.detokenizer(), params.stop, params.min_tokens)
    # Every stop string looks at every character.
    size = len(request.committed_ids) * max(len(params.stop), 1)
    resumed = await aside(size, text.push, request.committed_ids)
    shown = [resumed.text]
    ids = [*request.committed_ids[: resumed.tokens]]
    logprobs: list[TokenLogprob] = []
    figures = SpeculationFigures()
    cached = 0
    reason = FinishReason.STOP if resumed.stopped else None
    began = clock()
    first = last = None
    async with aclosing(_nothing() if resumed.stopped else target.run(request)) as events:
        async for event in events:
            if isinstance(event, Committed):
                last = clock()
                first = last if first is None else first
                piece = text.push(event.ids)
                kept = piece.tokens - len(ids)
                ids += event.ids[:kept]
                logprobs += event.logprobs[:kept]
                figures += _cut(event.speculation, kept)
                cached = min(
                    event.cached_tokens, len(request.prompt_ids)
                )  # of a resumed answer too
                shown.append(piece.text)
                yield Piece(piece.text, event.ids[:kept], event.logprobs[:kept])
                if piece.stopped:
                    reason = FinishReason.STOP
                    break
            else:
                if event.error is not None:
                    raise event.error
                piece = text.finish()
                reason = FinishReason.STOP if piece.stopped else event.reason
                shown.append(piece.text)
                if piece.text:
                    yield Piece(piece.text, ())
    if reason is None or reason is FinishReason.ERROR:
        raise Unavailable("the target left the request without an end")
    now = clock()
    first, last = (now, now) if first is None or last is None else (first, last)
    further = len(ids) - resumed.tokens - 1
    yield Answer(
        choice=request.choice,
        text="".join(shown),
        token_ids=tuple(ids),
        finish_reason=reason,
        usage=Usage(len(request.prompt_ids), len(ids), cached),
        speculation=figures,
        logprobs=tuple(logprobs),
        timing=Timing(first - began, (last - first) / max(further, 1), now - began),
    )


async def _nothing() -> AsyncGenerator[Event, None]:
    """What is left to run of a choice that ended before: no events."""
    events: tuple[Event, ...] = ()
    for event in events:
        yield event


def _cut(figures: SpeculationFigures, kept: int) -> SpeculationFigures:
    """Of a round of which `kept` tokens stand (L6: what a stop cuts off counts nowhere)."""
    return replace(figures, accepted=min(figures.accepted, kept))


async def whole_answer(target: Target, tokenizer: Tokenizer, request: Request) -> Answer:
    """The same without the pieces."""
    last: Piece | Answer | None = None
    async for event in stream_answer(target, tokenizer, request):
        last = event
    assert isinstance(last, Answer), "a stream of pieces ends with its answer"
    return last
