"""A gRPC server around one service: health, reflection, TLS, bounds, and a drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import grpc
from grpc_reflection.v1alpha import reflection

from dspark.core.errors import ConfigError
from dspark.serving import health_servicer
from dspark.serving.addresses import address_of
from dspark.serving.health_servicer import Health
from dspark.serving.tls import TlsFiles

# Seconds that what runs gets to finish when a server stops.
DRAIN_S = 30.0
# Seconds after the drain for the last statuses to leave.
FAREWELL_S = 2.0
# Milliseconds between pings of a peer; one that pings more often, also while idle, is told to go
# (GOAWAY, too_many_pings).
MIN_PING_INTERVAL_MS = 10_000

Options = Sequence[tuple[str, int]]

OPTIONS: Options = (
    ("grpc.so_reuseport", 0),  # a port that another server holds is an error
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.http2.max_ping_strikes", 2),
)


class Service(Protocol):
    """What stands in a server: a servicer that knows how to end."""

    @property
    def name(self) -> str:
        """Of its .proto, in full."""
        ...

    @property
    def options(self) -> Options:
        """gRPC's, beside OPTIONS: sizes of messages, keepalive."""
        ...

    def add_to(self, server: grpc.aio.Server) -> None: ...

    def refuse_new(self) -> None:
        """New work is refused from now on; what runs goes on."""
        ...

    async def finish(self, grace_s: float) -> None:
        """Wait for what runs, and end with a status what is left after grace_s."""
        ...


class GrpcServer:
    """A running server. address: host:port that it listens on."""

    def __init__(
        self, server: grpc.aio.Server, service: Service, health: Health, host: str, port: int
    ) -> None:
        self.port = port
        self.address = address_of(host, port)
        self._server = server
        self._service = service
        self._health = health

    async def say_ready(self) -> None:
        """For one that was opened before it could serve: it can now."""
        await self._health.say(True)

    async def refuse_new(self) -> None:
        """Say that nothing new is taken, and take nothing; what runs goes on, connections stay."""
        await self._health.stop()
        self._service.refuse_new()

    async def drain(self, grace_s: float) -> None:
        """Stop for good: nothing new is accepted, what runs has grace_s to finish, and what is left
        ends with a status. A second call with less time hurries the first."""
        await self.refuse_new()
        stopped = asyncio.create_task(self._server.stop(grace_s + FAREWELL_S))
        await self._service.finish(grace_s)
        await stopped


@asynccontextmanager
async def serve_grpc(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: TlsFiles | None = None,
    drain_s: float = DRAIN_S,
    ready: bool = True,
) -> AsyncIterator[GrpcServer]:
    """Serves inside the context and drains at its end. port 0: any free one. ready: what its health
    says at first; with False it waits for `say_ready`.

    Raises ConfigError for an address that cannot be had and for TLS files that cannot be used.
    """
    credentials = None if tls is None else tls.credentials()
    server = grpc.aio.server(options=(*OPTIONS, *service.options))
    service.add_to(server)
    health = Health(service.name)
    health.add_to(server)
    await health.say(ready)
    names = (service.name, health_servicer.NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = address_of(host, port)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        await server.start()
    except RuntimeError as error:
        await server.stop(None)
        raise ConfigError(f"address: {address} cannot be listened on: {error}") from error
    running = GrpcServer(server, service, health, host, port)
    try:
        yield running
    finally:
        await running.drain(drain_s)
