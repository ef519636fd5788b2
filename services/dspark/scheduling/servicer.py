"""dspark.v1.Scheduling on a scheduler replica. A `serving.Service`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.errors import InvalidRequest, Unavailable
from dspark.core.plans import Calibration, Plan
from dspark.core.reports import Report
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
from dspark.serving import Calls, Context
from dspark.v1 import scheduling_pb2 as pb
from dspark.v1 import scheduling_pb2_grpc as pb_grpc

T = TypeVar("T")

log = logging.getLogger(__name__)

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
    """A mapping onto a scheduler replica."""

    name = SERVICE
    options = OPTIONS

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._calls = Calls("this scheduler")
        self._stopping = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_SchedulingServicer_to_server(self, server)

    def refuse_new(self) -> None:
        """Its state is the store's: whoever follows this replica may go to another at once."""
        self._stopping.set()

    async def finish(self, grace_s: float) -> None:
        await self._calls.finish(grace_s)

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        async with self._calls.one(context):
            self._check_open()
            cost = step_cost_from_wire(request.step_cost) if request.HasField("step_cost") else None
            told = await self._scheduler.register(member_from_wire(request), cost)
            return pb.RegisterResponse(
                protocol_version=PROTOCOL_VERSION,
                epoch=told.epoch,
                heartbeat_ms=round(1000 * told.heartbeat_s),
                ttl_ms=round(1000 * told.ttl_s),
                plan_interval_ms=max(round(1000 * told.plan_interval_s), 1),
            )

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        async with self._calls.one(context):
            drain = await self._scheduler.heartbeat(
                request.replica_id,
                request.epoch,
                request.draining,
                tuple(map(lease_from_wire, request.leases)),
                load_from_wire(request.drafter_load) if request.HasField("drafter_load") else None,
            )
            return pb.HeartbeatResponse(drain=drain)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        async with self._calls.one(context):
            await self._scheduler.leave(request.replica_id, request.epoch)
            return pb.LeaveResponse()

    async def AcquireLease(
        self, request: pb.AcquireLeaseRequest, context: Context
    ) -> pb.AcquireLeaseResponse:
        async with self._calls.one(context):
            self._check_open()
            lease = await self._scheduler.acquire(lease_request_from_wire(request))
            return pb.AcquireLeaseResponse(lease=lease_to_wire(lease))

    async def ReleaseLeases(
        self, request: pb.ReleaseLeasesRequest, context: Context
    ) -> pb.ReleaseLeasesResponse:
        async with self._calls.one(context):
            await self._scheduler.release(tuple(request.lease_ids))
            return pb.ReleaseLeasesResponse()

    # Coroutines that write, where the types want generators: one that is left at a `yield` when its
    # caller is lost is closed only when it is collected.
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]
        async with self._calls.one(context):
            self._check_open()
            pools = tuple(map(pool_from_wire, request.pools))
            async for members in _until(self._stopping, self._scheduler.watch(pools)):
                await context.write(pb.WatchResponse(members=map(member_to_wire, members)))

    async def Follow(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.Report], context: Context
    ) -> None:
        async with self._calls.one(context):
            self._check_open()
            first = await anext(aiter(request_iterator), None)
            if first is None:
                return
            told: set[str] = set()
            self._take(first, told)
            plans = asyncio.create_task(self._send_plans(first.verifier, context))
            reports = asyncio.create_task(self._take_all(request_iterator, first.verifier, told))
            try:
                done, _ = await asyncio.wait((plans, reports), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (plans, reports):
                    task.cancel()
                await asyncio.wait((plans, reports))

    async def _send_plans(self, verifier: str, context: Context) -> None:
        async for plan in _until(self._stopping, self._scheduler.follow(verifier)):
            await context.write(plan_to_wire(plan))

    async def _take_all(
        self, reports: AsyncIterator[pb.Report], verifier: str, told: set[str]
    ) -> None:
        async for report in reports:
            if report.verifier != verifier:
                raise InvalidRequest("verifier", report.verifier, f"must stay {verifier!r}")
            self._take(report, told)

    def _take(self, wire: pb.Report, told: set[str]) -> None:
        """A bad report costs its own interval, not the stream: the next may be right. told: fields
        that the log has heard of."""
        try:
            self._scheduler.take(report_from_wire(wire))
        except InvalidRequest as error:
            if error.field not in told:
                told.add(error.field)
                log.warning("reports of verifier %s are refused: %s", wire.verifier[:80], error)

    def _check_open(self) -> None:
        if self._stopping.is_set():
            raise Unavailable("this scheduler is stopping")


async def _until(stop: asyncio.Event, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Items until something says stop; then Unavailable, for there is more elsewhere."""
    stopped = asyncio.create_task(stop.wait())
    try:
        while True:
            item = asyncio.ensure_future(anext(items))
            await asyncio.wait((item, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not item.done():
                item.cancel()
                await asyncio.wait((item,))
                raise Unavailable("this scheduler is stopping")
            yield item.result()
    finally:
        stopped.cancel()


M = TypeVar("M", bound=Message)


def _parsed(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        kind = type(message).__name__
        raise InvalidRequest(kind, f"{len(data)} bytes", f"is no {kind}: {error}") from None
    return message
