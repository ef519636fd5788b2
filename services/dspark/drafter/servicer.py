"""A drafter's gRPC service: dspark.v1.Drafting on a runner.

One stream carries all sessions of a verifier, so its end is their end. A request that makes no
sense costs that request, a stream that makes none costs that stream, and nothing a verifier sends
can reach another verifier's sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
from google.protobuf.message import DecodeError

from dspark.core.errors import (
    DeadlineExceeded,
    DsparkError,
    Fenced,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from dspark.core.replicas import Replica
from dspark.drafter.batching import Line, no_draft
from dspark.drafter.handshake import DrafterOffer, VerifierFacts, check_fit
from dspark.drafter.outbox import MAX_UNREAD, Outbox
from dspark.drafter.runner import DraftRunner
from dspark.drafter.wire_servicer import (
    batch_from_wire,
    facts_from_wire,
    offer_to_wire,
    replies_to_wire,
)
from dspark.serving import Calls, Context
from dspark.v1 import drafting_pb2 as pb
from dspark.v1 import drafting_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Drafting"].full_name

# Seconds that a stream may be open before its hello.
HELLO_S = 10.0
# Of replies and of a projection's parts.
MAX_REPLY_BYTES = 2**20
# Verifiers whose epoch is remembered after they have gone.
REMEMBERED = 4096
# Projections that are sent at the same time: each is in memory as a whole.
SENDERS = 2
# Seconds for one, the wait for its turn counted: 300 MB at 5 MB/s.
SENDING_S = 60.0


class _Stream:
    """A verifier's stream, from its hello on."""

    def __init__(self, facts: VerifierFacts, runner: DraftRunner, most: int) -> None:
        self.facts = facts
        self.outbox = Outbox(most, self._unread)
        self._runner = runner
        self.line: Line = runner.open(self.outbox.put)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _unread(self, replies: int) -> None:
        self._runner.figures.refused["unread"] += replies

    def end(self, error: DsparkError | None = None) -> None:
        """Its sessions are dropped now; the call ends with the error, or well."""
        self._runner.close(self.line)
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)

    async def follow(self, *coroutines: asyncio.Task[None]) -> None:
        """Until one of them ends, or somebody ends the stream."""
        try:
            done, _ = await asyncio.wait(
                (self._over, *coroutines), return_when=asyncio.FIRST_COMPLETED
            )
            for one in (self._over, *coroutines):  # who ended the stream knows best why
                if one in done:
                    one.result()
        finally:
            for task in coroutines:
                task.cancel()
            self._over.cancel()


class DraftingServicer(pb_grpc.DraftingServicer):
    """A mapping onto a drafter's runner. A `serving.Service`.

    max_verifiers: streams at a time. max_unread: replies that wait for one verifier to read. What
    verifiers sent and was not taken, or did not read, is counted in the runner's figures.
    """

    name = SERVICE

    def __init__(
        self,
        runner: DraftRunner,
        offer: DrafterOffer,
        replica: Replica | None = None,
        *,
        max_verifiers: int = 64,
        max_unread: int = MAX_UNREAD,
    ) -> None:
        self.draining = False
        self.options = (
            ("grpc.max_receive_message_length", offer.max_message_bytes),
            ("grpc.max_send_message_length", 2 * MAX_REPLY_BYTES),
            # A verifier that is gone without a word is noticed within 30 s, and its sessions go;
            # if it comes back before, its new stream ends the old one.
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        )
        self._runner = runner
        self._offer = offer
        self._replica = replica or Replica()
        self._max_verifiers = max_verifiers
        self._max_unread = max_unread
        self._streams: dict[str, _Stream] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._senders = asyncio.Semaphore(SENDERS)
        self._leaving = False
        self._calls = Calls("this drafter")

    @property
    def verifiers(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DraftingServicer_to_server(self, server)

    def begin_life(self, epoch: int) -> None:
        """This process has registered (again)."""
        self._replica = replace(self._replica, epoch=epoch)

    def refuse_new(self) -> None:
        self.draining = True
        for stream in self._streams.values():
            stream.outbox.put()  # says so

    async def finish(self, grace_s: float) -> None:
        """A stream ends with the last of its sessions."""
        self._leaving = True
        for stream in list(self._streams.values()):
            self._end_if_left(stream)
        await self._calls.finish(grace_s)

    # Coroutines that write, where the types want generators: see VerificationServicer.
    async def Propose(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ProposeRequest], context: Context
    ) -> None:
        async with self._calls.one(context):
            messages = _readable(request_iterator)
            try:
                async with asyncio.timeout(HELLO_S):
                    first = await anext(messages, pb.ProposeRequest())
            except TimeoutError:
                raise DeadlineExceeded(f"no hello came within {HELLO_S:g} s") from None
            if first.WhichOneof("message") != "hello":
                raise InvalidRequest("hello", first.WhichOneof("message"), "must come first")
            stream = self._admit(facts_from_wire(first.hello))
            verifier = stream.facts.verifier
            try:
                hello = offer_to_wire(self._offer, self._replica)
                await context.write(pb.ProposeResponse(hello=hello))
                log.info("verifier %r: a stream begins", verifier)
                await stream.follow(
                    asyncio.create_task(self._read(messages, stream)),
                    asyncio.create_task(self._write(context, stream)),
                )
            finally:
                stream.end()
                if self._streams.get(verifier) is stream:
                    del self._streams[verifier]
                log.info("verifier %r: its stream is over", verifier)

    async def Projection(  # type: ignore[override]
        self, request: pb.ProjectionRequest, context: Context
    ) -> None:
        async with self._calls.one(context):
            projection, own = self._offer.projection, self._offer.card.feature_id
            if projection is None or request.feature_id != own:
                raise NotFound(
                    f"feature_id: {request.feature_id!r} is not this drafter's, which is {own!r}"
                )
            from dspark.drafter.projection import projection_to_bytes  # torch

            try:
                async with asyncio.timeout(SENDING_S), self._senders:
                    data = await asyncio.to_thread(projection_to_bytes, projection)
                    for start in range(0, len(data), MAX_REPLY_BYTES):
                        part = data[start : start + MAX_REPLY_BYTES]
                        await context.write(pb.ProjectionResponse(part=part))
            except TimeoutError:
                told = f"the projection was not read within {SENDING_S:g} s"
                raise DeadlineExceeded(told) from None

    def _admit(self, facts: VerifierFacts) -> _Stream:
        """Raises ModelError, Fenced, Unavailable and Overloaded."""
        if self.draining:
            raise Unavailable("this drafter is draining")
        check_fit(facts, self._offer.card)
        name = facts.verifier
        newest = self._epochs.get(name, 0)
        if facts.epoch < newest:
            raise Fenced(f"epoch {facts.epoch} of {name!r} is over: it has been here as {newest}")
        older = self._streams.get(name)
        if older is None and len(self._streams) >= self._max_verifiers:
            raise Overloaded(f"{self._max_verifiers} verifiers are connected already", 1.0)
        self._epochs[name] = facts.epoch
        self._epochs.move_to_end(name)
        while len(self._epochs) > REMEMBERED:
            self._epochs.popitem(last=False)
        if older is not None:
            told = f"a newer stream of {name!r} has come, of epoch {facts.epoch}"
            # Of the same life it is a reconnect: whichever of its streams is left may try again.
            same = facts.epoch == older.facts.epoch
            older.end(Unavailable(told) if same else Fenced(told))
        stream = self._streams[name] = _Stream(facts, self._runner, self._max_unread)
        return stream

    async def _read(self, messages: AsyncIterator[pb.ProposeRequest], stream: _Stream) -> None:
        """Raises InvalidRequest for a message that is none."""
        card = self._offer.card
        vocab_size = card.vocab_size or stream.facts.vocab_size
        async for message in messages:
            if message.WhichOneof("message") != "batch":
                raise InvalidRequest("message", message.WhichOneof("message"), "must be a batch")
            read = batch_from_wire(message.batch, card.feature_width, vocab_size)
            for session, round_, error in read.refused:
                self._refuse(stream, session, round_, error)
            self._runner.submit(stream.line, read.contexts, read.requests, read.closed)
            if self._leaving:
                self._end_if_left(stream)

    def _refuse(
        self, stream: _Stream, session: str, round_: int | None, error: InvalidRequest
    ) -> None:
        """Context that makes no sense is left out: the request that builds on it will miss it."""
        refused, why = self._runner.figures.refused, f"malformed: {error.field}"
        refused[why] += 1
        if refused[why] == 1:
            log.warning("verifier %r: a request is not taken: %s", stream.facts.verifier, error)
        if round_ is not None:
            stream.outbox.put([no_draft(session, round_)])

    def _end_if_left(self, stream: _Stream) -> None:
        if not stream.line.sessions:
            stream.end()

    async def _write(self, context: Context, stream: _Stream) -> None:
        while True:
            replies = await stream.outbox.next()
            for response in replies_to_wire(replies, self.draining, MAX_REPLY_BYTES):
                await context.write(response)


async def _readable(
    messages: AsyncIterator[pb.ProposeRequest],
) -> AsyncIterator[pb.ProposeRequest]:
    """Raises InvalidRequest for bytes that are no message."""
    try:
        async for message in messages:
            yield message
    except DecodeError as error:
        raise InvalidRequest("message", str(error), "cannot be read") from None
