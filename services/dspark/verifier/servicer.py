"""A verifier's gRPC server: dspark.v1.Verification on an engine, health and reflection.

One stream carries all runs of a gateway, so its end is their end. Nothing here holds a step up, and
nothing a gateway sends can reach another gateway's runs, but a newer attempt that ends the older.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dspark.client.wire_client import ERROR_METADATA, error_to_wire, status_of
from dspark.core.errors import ConfigError, DsparkError, InvalidRequest, Unavailable
from dspark.v1 import verification_pb2 as pb
from dspark.v1 import verification_pb2_grpc as pb_grpc
from dspark.verifier.card import Described, Replica, VerifierCard
from dspark.verifier.lines import Line
from dspark.verifier.runner import EngineRunner
from dspark.verifier.wire_servicer import (
    check_run,
    described_to_wire,
    name_from_wire,
    request_from_wire,
    responses,
)

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Verification"].full_name

# gRPC's own limit, said aloud: a prompt of a million ids and its parameters fit (`Run.prompt_ids`),
# and so do a step's events (EVENTS_PER_MESSAGE).
MAX_MESSAGE_BYTES = 4 * 2**20
# Seconds that runs get to finish when the server stops.
GRACE_S = 30.0

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port that another server holds is an error
    # A gateway that is gone without a word is noticed within 30 s, and its runs end.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Gateways ping too, also when idle; one that does so more often than this is told to go.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)

Context = grpc.aio.ServicerContext[Any, Any]


class VerificationServicer(pb_grpc.VerificationServicer):
    """A mapping onto an engine's runner."""

    def __init__(
        self, runner: EngineRunner, card: VerifierCard, replica: Replica | None = None
    ) -> None:
        self.draining = False
        self._runner = runner
        self._card = card
        self._replica = replica or Replica()
        self._lines: set[Line] = set()

    def drain(self) -> None:
        """New runs are refused from now on; those that run go on."""
        self.draining = True

    def finish(self) -> None:
        """Every stream ends with the last of its runs; new runs are refused."""
        self.drain()
        for line in self._lines:
            line.finish()

    # A coroutine that writes, where the types want a generator: one that is left at a `yield` when
    # the gateway is lost is closed only when it is collected, and until then its runs go on.
    async def Run(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RunRequest], context: Context
    ) -> None:
        line = self._runner.line()
        self._lines.add(line)
        reader = asyncio.create_task(self._read(request_iterator, line))
        try:
            while (batch := await line.next()) is not None:
                for response in responses(batch):
                    await context.write(response)
            if reader.done():
                reader.result()
        except DsparkError as error:
            metadata = ((ERROR_METADATA, error_to_wire(error).SerializeToString()),)
            await context.abort(status_of(error), str(error), metadata)
        finally:
            reader.cancel()
            self._lines.discard(line)
            line.close()

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        engine = self._runner.engine
        return described_to_wire(
            Described(
                self._replica,
                self._card,
                tuple(drafter.card for drafter in engine.drafters.values()),
                self.draining,
                engine.config.heartbeat_s,
            )
        )

    async def _read(self, messages: AsyncIterator[pb.RunRequest], line: Line) -> None:
        """Do what a gateway asks for, until it says no more. Raises InvalidRequest for a message
        that cannot be read: runs that are open finish first, then the stream ends with it."""
        try:
            first = await anext(messages, pb.RunRequest())
            if first.WhichOneof("message") != "hello":
                raise InvalidRequest("hello", first.WhichOneof("message"), "must come first")
            log.info("gateway %r: a stream begins", first.hello.gateway)
            async for message in messages:
                self._take(line, message)
        finally:
            line.finish()

    def _take(self, line: Line, message: pb.RunRequest) -> None:
        match message.WhichOneof("message"):
            case "run":
                request = request_from_wire(message.run, self._runner.engine.clock())
                try:
                    self._check(message.run)
                except DsparkError as error:
                    line.refuse(request, error)
                else:
                    line.start(request)
            case "cancel":
                line.cancel(name_from_wire(message.cancel.key))
            case "pause":
                line.hold(name_from_wire(message.pause.key), message.pause.paused)
            case other:
                raise InvalidRequest("message", other, "must be one of: run, cancel, pause")

    def _check(self, run: pb.Run) -> None:
        if self.draining:
            raise Unavailable("this verifier is draining")
        if run.epoch not in (0, self._replica.epoch):
            raise Unavailable(f"epoch {run.epoch} is over: this is epoch {self._replica.epoch}")
        check_run(run)


class VerificationServer:
    """A server that listens. address: host:port."""

    def __init__(
        self, server: grpc.aio.Server, servicer: VerificationServicer, host: str, port: int
    ) -> None:
        self.port = port
        self.address = f"{host}:{port}"
        self._server = server
        self._servicer = servicer
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(self) -> None:
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def drain(self) -> None:
        """Take no new runs and say so; those that run go on, and streams stay."""
        self._servicer.drain()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Drain and stop; runs that are left after grace_s lose their stream."""
        await self.drain()
        self._servicer.finish()
        await self._server.stop(grace_s)


@asynccontextmanager
async def serve_verification(
    servicer: VerificationServicer,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    credentials: grpc.ServerCredentials | None = None,
    grace_s: float = GRACE_S,
) -> AsyncIterator[VerificationServer]:
    """Serves inside the context and stops at its end, inside the runner's context. port 0: any free
    one. Raises ConfigError for an address that cannot be had."""
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_VerificationServicer_to_server(servicer, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = f"{host}:{port}"
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"address: {address} cannot be listened on: {error}") from error
    running = VerificationServer(server, servicer, host, port)
    await running.start()
    try:
        yield running
    finally:
        await running.stop(grace_s)
