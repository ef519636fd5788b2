"""A connection to a drafter on which both hellos are said."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from dspark.client.wire_client import error_from_rpc
from dspark.core.errors import DsparkError, Unavailable
from dspark.drafter.handshake import MAX_MESSAGE_BYTES, VerifierFacts
from dspark.drafter.wire_client import facts_to_wire, offer_from_wire
from dspark.serving import plain_words
from dspark.v1 import drafting_pb2 as pb
from dspark.v1 import drafting_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[pb.ProposeRequest, pb.ProposeResponse]

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Each connection is a new one: a stream reopened on one that swallows everything, or behind
    # gRPC's own backoff, would not be back when the drafter is.
    ("grpc.use_local_subchannel_pool", 1),
    # A drafter's machine that is gone without a word is noticed within 30 s while nothing is asked.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
# What a write raises on a call that has ended. Whoever reads is told why.
OVER = (grpc.aio.AioRpcError, asyncio.InvalidStateError)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a drafter is. server_name: as in its certificate, "" for the address's."""

    address: str
    credentials: grpc.ChannelCredentials | None = None
    server_name: str = ""

    def channel(self) -> grpc.aio.Channel:
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, OPTIONS)
        name = self.server_name
        named = (("grpc.ssl_target_name_override", name),) if name else ()
        return grpc.aio.secure_channel(self.address, self.credentials, (*OPTIONS, *named))


class Connection:
    """replica, offer: what the drafter's hello said."""

    def __init__(
        self,
        endpoint: Endpoint,
        channel: grpc.aio.Channel,
        call: Call,
        hello: pb.DrafterHello,
    ) -> None:
        self.channel = channel
        self.replica, self.offer = offer_from_wire(hello)
        self._endpoint = endpoint
        self._call = call

    async def read(self) -> pb.ProposeResponse:
        """Raises why the stream is over."""
        return await _read(self._call, self._endpoint)

    async def write(self, message: pb.ProposeRequest) -> None:
        """Does nothing on a stream that is over."""
        with suppress(*OVER):
            await self._call.write(message)

    async def close(self) -> None:
        self._call.cancel()
        await self.channel.close(None)


async def connect(endpoint: Endpoint, facts: VerifierFacts, *, hello_s: float) -> Connection:
    """Say hello and hear one within hello_s. Raises what the drafter refuses with, Unavailable if
    there is none, and ModelError for a hello that no drafter can mean."""
    channel = endpoint.channel()
    try:
        stub: pb_grpc.DraftingAsyncStub = pb_grpc.DraftingStub(channel)
        call = stub.Propose(None)
        async with asyncio.timeout(hello_s):
            with suppress(*OVER):
                await call.write(facts_to_wire(facts))
            response = await _read(call, endpoint)
        if response.WhichOneof("message") != "hello":
            raise Unavailable(f"the drafter began with {response.WhichOneof('message')}, no hello")
        return Connection(endpoint, channel, call, response.hello)
    except BaseException as error:
        await channel.close(None)
        if isinstance(error, TimeoutError):
            told = f"the drafter at {endpoint.address} says no hello in {hello_s:g} s"
            raise Unavailable(told) from None
        raise


async def _read(call: Call, endpoint: Endpoint) -> pb.ProposeResponse:
    try:
        response: object = await call.read()
        if isinstance(response, pb.ProposeResponse):
            return response
        if response is None:  # gRPC's word for bytes that are no such message; it has logged why
            raise Unavailable("the drafter's message cannot be read")
        code, details = await call.code(), await call.details()
        metadata = await call.trailing_metadata()
    except grpc.aio.AioRpcError as error:
        raise _told(error, endpoint) from error
    if code is grpc.StatusCode.OK:
        raise Unavailable("the drafter ended the stream")
    ended = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, None)
    raise _told(ended, endpoint)


def _told(error: grpc.aio.AioRpcError, endpoint: Endpoint) -> DsparkError:
    """The drafter's own error, or that it is not there."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
        secured = endpoint.credentials is not None
        why = plain_words(error.details() or "", secured=secured)
        return Unavailable(f"{error.code().name}: {why}")
    return error_from_rpc(error)
