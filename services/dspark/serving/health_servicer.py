"""The standard health service of one server (grpc.health.v1)."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

NAME: str = health.SERVICE_NAME


class Health:
    """Serving from the first moment, of the server as a whole and of its service, until `stop`."""

    def __init__(self) -> None:
        self._servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def add_to(self, server: grpc.aio.Server, service: str) -> None:
        await self._servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def stop(self) -> None:
        """Not serving from now on, for good; who watches is told."""
        await self._servicer.enter_graceful_shutdown()
