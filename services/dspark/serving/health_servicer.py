"""The standard health service of one server (grpc.health.v1)."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

NAME: str = health.SERVICE_NAME


class Health:
    """Of the server as a whole (the name "") and of its service: what `say` said last, until
    `stop`."""

    def __init__(self, service: str) -> None:
        self._names = ("", service)
        self._servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def say(self, serving: bool) -> None:
        """Who watches is told."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Not serving from now on, for good; who watches is told."""
        await self._servicer.enter_graceful_shutdown()
