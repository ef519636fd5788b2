"""A verifier behind gRPC as a `Target`: all runs of this gateway on it, over one stream.

A run whose stream is lost ends with `Unavailable`; whoever holds several verifiers goes on from
there on another, with a newer attempt and the ids it has (`Request.committed_ids`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.errors import InvalidRequest, Unavailable
from dspark.core.replicas import Described
from dspark.core.requests import Event, Finished, FinishReason, Request, Usage
from dspark.gateway.wire_verifier_client import (
    committed_from_wire,
    described_from_wire,
    finished_from_wire,
    key_to_wire,
    name_from_wire,
    name_of,
    run_to_wire,
)
from dspark.serving import named, plain_words
from dspark.v1 import verification_pb2 as pb
from dspark.v1 import verification_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[pb.RunRequest, pb.RunResponse]

log = logging.getLogger(__name__)

# gRPC's own limit, said aloud: a prompt of a million ids and its parameters fit.
MAX_MESSAGE_BYTES = 4 * 2**20
# Events of a run that wait for its reader before the verifier is asked to pause it.
BUFFERED_EVENTS = 64
# Heartbeats without a word before a verifier counts as lost.
SILENT_BEATS = 3
# Seconds in which a verifier must say what it is.
CONNECT_S = 5.0

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A verifier's machine that is gone without a word is noticed within 30 s, also while idle.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The channel reconnects by itself. In between a run is refused at once: another verifier, or
    # the client a little later, does better than a queue.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class VerificationClient:
    """`async with VerificationClient("host:port") as target: ... target.run(request)`.

    server_name: that its certificate carries in place of its host. expect: raises Unavailable for
    one that may not be used. gateway: replica id, for the verifier's logs. buffered_events: of a
    run that its reader may lag behind. clock: seconds; deadlines are points on it.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        expect: Callable[[Described], None] = lambda _: None,
        gateway: str = "",
        buffered_events: int = BUFFERED_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._options = (*OPTIONS, *named(server_name))
        self._expect = expect
        self._gateway = gateway
        self._buffered = buffered_events
        self._clock = clock
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None

    async def __aenter__(self) -> VerificationClient:
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.address, self._options)
        else:
            self._channel = grpc.aio.secure_channel(self.address, self._credentials, self._options)
        self._stub: pb_grpc.VerificationAsyncStub = pb_grpc.VerificationStub(self._channel)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.lose("this gateway is stopping")
        await self._channel.close(None)

    async def describe(self) -> Described:
        """What the verifier says of itself. Raises Unavailable."""
        try:
            ask = pb.DescribeRequest(protocol_version=PROTOCOL_VERSION)
            return described_from_wire(await self._stub.Describe(ask, timeout=CONNECT_S))
        except grpc.aio.AioRpcError as error:
            why = plain_words(_reason(error), secured=self._credentials is not None)
            raise Unavailable(f"the verifier at {self.address} does not answer: {why}") from error

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one choice, the last one `Finished`, with the error if it was refused or lost.

        Raises Unavailable if there is no verifier to ask, and InvalidRequest for what cannot be
        sent. Closing the iterator early cancels the choice in the verifier.
        """
        link = await self._connected()
        run = await link.start(request)
        try:
            while True:
                event = await link.next(run)
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            link.leave(run)

    async def _connected(self) -> _Link:
        if self._link is not None and not self._link.lost:
            return self._link
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)  # one try for all that wait

    async def _connect(self) -> _Link:
        described = await self.describe()
        self._expect(described)
        self._link = _Link(
            self._stub.Run(None),
            pb.GatewayHello(protocol_version=PROTOCOL_VERSION, gateway=self._gateway),
            f"the verifier at {self.address}",
            heartbeat_s=described.heartbeat_s,
            buffered_events=self._buffered,
            clock=self._clock,
        )
        return self._link


class _Run:
    """What came for a run and was not read yet. over: its last event has come. left: nobody reads
    it any more, and the verifier knows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.name = name_of(request)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.usage = Usage(len(request.prompt_ids), len(request.committed_ids))
        self.paused = False
        self.left = False
        self.over = asyncio.Event()

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.over.set()
        else:
            outputs = event.index + len(event.ids)
            self.usage = Usage(self.usage.prompt_tokens, outputs, event.cached_tokens)
        self.events.put_nowait(event)


class _Link:
    """One stream to a verifier and the runs on it, until it is lost. lost: why, "" before that."""

    def __init__(
        self,
        call: Call,
        hello: pb.GatewayHello,
        peer: str,
        *,
        heartbeat_s: float,
        buffered_events: int,
        clock: Callable[[], float],
    ) -> None:
        self.lost = ""
        self._call = call
        self._peer = peer
        self._heartbeat_s = heartbeat_s
        self._buffered = buffered_events
        self._clock = clock
        self._runs: dict[tuple[str, int, int], _Run] = {}
        self._outbox: asyncio.Queue[pb.RunRequest] = asyncio.Queue()
        self._send(pb.RunRequest(hello=hello))
        self._silent = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(heartbeat_s, self._tick)
        self._tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._write()),
        ]

    async def start(self, request: Request) -> _Run:
        """Raises InvalidRequest for what cannot be sent, Unavailable if the stream is lost."""
        message = pb.RunRequest(run=run_to_wire(request, self._clock()))
        if message.ByteSize() > MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                "prompt",
                f"{len(request.prompt_ids)} tokens",
                f"make a message of {message.ByteSize()} bytes; the limit is {MAX_MESSAGE_BYTES}",
            )
        run = _Run(request)
        while (other := self._runs.get(run.name)) is not None:
            if not other.left:
                raise InvalidRequest("attempt", request.attempt, "is running already")
            await other.over.wait()  # its last word is on the way
        if self.lost:
            raise Unavailable(self.lost)
        self._runs[run.name] = run
        self._send(message)
        return run

    async def next(self, run: _Run) -> Event:
        event = await run.events.get()
        if run.paused and run.events.qsize() <= self._buffered // 2:
            self._pause(run, False)
        return event

    def leave(self, run: _Run) -> None:
        """Nobody reads it any more."""
        run.left = True
        if not run.over.is_set():
            self._send(pb.RunRequest(cancel=pb.Cancel(key=key_to_wire(run.name))))

    def lose(self, why: str) -> None:
        """The end of the link: every run that is open ends with Unavailable."""
        if self.lost:
            return
        self.lost = f"{self._peer}: {why}"
        for run in self._runs.values():
            run.take(Finished(FinishReason.ERROR, run.usage, error=Unavailable(self.lost)))
        self._runs.clear()
        self._timer.cancel()
        self._call.cancel()
        for task in self._tasks:
            task.cancel()

    def _send(self, message: pb.RunRequest) -> None:
        self._outbox.put_nowait(message)

    def _pause(self, run: _Run, paused: bool) -> None:
        run.paused = paused
        if not run.over.is_set():
            self._send(pb.RunRequest(pause=pb.Pause(key=key_to_wire(run.name), paused=paused)))

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            log.debug("%s: the stream is over", self._peer)  # the reader sees why

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._silent = 0
                for event in response.events:
                    self._take(event)
            why = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            why = f"the stream is lost: {_reason(error)}"
        except Exception as error:  # what it sent is no sense at all
            log.exception("%s: a message cannot be read", self._peer)
            why = f"a message cannot be read: {error}"
        self.lose(why)

    def _take(self, wire: pb.RunEvent) -> None:
        if wire.WhichOneof("event") == "committed":
            run = self._runs.get(name_from_wire(wire.committed.key))
            if run is None or run.left:
                return
            run.take(committed_from_wire(wire.committed))
            if run.events.qsize() >= self._buffered and not run.paused:
                self._pause(run, True)
        else:
            run = self._runs.pop(name_from_wire(wire.finished.key), None)
            if run is not None:
                run.take(finished_from_wire(wire.finished))

    def _tick(self) -> None:
        """Once a heartbeat. Ticks are counted, not seconds: a loop that stood still itself has not
        listened, and sees one tick only."""
        self._silent = self._silent + 1 if self._runs else 0
        if self._silent > SILENT_BEATS:
            self.lose(f"it has said nothing for {SILENT_BEATS} heartbeats")
        else:
            self._timer = self._loop.call_later(self._heartbeat_s, self._tick)


def _reason(error: grpc.aio.AioRpcError) -> str:
    return error.details() or error.code().name
