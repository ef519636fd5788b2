"""A verifier's gRPC service: dspark.v1.Verification on an engine.

One stream carries all runs of a gateway, so its end is their end. Nothing here holds a step up, and
nothing a gateway sends can reach another gateway's runs, but a newer attempt that ends the older.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc

from dspark.core.errors import DsparkError, InvalidRequest, Unavailable
from dspark.core.replicas import Described, Replica, VerifierCard
from dspark.serving import Calls, Context
from dspark.v1 import verification_pb2 as pb
from dspark.v1 import verification_pb2_grpc as pb_grpc
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

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A gateway that is gone without a word is noticed within 30 s, and its runs end.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),  # gateways ping too, also when idle
)


class VerificationServicer(pb_grpc.VerificationServicer):
    """A mapping onto an engine's runner. A `serving.Service`."""

    name = SERVICE
    options = OPTIONS

    def __init__(
        self, runner: EngineRunner, card: VerifierCard, replica: Replica | None = None
    ) -> None:
        self.draining = False
        self._runner = runner
        self._card = card
        self._replica = replica or Replica()
        self._first_epoch = self._replica.epoch
        self._lines: set[Line] = set()
        self._calls = Calls("this verifier")

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_VerificationServicer_to_server(self, server)

    def begin_life(self, epoch: int) -> None:
        """This process has registered (again), as a store that was emptied makes it. Whoever was
        told an earlier epoch of its own still means this engine."""
        self._replica = replace(self._replica, epoch=epoch)
        self._first_epoch = self._first_epoch or epoch

    def refuse_new(self) -> None:
        self.draining = True

    async def finish(self, grace_s: float) -> None:
        """Every stream ends with the last of its runs."""
        for line in self._lines:
            line.finish()
        await self._calls.finish(grace_s)

    # A coroutine that writes, where the types want a generator: one that is left at a `yield` when
    # the gateway is lost is closed only when it is collected, and until then its runs go on.
    async def Run(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RunRequest], context: Context
    ) -> None:
        async with self._calls.one(context):
            line = self._runner.line()
            self._lines.add(line)
            reader = asyncio.create_task(self._read(request_iterator, line))
            try:
                while (batch := await line.next()) is not None:
                    for response in responses(batch):
                        await context.write(response)
                if reader.done():
                    reader.result()
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
        # A later epoch than ours is one that we are just being told.
        if 0 < run.epoch < self._first_epoch:
            raise Unavailable(f"epoch {run.epoch} is over: this is epoch {self._replica.epoch}")
        check_run(run)
