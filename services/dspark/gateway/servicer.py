"""The gRPC front: dspark.v1.Generation on a gateway."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc

from dspark.core.errors import NotFound, Unavailable
from dspark.gateway.gateway import Gateway
from dspark.gateway.keys import KeyRing, Tenant
from dspark.gateway.wire_servicer import (
    call_from_wire,
    model_to_wire,
    prompt_from_wire,
    responses,
)
from dspark.serving import Calls, Context
from dspark.serving.calls import metadata, traceparent_of
from dspark.telemetry.logs import about
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name

# A prompt of a million ids, which take up to 4 bytes each, and as much again for resumed choices.
MAX_MESSAGE_BYTES = 8 * 2**20

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 1024),  # of one connection
    # A client that is gone without a word is noticed within 80 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 15 * 60_000),
)

# How a call ends whose client hung up, for the figures.
CLIENT_GONE = grpc.StatusCode.CANCELLED.name


class GenerationServicer(pb_grpc.GenerationServicer):
    """A mapping onto a gateway, for those that `keys` knows. A `serving.Service`. check: raises
    Unavailable while no call is let in."""

    name = SERVICE
    options = OPTIONS

    def __init__(
        self, gateway: Gateway, keys: KeyRing, check: Callable[[], None] = lambda: None
    ) -> None:
        self._gateway = gateway
        self._keys = keys
        self._check = check
        self._calls = Calls("this gateway")
        self._draining = False

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_GenerationServicer_to_server(self, server)

    def refuse_new(self) -> None:
        self._draining = True

    async def finish(self, grace_s: float) -> None:
        await self._calls.finish(grace_s)

    # A coroutine that writes, where the types want a generator: one that is left at a `yield` when
    # the client hangs up is closed only when it is collected, and until then its request runs.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        gateway, name = self._gateway, request.request_id or secrets.token_hex(12)
        with about(name):
            async with self._call("Generate", context) as tenant:
                with tenant.admit():
                    self._check_model(request.model)
                    call = call_from_wire(
                        request,
                        tenant,
                        name,
                        now=gateway.clock(),
                        time_left_s=context.time_remaining(),
                        traceparent=traceparent_of(context),
                    )
                    async with aclosing(gateway.generate(call)) as outputs:
                        async for response in responses(
                            outputs,
                            model=gateway.model.name,
                            with_prompt_ids=request.return_prompt_ids,
                            spend=tenant.spend,
                        ):
                            await gateway.hand(context.write(response))

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Context
    ) -> pb.CountTokensResponse:
        async with self._call("CountTokens", context) as tenant:
            with tenant.admit():
                self._check_model(request.model)
                ids = await self._gateway.encode(prompt_from_wire(request.prompt))
                return pb.CountTokensResponse(prompt_tokens=len(ids))

    async def ModelInfo(
        self, request: pb.ModelInfoRequest, context: Context
    ) -> pb.ModelInfoResponse:
        async with self._call("ModelInfo", context):
            self._check_model(request.model)
            return model_to_wire(self._gateway)

    @asynccontextmanager
    async def _call(self, method: str, context: Context) -> AsyncIterator[Tenant]:
        """One call, counted by how it ends."""
        with self._gateway.metrics.request("grpc", f"/{SERVICE}/{method}", CLIENT_GONE) as counted:
            try:
                async with self._calls.one(context):
                    if self._draining:
                        raise Unavailable("this gateway is stopping")
                    self._check()
                    yield self._keys.authenticate(metadata(context, "authorization"))
                    counted.status = grpc.StatusCode.OK.name
            except grpc.aio.AbortError:
                counted.status = context.code().name
                raise

    def _check_model(self, name: str) -> None:
        served = self._gateway.model.name
        if name not in ("", served):
            raise NotFound(f"model: {name[:80]!r} is not served here; {served!r} is")
