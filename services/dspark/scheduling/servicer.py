"""dspark.v1.Scheduling on a scheduler replica. A `serving.Service`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.errors import ConfigError, InvalidRequest, Unavailable
from dspark.core.plans import Calibration, Plan
from dspark.core.reports import Report
from dspark.core.traces import sampled
from dspark.scheduler.central import Scheduler
from dspark.scheduling.wire_client import (
    calibration_from_wire,
    calibration_to_wire,
    lease_from_wire,
    lease_request_from_wire,
    lease_to_wire,
    load_from_wire,
    member_from_wire,
    member_to_wire,
    plan_from_wire,
    plan_to_wire,
    pool_from_wire,
    report_from_wire,
    report_to_wire,
    step_cost_from_wire,
)
from dspark.scheduling.wire_status_client import status_to_wire
from dspark.serving import Calls, Context
from dspark.serving.calls import traceparent_of
from dspark.telemetry.tracing import Kind, Part, Tracer, part
from dspark.v1 import scheduling_pb2 as pb
from dspark.v1 import scheduling_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Scheduling"].full_name

# A report of 256 tenants, each with all verdict tables, stays below; as does a plan.
MAX_MESSAGE_BYTES = 4 * 2**20

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A verifier that is gone without a word is noticed within 30 s; its heartbeats are what counts.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class WireCodec:
    """Reports, plans and calibrations in the store are the messages of scheduling.proto."""

    def report(self, report: Report) -> bytes:
        return report_to_wire(report).SerializeToString()

    def read_report(self, data: bytes) -> Report:
        return report_from_wire(_parsed(pb.Report(), data))

    def plan(self, plan: Plan) -> bytes:
        return plan_to_wire(plan).SerializeToString()

    def read_plan(self, data: bytes) -> Plan:
        return plan_from_wire(_parsed(pb.Plan(), data))

    def calibration(self, calibration: Calibration) -> bytes:
        return calibration_to_wire(calibration).SerializeToString()

    def read_calibration(self, data: bytes) -> Calibration:
        return calibration_from_wire(_parsed(pb.Calibration(), data))


class SchedulingServicer(pb_grpc.SchedulingServicer):
    """A mapping onto a scheduler replica. tracer: for leases of requests that are traced."""

    name = SERVICE
    options = OPTIONS

    def __init__(self, scheduler: Scheduler, tracer: Tracer | None = None) -> None:
        self._scheduler = scheduler
        self._tracer = tracer
        self._calls = Calls("this scheduler")
        self._stopping = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_SchedulingServicer_to_server(self, server)

    def refuse_new(self) -> None:
        """Its state is the store's: whoever follows this replica may go to another at once."""
        self._stopping.set()

    async def finish(self, grace_s: float) -> None:
        await self._calls.finish(grace_s)

    @asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[None]:
        async with self._calls.one(context):
            try:
                yield
            except ConfigError as error:  # an operator's to repair, and no caller's to wait for
                raise Unavailable(f"this scheduler cannot use its store: {error}") from error

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        async with self._call(context):
            self._check_open()
            cost = step_cost_from_wire(request.step_cost) if request.HasField("step_cost") else None
            told = await self._scheduler.register(member_from_wire(request), cost)
            return pb.RegisterResponse(
                protocol_version=PROTOCOL_VERSION,
                epoch=told.epoch,
                heartbeat_ms=max(round(1000 * told.heartbeat_s), 1),
                ttl_ms=max(round(1000 * told.ttl_s), 1),
                plan_interval_ms=max(round(1000 * told.plan_interval_s), 1),
            )

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        async with self._call(context):
            drain = await self._scheduler.heartbeat(
                request.replica_id,
                request.epoch,
                request.draining,
                tuple(map(lease_from_wire, request.leases)),
                load_from_wire(request.drafter_load) if request.HasField("drafter_load") else None,
            )
            return pb.HeartbeatResponse(drain=drain)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        async with self._call(context):
            await self._scheduler.leave(request.replica_id, request.epoch)
            return pb.LeaveResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        async with self._call(context):
            await self._scheduler.drain(request.replica_id)
            return pb.DrainResponse()

    async def AcquireLease(
        self, request: pb.AcquireLeaseRequest, context: Context
    ) -> pb.AcquireLeaseResponse:
        async with self._call(context):
            self._check_open()
            with self._span(context) as span:
                lease = await self._scheduler.acquire(lease_request_from_wire(request))
                span.attributes["dspark.verifier"] = lease.verifier.replica_id
                if lease.drafter is not None:
                    span.attributes["dspark.drafter"] = lease.drafter.replica_id
            return pb.AcquireLeaseResponse(lease=lease_to_wire(lease))

    def _span(self, context: Context) -> AbstractContextManager[Part]:
        above = sampled(traceparent_of(context)) if self._tracer is not None else None
        return part(self._tracer, above, "dspark.scheduler.lease", "scheduler", Kind.SERVER)

    async def ReleaseLeases(
        self, request: pb.ReleaseLeasesRequest, context: Context
    ) -> pb.ReleaseLeasesResponse:
        async with self._call(context):
            await self._scheduler.release(tuple(request.lease_ids))
            return pb.ReleaseLeasesResponse()

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        async with self._call(context):
            return status_to_wire(self._scheduler.status())

    # Coroutines that write, where the types want generators: one that is left at a `yield` when its
    # caller is lost is closed only when it is collected.
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]
        async with self._call(context):
            self._check_open()
            await self._until_stopped(self._send_members(request, context))

    async def Follow(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.Report], context: Context
    ) -> None:
        async with self._call(context):
            self._check_open()
            first = await anext(aiter(request_iterator), None)
            if first is None:
                return
            self._take(first)
            await self._until_stopped(
                self._send_plans(first.verifier, context),
                self._take_all(request_iterator, first.verifier),
            )

    async def _until_stopped(self, *work: Coroutine[Any, Any, None]) -> None:
        """Do all of it until the first is done. Raises Unavailable when this replica stops: there
        are others."""
        stop = asyncio.create_task(self._stopping.wait())
        tasks = [stop, *map(asyncio.create_task, work)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._check_open()
        for task in done:
            task.result()

    async def _send_members(self, request: pb.WatchRequest, context: Context) -> None:
        pools = tuple(map(pool_from_wire, request.pools))
        async with aclosing(self._scheduler.watch(pools)) as lists:
            async for members in lists:
                await context.write(pb.WatchResponse(members=map(member_to_wire, members)))

    async def _send_plans(self, verifier: str, context: Context) -> None:
        async with aclosing(self._scheduler.follow(verifier)) as plans:
            async for plan in plans:
                await context.write(plan_to_wire(plan))

    async def _take_all(self, reports: AsyncIterator[pb.Report], verifier: str) -> None:
        async for report in reports:
            if report.verifier != verifier:
                raise InvalidRequest("verifier", report.verifier, f"must stay {verifier!r}")
            self._take(report)

    def _take(self, wire: pb.Report) -> None:
        """A bad report costs its own interval, not the stream: the next may be right."""
        try:
            self._scheduler.take(report_from_wire(wire))
        except InvalidRequest as error:
            self._scheduler.refuse(wire.verifier, error)

    def _check_open(self) -> None:
        if self._stopping.is_set():
            raise Unavailable("this scheduler is stopping")


M = TypeVar("M", bound=Message)


def _parsed(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        kind = type(message).__name__
        raise InvalidRequest(kind, f"{len(data)} bytes", f"is no {kind}: {error}") from None
    return message
