"""A call for an answer, by whatever protocol it came: checked, encoded, run choice by choice."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from dspark.core.config import EngineConfig
from dspark.core.drafts import DrafterCard
from dspark.core.errors import DsparkError, InvalidRequest, Overloaded
from dspark.core.requests import Limits, Request, Speculation, TokenLogprob, check_request
from dspark.core.sampling import SamplingMode, SamplingParams
from dspark.gateway.answers import Answer, Piece, Target, stream_answer
from dspark.gateway.aside import aside
from dspark.gateway.metrics import Metrics
from dspark.gateway.prompts import Prompt
from dspark.gateway.tokenizer import Tokenizer
from dspark.telemetry.calls import Asked, watched
from dspark.telemetry.tracing import Tracer, error_type

# Pieces of one call that wait for its reader. Behind them the choice's own buffer fills, and then
# its sequence pauses in the engine.
BUFFERED_PIECES = 16

# Told to a client that reads again when it is too late: it may come again at once.
STALLED_RETRY_S = 1.0

MAX_REQUEST_ID_CHARS = 128
# A gateway counts its own replays from attempt * 2^16, in 32 bits (verification.proto).
MAX_ATTEMPT = 2**16 - 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a gateway says of the model behind it. drafters: what a request may name."""

    name: str
    target_id: str
    limits: Limits
    drafters: tuple[DrafterCard, ...] = ()
    gamma: int = 0
    verify: str = "early-stop"
    couple_unseeded: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A user's request. request_id: unique within the tenant; "" and the gateway makes one.
    deadline: a point on the gateway's clock, seconds. resume: ids that the client already holds, by
    choice; they and the text they release are not sent again. protocol: that it came by, "grpc" or
    "http"."""

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    attempt: int = 0
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    floor_tps: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)
    resume: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    traceparent: str = ""
    protocol: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """The call is well formed. First event of a stream. request_id: as the client knows it."""

    request_id: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of one choice. index: output position of the first of ids; text may lag behind them."""

    choice: int
    index: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


Output = Started | Chunk | Answer


class Gateway:
    """Runs calls on a target. The servicer and the HTTP routes are two mappings onto this.

    metrics: where every answer is measured. tracer: None traces nothing, and hands a call's trace
    context on as it came. stall_timeout_s: see `hand`.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        model: ServedModel,
        clock: Callable[[], float] = time.monotonic,
        *,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.clock = clock
        self.metrics = metrics or Metrics()
        self._tracer = tracer
        self._target = target
        self._stall_timeout_s = stall_timeout_s or EngineConfig().stall_timeout_s

    async def hand(self, writing: Awaitable[None]) -> None:
        """Wait for a client to take what is written to it. Raises Overloaded for one that takes
        nothing for stall_timeout_s.

        The one limit for readers that stand still, whatever they came by. An engine's own of the
        same length is for gateways: it begins behind this one, when the buffers between are full.
        """
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await writing
        except TimeoutError:
            told = (
                f"the reader took nothing for {self._stall_timeout_s:g} s, and its buffer is full"
            )
            raise Overloaded(told, STALLED_RETRY_S) from None

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Its ids. Raises InvalidRequest."""
        return await aside(prompt.size, prompt.encode, self.tokenizer)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids of its vocabulary."""
        return await aside(len(ids), self.tokenizer.decode, ids)

    def requests(self, call: Call) -> list[Request]:
        """One checked request a choice. Raises InvalidRequest naming field, value and limit.

        Their request_id is the call's with its tenant before it: no tenant can name, and so end,
        what another one runs.
        """
        _check_name(call)
        ids = call.prompt.encode(self.tokenizer)
        params = call.sampling
        if self.model.couple_unseeded and params.mode is SamplingMode.REJECTION:
            params = replace(params, seed=secrets.randbits(64))
        base = Request(
            request_id=f"{call.tenant}/{call.request_id or secrets.token_hex(12)}",
            prompt_ids=ids,
            sampling=params,
            attempt=call.attempt,
            deadline=call.deadline,
            tenant=call.tenant,
            priority=call.priority,
            floor_tps=call.floor_tps,
            speculation=call.speculation,
            traceparent=call.traceparent,
        )
        check_request(base, self.model.limits)
        room = self.model.limits.sequence_tokens - len(ids)
        most = room if params.max_tokens is None else params.max_tokens
        for choice, held in call.resume.items():
            if not 0 <= choice < params.n:
                raise InvalidRequest("resume", choice, f"is not a choice of n = {params.n}")
            if len(held) > most:
                raise InvalidRequest(
                    "resume", f"{len(held)} ids", f"are more than the answer may have: {most}"
                )
        requests = [
            replace(base, choice=choice, committed_ids=call.resume.get(choice, ()))
            for choice in range(params.n)
        ]
        for request in requests:
            if request.committed_ids:
                check_request(request, self.model.limits)
        return requests

    async def generate(self, call: Call) -> AsyncGenerator[Output, None]:
        """`Started`, then chunks of all choices as they come, each choice ended by its `Answer`.

        Raises the DsparkError that ended the call; the other choices are cancelled then, as they
        are when the iterator is closed early.
        """
        call = replace(call, request_id=call.request_id or secrets.token_hex(12))
        asked = Asked(
            operation="text_completion" if call.prompt.chat is None else "chat",
            model=self.model.name,
            request_id=call.request_id,
            sampling=call.sampling,
            tenant=call.tenant,
            protocol=call.protocol,
            traceparent=call.traceparent,
        )
        with watched(asked, self.metrics, self._tracer) as watch:
            held = sum(map(len, call.resume.values()))
            call = replace(call, traceparent=watch.traceparent)
            requests = await aside(call.prompt.size + held, self.requests, call)
            yield Started(call.request_id, requests[0].prompt_ids)
            choices = [self._choice(request, asked) for request in requests]
            async with aclosing(choices[0] if len(choices) == 1 else merged(choices)) as outputs:
                async for output in outputs:
                    if isinstance(output, Answer):
                        watch.answered(output)
                    else:
                        watch.chunk()
                    yield output

    async def _choice(self, request: Request, asked: Asked) -> AsyncGenerator[Output, None]:
        held = index = len(request.committed_ids)
        metrics, call = self.metrics, (asked.operation, asked.model)
        began = time.perf_counter()
        try:
            async with aclosing(stream_answer(self._target, self.tokenizer, request)) as events:
                async for event in events:
                    if isinstance(event, Piece):
                        yield Chunk(request.choice, index, event.ids, event.text, event.logprobs)
                        index += len(event.ids)
                    else:
                        made = len(event.token_ids) - held
                        metrics.answered(asked.protocol, *call, event, made)
                        yield event
        except (DsparkError, asyncio.CancelledError) as error:
            metrics.failed(*call, time.perf_counter() - began, error_type(error))
            raise


def _check_name(call: Call) -> None:
    name = call.request_id
    if len(name) > MAX_REQUEST_ID_CHARS or not name.isprintable():
        raise InvalidRequest(
            "request_id", name, f"must be printable, of at most {MAX_REQUEST_ID_CHARS} characters"
        )
    if not 0 <= call.attempt <= MAX_ATTEMPT:
        raise InvalidRequest("attempt", call.attempt, f"must be in [0, {MAX_ATTEMPT}]")


async def merged(streams: list[AsyncGenerator[Output, None]]) -> AsyncGenerator[Output, None]:
    """Outputs of several choices in the order they come; the first failure ends all."""
    queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue(BUFFERED_PIECES)

    async def pump(stream: AsyncIterator[Output]) -> None:
        try:
            async for output in stream:
                await queue.put(output)
            await queue.put(None)
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            output = await queue.get()
            if output is None:
                running -= 1
            elif isinstance(output, BaseException):
                raise output
            else:
                yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
