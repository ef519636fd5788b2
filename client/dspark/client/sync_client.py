"""The SDK for ordinary programs: blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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


class Client:
    """Calls a dspark server. Safe to share between threads; close it, or use it in a `with`.

        with Client("localhost:50051") as client:
            print(client.chat("Why is the sky blue?", max_tokens=100).text)

    address: host:port, or a list of them: the gateways of one cluster; what one of them cannot
    finish goes on at the next. api_key: sent with every call. tls: True, or the files to trust and
    show. retry: what to do when the server is unavailable. Every call raises a `DsparkError`:
    InvalidRequest, Unauthenticated, NotFound, Overloaded, DeadlineExceeded, Unavailable, Cancelled,
    ModelError, or the bare class for a bug of the server's.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        retry: Retry | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._connection = Connection(address, api_key, tls)
        self._retry = retry or Retry()
        self._sleep = sleep
        self._channels = self._connection.channels()
        self._turns = Turns([pb_grpc.GenerationStub(channel) for channel in self._channels])

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """The whole answer to a text, ids or messages. Options: see `Options`."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.generation

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer as it comes. Nothing is sent before the first chunk is asked for.

        with client.stream("Once upon a time", max_tokens=200) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        """
        state = AnswerState(generate_request(prompt, options))
        metadata = self._connection.metadata(traceparent(options))
        stub = self._turns.request()

        def start(request: pb.GenerateRequest, left_s: float | None) -> Any:
            return stub(request.attempt).Generate(request, timeout=left_s, metadata=metadata)

        tries = Tries(self._retry, options.get("deadline_s"))
        return Stream(state, tries, start, self._sleep)

    def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Generation:
        """The answer to a conversation; a text is one message of the user's."""
        return self.generate(as_chat(messages), **options)

    def count_tokens(
        self, prompt: Prompt, *, model: str | None = None, deadline_s: float | None = None
    ) -> int:
        """Tokens of a prompt as the server counts them, chat template applied."""
        request = pb.CountTokensRequest(
            protocol_version=PROTOCOL_VERSION, model=model or "", prompt=prompt_to_wire(prompt)
        )
        reply: pb.CountTokensResponse = self._ask(
            lambda stub: stub.CountTokens, request, deadline_s
        )
        return reply.prompt_tokens

    def model_info(self, model: str | None = None, *, deadline_s: float | None = None) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.ModelInfoRequest(protocol_version=PROTOCOL_VERSION, model=model or "")
        return model_from_wire(self._ask(lambda stub: stub.ModelInfo, request, deadline_s))

    def _ask(
        self,
        method: Callable[[pb_grpc.GenerationStub], Callable[..., Reply]],
        request: object,
        deadline_s: float | None,
    ) -> Reply:
        tries, stub = Tries(self._retry, deadline_s), self._turns.request()
        while True:
            try:
                metadata = self._connection.metadata()
                call = method(stub(tries.attempt))
                return call(request, timeout=tries.left_s(), metadata=metadata)
            except grpc.RpcError as broken:
                wait_s = tries.failed(error_from_rpc(broken))
            self._sleep(wait_s)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Stream(Iterator[Chunk]):
    """Chunks of all choices as they come; each choice's last one has a finish_reason.

    A lost connection is made again and the stream goes on where it was. Closing it early, or
    leaving its `with`, cancels the request in the server and ends the iteration, also that of
    another thread; `generation.finish_reason` is None then.
    """

    def __init__(
        self,
        state: AnswerState,
        tries: Tries,
        start: Callable[[pb.GenerateRequest, float | None], Any],
        sleep: Callable[[float], object],
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

    def __next__(self) -> Chunk:
        chunk: Chunk | None = None
        try:
            while chunk is None and not (self._closed or self._state.complete):
                response = self._response()
                chunk = None if response is None else self._state.take(response)
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self._finish()
            raise StopIteration
        self._tries.progressed()
        return chunk

    def _response(self) -> pb.GenerateResponse | None:
        """The next one, of this attempt or of another; None if the stream was closed meanwhile."""
        while not self._closed:
            try:
                if self._call is None:
                    left_s = self._tries.left_s()
                    request = self._state.request(self._tries.attempt, left_s)
                    self._call = self._start(request, left_s)
                response: pb.GenerateResponse = next(self._call)
                return response
            except StopIteration:
                error: DsparkError = Unavailable("the stream ended before the answer did")
            except grpc.RpcError as broken:
                error = error_from_rpc(broken)
            if not self._closed:
                self._call = None
                self._sleep(self._tries.failed(error, accepted=self._state.begun))
        return None

    def _finish(self) -> None:
        """Wait until the server has let go: the next request is not refused because of this one."""
        if not self._closed and self._call is not None:
            with suppress(grpc.RpcError, StopIteration):
                next(self._call)
        self.close()

    def close(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
