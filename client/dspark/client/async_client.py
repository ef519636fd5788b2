"""The SDK for asyncio: the same calls, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from dspark.client.answer_client import AnswerState, model_from_wire
from dspark.client.connection import Connection, Tls, Turns
from dspark.client.request_client import (
    Message,
    Options,
    Prompt,
    as_chat,
    generate_request,
    prompt_to_wire,
)
from dspark.client.results import Chunk, Generation, ModelInfo
from dspark.client.retry import Retry, Tries
from dspark.client.tracing import traceparent
from dspark.client.wire_client import error_from_rpc
from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.errors import DsparkError, Unavailable
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

Reply = TypeVar("Reply")


class AsyncClient:
    """Calls a dspark server from one event loop. Arguments and errors: see `Client`.

    async with AsyncClient("localhost:50051") as client:
        print((await client.chat("Why is the sky blue?", max_tokens=100)).text)
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        retry: Retry | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._connection = Connection(address, api_key, tls)
        self._retry = retry or Retry()
        self._sleep = sleep

    # Made by the first call: a channel belongs to the event loop that runs then.
    @cached_property
    def _channels(self) -> list[grpc.aio.Channel]:
        return self._connection.async_channels()

    @cached_property
    def _turns(self) -> Turns[pb_grpc.GenerationAsyncStub]:
        return Turns([pb_grpc.GenerationStub(channel) for channel in self._channels])

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """The whole answer to a text, ids or messages. Options: see `Options`."""
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.generation

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it comes. Nothing is sent before the first chunk is asked for.

        async with client.stream("Once upon a time", max_tokens=200) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
        """
        state = AnswerState(generate_request(prompt, options))
        metadata = self._connection.metadata(traceparent(options))
        stub = self._turns.request()

        def start(request: pb.GenerateRequest, left_s: float | None) -> Any:
            return stub(request.attempt).Generate(request, timeout=left_s, metadata=metadata)

        tries = Tries(self._retry, options.get("deadline_s"))
        return AsyncStream(state, tries, start, self._sleep)

    async def chat(
        self, messages: str | Sequence[Message], **options: Unpack[Options]
    ) -> Generation:
        """The answer to a conversation; a text is one message of the user's."""
        return await self.generate(as_chat(messages), **options)

    async def count_tokens(
        self, prompt: Prompt, *, model: str | None = None, deadline_s: float | None = None
    ) -> int:
        """Tokens of a prompt as the server counts them, chat template applied."""
        request = pb.CountTokensRequest(
            protocol_version=PROTOCOL_VERSION, model=model or "", prompt=prompt_to_wire(prompt)
        )
        reply = await self._ask(lambda stub: stub.CountTokens, request, deadline_s)
        return reply.prompt_tokens

    async def model_info(
        self, model: str | None = None, *, deadline_s: float | None = None
    ) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.ModelInfoRequest(protocol_version=PROTOCOL_VERSION, model=model or "")
        return model_from_wire(await self._ask(lambda stub: stub.ModelInfo, request, deadline_s))

    async def _ask(
        self,
        method: Callable[[pb_grpc.GenerationAsyncStub], Callable[..., Awaitable[Reply]]],
        request: object,
        deadline_s: float | None,
    ) -> Reply:
        tries, stub = Tries(self._retry, deadline_s), self._turns.request()
        while True:
            try:
                metadata = self._connection.metadata()
                call = method(stub(tries.attempt))
                return await call(request, timeout=tries.left_s(), metadata=metadata)
            except grpc.RpcError as broken:
                wait_s = tries.failed(error_from_rpc(broken))
            await self._sleep(wait_s)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncStream(AsyncIterator[Chunk]):
    """Chunks of all choices as they come; each choice's last one has a finish_reason.

    A lost connection is made again and the stream goes on where it was. Closing it early, leaving
    its `async with`, or cancelling the task that reads it cancels the request in the server. Once
    closed the iteration ends, also that of another task; `generation.finish_reason` is None then.
    """

    def __init__(
        self,
        state: AnswerState,
        tries: Tries,
        start: Callable[[pb.GenerateRequest, float | None], Any],
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        self._state = state
        self._tries = tries
        self._start = start
        self._sleep = sleep
        self._call: Any = None
        self._closed = False

    @property
    def generation(self) -> Generation:
        """All that has come so far; the whole answer after the last chunk, also after an error."""
        return self._state.generation

    async def __anext__(self) -> Chunk:
        chunk: Chunk | None = None
        try:
            while chunk is None and not (self._closed or self._state.complete):
                response = await self._response()
                chunk = None if response is None else self._state.take(response)
        except BaseException:
            self._cancel()
            raise
        if chunk is None:
            await self._finish()
            raise StopAsyncIteration
        self._tries.progressed()
        return chunk

    async def _response(self) -> pb.GenerateResponse | None:
        """The next one, of this attempt or of another; None if the stream was closed meanwhile."""
        while not self._closed:
            try:
                if self._call is None:
                    left_s = self._tries.left_s()
                    request = self._state.request(self._tries.attempt, left_s)
                    self._call = self._start(request, left_s)
                response = await self._read()
                if response is not None:
                    return response
                error: DsparkError = Unavailable("the stream ended before the answer did")
            except grpc.RpcError as broken:
                error = error_from_rpc(broken)
            if not self._closed:
                self._call = None
                await self._sleep(self._tries.failed(error, accepted=self._state.begun))
        return None

    async def _read(self) -> pb.GenerateResponse | None:
        """None at the end of the call, and when another task closed the stream: gRPC tells that by
        a CancelledError too, but nobody cancelled this task."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            return None
        return None if response is grpc.aio.EOF else response  # type: ignore[attr-defined]

    async def _finish(self) -> None:
        """Wait until the server has let go: the next request is not refused because of this one."""
        if not self._closed and self._call is not None:
            with suppress(grpc.RpcError):
                await self._call.read()
        self._cancel()

    async def aclose(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cancel()
