"""The gRPC front: dspark.v1.Generation on a gateway, with health, reflection, TLS and a drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dspark.client.wire_client import ERROR_METADATA, error_to_wire, status_of
from dspark.core.errors import Cancelled, ConfigError, DsparkError, NotFound, Unavailable
from dspark.gateway.gateway import Gateway
from dspark.gateway.keys import KeyRing, Tenant
from dspark.gateway.wire_servicer import (
    call_from_wire,
    model_to_wire,
    prompt_from_wire,
    responses,
)
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

SERVICE = "dspark.v1.Generation"

# A prompt of a million ids, which take up to 4 bytes each, and as much again for resumed choices.
MAX_MESSAGE_BYTES = 8 * 2**20
# Seconds that one message may wait for a client that does not read.
STALLED_S = 60.0
# Seconds that running calls get to finish when the server stops.
DRAIN_S = 30.0
# Seconds after the drain for the last statuses to leave.
FAREWELL_S = 2.0

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(pb_grpc.GenerationServicer):
    """A mapping onto a gateway, for those that `keys` knows. stalled_s: see STALLED_S."""

    def __init__(self, gateway: Gateway, keys: KeyRing, stalled_s: float = STALLED_S) -> None:
        self._gateway = gateway
        self._keys = keys
        self._stalled_s = stalled_s
        self._running: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    # A coroutine that writes, where the types want a generator: one that is left at a `yield` when
    # the client hangs up is closed only when it is collected, and until then its request runs.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        async with self._call(context) as tenant:
            with tenant.admit():
                self._check_model(request.model)
                call = call_from_wire(
                    request,
                    tenant,
                    now=self._gateway.clock(),
                    time_left_s=context.time_remaining(),
                    traceparent=_metadata(context, "traceparent") or "",
                )
                async with aclosing(self._gateway.generate(call)) as outputs:
                    async for response in responses(
                        outputs,
                        model=self._gateway.model.name,
                        with_prompt_ids=request.return_prompt_ids,
                        spend=tenant.spend,
                    ):
                        await self._write(context, response)

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Context
    ) -> pb.CountTokensResponse:
        async with self._call(context) as tenant:
            with tenant.admit():
                self._check_model(request.model)
                ids = prompt_from_wire(request.prompt).encode(self._gateway.tokenizer)
                return pb.CountTokensResponse(prompt_tokens=len(ids))

    async def ModelInfo(
        self, request: pb.ModelInfoRequest, context: Context
    ) -> pb.ModelInfoResponse:
        async with self._call(context):
            self._check_model(request.model)
            return model_to_wire(self._gateway)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, wait for running ones, and end those that are left with UNAVAILABLE:
        their clients may resume elsewhere."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for end in self._running:
                if not end.expired():
                    end.reschedule(asyncio.get_running_loop().time())
            await self._idle.wait()

    @asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[Tenant]:
        """One call, from who it is to how it ends: an error as its status, a hang-up as it is."""
        end = asyncio.timeout(None)
        try:
            async with end:
                self._running.add(end)
                self._idle.clear()
                try:
                    if self._draining:
                        raise Unavailable("this gateway is stopping")
                    yield self._keys.authenticate(_metadata(context, "authorization"))
                finally:
                    self._running.discard(end)
                    if not self._running:
                        self._idle.set()
        except Exception as error:
            told = Unavailable("this gateway has stopped") if end.expired() else error
            await _refuse(context, told)

    async def _write(self, context: Context, response: pb.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._stalled_s):
                await context.write(response)
        except TimeoutError:
            raise Cancelled(f"the client has read nothing for {self._stalled_s:g} s") from None

    def _check_model(self, name: str) -> None:
        served = self._gateway.model.name
        if name not in ("", served):
            raise NotFound(f"model: {name[:80]!r} is not served here; {served!r} is")


async def _refuse(context: Context, error: Exception) -> None:
    gone = grpc.aio.InternalError  # what gRPC raises when there is nobody to write to any more
    if not isinstance(error, DsparkError | gone):
        log.error("a call failed", exc_info=error)
    wire = error_to_wire(error)
    metadata = ((ERROR_METADATA, wire.SerializeToString()),)
    try:
        await context.abort(status_of(error), wire.message, metadata)
    except gone:
        raise asyncio.CancelledError from None


def _metadata(context: Context, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else None
    return None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. client_ca: if set, clients must show a certificate that it signed (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        try:
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            ca = None if self.client_ca is None else self.client_ca.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls: {error.filename}: {error.strerror}") from error
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 1024),  # of one connection
    ("grpc.so_reuseport", 0),  # a port that another server holds is an error
    # A client that is gone without a word is noticed within 80 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # One that pings more often than this is told to go (GOAWAY, too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_connection_idle_ms", 15 * 60_000),
)


class GenerationServer:
    """A running server. address: host:port that it listens on."""

    def __init__(
        self,
        server: grpc.aio.Server,
        servicer: GenerationServicer,
        health_servicer: Any,
        host: str,
        port: int,
    ) -> None:
        self.port = port
        self.address = f"{host}:{port}"
        self._server = server
        self._servicer = servicer
        self._health = health_servicer

    async def drain(self, grace_s: float) -> None:
        """Stop for good: nothing new is accepted, what runs has grace_s to finish, and what is left
        ends with UNAVAILABLE. A second call waits for the same end."""
        await self._health.enter_graceful_shutdown()
        stopped = asyncio.create_task(self._server.stop(grace_s + FAREWELL_S))
        await self._servicer.drain(grace_s)
        await stopped


@asynccontextmanager
async def serve_generation(
    gateway: Gateway,
    keys: KeyRing,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: TlsFiles | None = None,
    drain_s: float = DRAIN_S,
) -> AsyncIterator[GenerationServer]:
    """Serves inside the context and drains at its end. port 0: any free one.

    Raises `ConfigError` for an address that cannot be had and for TLS files that cannot be read.
    """
    credentials = None if tls is None else tls.credentials()
    name = f"[{host}]" if ":" in host else host  # IPv6
    server = grpc.aio.server(options=OPTIONS)
    servicer = GenerationServicer(gateway, keys)
    pb_grpc.add_GenerationServicer_to_server(servicer, server)
    health_servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
    await health_servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = f"{name}:{port}"
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        await server.start()
    except RuntimeError as error:
        await server.stop(None)
        raise ConfigError(f"address: {address} cannot be listened on: {error}") from error
    running = GenerationServer(server, servicer, health_servicer, name, port)
    try:
        yield running
    finally:
        await running.drain(drain_s)
