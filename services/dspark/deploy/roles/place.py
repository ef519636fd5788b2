"""Where a replica listens, what it is called and whom it asks: what all roles begin with."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc

from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.pools import PoolSection
from dspark.deploy.single import Progress
from dspark.scheduling.client import SchedulingClient
from dspark.serving import (
    GrpcServer,
    Service,
    TlsFiles,
    address_of,
    on_first_free,
    serve_grpc,
)
from dspark.telemetry.process import Telemetry, telemetry

log = logging.getLogger(__name__)

# Hosts that mean all of a machine's addresses.
ALL = ("0.0.0.0", "::")

Server = TypeVar("Server")


@dataclass(frozen=True, slots=True)
class Place:
    """name: the replica's id, which no earlier process had. schedulers: host:port of each.
    environment: of the process. advertise: this machine's address, for where the configuration
    means all of them; "" for what is found out. port_wait_s: seconds in which a port of the pool
    may become free."""

    config: ClusterConfig
    pool: str
    name: str
    schedulers: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    advertise: str = ""
    port_wait_s: float = 0.0
    progress: Progress = field(default_factory=Progress)

    @property
    def section(self) -> PoolSection:
        """Of the configuration, of its pool."""
        return self.config.pool(self.pool)

    @property
    def host(self) -> str:
        """That others are told: what the file says, else where it listens."""
        section = self.section
        if section.advertise:
            return section.advertise
        return (self.advertise or own_address()) if section.host in ALL else section.host

    def reached(self, port: int) -> str:
        return address_of(self.host, port)

    @property
    def tls(self) -> TlsFiles | None:
        """Of servers that other services call."""
        return None if self.config.tls is None else self.config.tls.files().server

    @property
    def server_name(self) -> str:
        return "" if self.config.tls is None else self.config.tls.files().server_name

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Of clients of other services."""
        return None if self.config.tls is None else self.config.tls.files().credentials()

    def asks(self) -> SchedulingClient:
        return SchedulingClient(
            self.schedulers, credentials=self.credentials(), server_name=self.server_name
        )

    def tells(self) -> AbstractAsyncContextManager[Telemetry]:
        """Its traces and metrics."""
        return telemetry(
            self.config.telemetry,
            pool=self.pool,
            replica=self.name,
            cluster=self.config.name,
            environment=self.environment,
        )

    async def serve(self, stack: AsyncExitStack, service: Service) -> GrpcServer:
        """A server for other services on the pool's port. Raises ConfigError."""
        one = partial(
            serve_grpc, service, self.section.host, tls=self.tls, drain_s=self.config.drain_s
        )
        return await self.listen(stack, "port", one)

    async def listen(
        self,
        stack: AsyncExitStack,
        field: str,
        serve: Callable[[int], AbstractAsyncContextManager[Server]],
    ) -> Server:
        """field: of the pool, that says which ports. Raises ConfigError."""
        ports: Sequence[int] = self.section.fixed_ports().get(field, [0])
        return await on_first_free(
            stack, f"{self.pool}.{field}", ports, serve, wait_s=self.port_wait_s
        )


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Work that goes on while the context is open, and is cancelled at its end."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_bug)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _log_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("what a replica does beside its calls has failed", exc_info=error)


def replica_id(pool: str) -> str:
    """That no other process has, nor one before: <pool>-<host>-<6 hex digits>."""
    return f"{pool}-{socket.gethostname().split('.')[0][:40]}-{secrets.token_hex(3)}"


def own_address() -> str:
    """Of this machine, by which the others of its network reach it; loopback if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: only a route is looked up
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
