"""What gateways, verifiers and drafters say to the scheduler, over any of its replicas."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

import grpc

from dspark.client.wire_client import ERROR_METADATA, error_from_rpc
from dspark.core.errors import DsparkError, InvalidRequest, Unavailable
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import Plan
from dspark.core.replicas import DrafterLoad, Member, Pool
from dspark.core.reports import Report
from dspark.core.status import ClusterStatus
from dspark.scheduler import StepCost
from dspark.scheduler.central import Registration
from dspark.scheduling.wire_client import (
    lease_from_wire,
    lease_request_to_wire,
    lease_to_wire,
    load_to_wire,
    member_from_wire,
    plan_from_wire,
    pool_to_wire,
    register_to_wire,
    report_to_wire,
)
from dspark.scheduling.wire_status_client import status_from_wire
from dspark.serving import named, plain_words
from dspark.v1 import scheduling_pb2 as pb
from dspark.v1 import scheduling_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

# Seconds for an answer to a call that nobody's request waits for.
CALL_S = 1.0
# Seconds that a request waits for its lease; then its gateway chooses by itself (design.md §5).
LEASE_S = 0.05

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class SchedulingClient:
    """`async with SchedulingClient(["host:port", …]) as scheduler: ...`

    addresses: of replicas, all alike: one of them by chance, and from a call that it cannot answer
    on the next one. server_name: that their certificates carry in place of their hosts. call_s:
    seconds for an answer. Every method may raise Unavailable, which its
    caller lives with.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        call_s: float = CALL_S,
    ) -> None:
        if not addresses:
            raise ValueError("a scheduler needs at least one address")
        self._addresses = tuple(addresses)
        self._credentials = credentials
        self._options = (*OPTIONS, *named(server_name))
        self._call_s = call_s
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[pb_grpc.SchedulingAsyncStub] = []
        self._at = random.randrange(len(self._addresses))

    async def __aenter__(self) -> SchedulingClient:
        for address in self._addresses:
            channel = (
                grpc.aio.insecure_channel(address, self._options)
                if self._credentials is None
                else grpc.aio.secure_channel(address, self._credentials, self._options)
            )
            self._channels.append(channel)
            self._stubs.append(pb_grpc.SchedulingStub(channel))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    async def register(self, member: Member, step_cost: StepCost | None) -> Registration:
        """Raises ModelError for a card that does not fit the cluster, InvalidRequest."""
        told = await self._call("Register", register_to_wire(member, step_cost))
        return Registration(
            told.epoch,
            told.heartbeat_ms / 1000,
            told.ttl_ms / 1000,
            told.plan_interval_ms / 1000,
        )

    async def heartbeat(
        self,
        replica_id: str,
        epoch: int,
        *,
        draining: bool = False,
        leases: Sequence[Lease] = (),
        load: DrafterLoad | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Whether it is wanted to drain. Raises NotFound (register again), Fenced (stop).
        timeout_s: for an answer, where that is less than usual."""
        request = pb.HeartbeatRequest(
            replica_id=replica_id,
            epoch=epoch,
            draining=draining,
            leases=map(lease_to_wire, leases),
            drafter_load=None if load is None else load_to_wire(load),
        )
        wait_s = self._call_s if timeout_s is None else min(timeout_s, self._call_s)
        return bool((await self._call("Heartbeat", request, wait_s)).drain)

    async def leave(self, replica_id: str, epoch: int) -> None:
        await self._call("Leave", pb.LeaveRequest(replica_id=replica_id, epoch=epoch))

    async def drain(self, replica_id: str) -> None:
        """Want a replica to drain. Raises NotFound: nobody of this name is alive."""
        await self._call("Drain", pb.DrainRequest(replica_id=replica_id))

    async def acquire(
        self, request: LeaseRequest, timeout_s: float = LEASE_S, traceparent: str = ""
    ) -> Lease:
        """Raises Overloaded, DeadlineExceeded, NotFound, InvalidRequest. traceparent: W3C trace
        context that the scheduler's span continues."""
        told = await self._call(
            "AcquireLease",
            lease_request_to_wire(request),
            timeout_s,
            (("traceparent", traceparent),) if traceparent else None,
        )
        return lease_from_wire(told.lease)

    async def release(self, lease_ids: Collection[str]) -> None:
        await self._call("ReleaseLeases", pb.ReleaseLeasesRequest(lease_ids=lease_ids))

    async def status(self, timeout_s: float | None = None) -> ClusterStatus:
        """The cluster as one scheduler replica sees it. Raises Unavailable."""
        return status_from_wire(await self._call("Status", pb.StatusRequest(), timeout_s))

    async def watch(self, pools: Collection[Pool] = ()) -> AsyncGenerator[tuple[Member, ...], None]:
        """Members now, and after each change."""
        call = self._stub.Watch(pb.WatchRequest(pools=map(pool_to_wire, pools)))
        async with aclosing(self._heard(call)) as responses:
            async for response in responses:
                yield tuple(map(member_from_wire, response.members))

    async def follow(self, reports: AsyncIterator[Report]) -> AsyncGenerator[Plan, None]:
        """Send reports as they come, and give plans as they come. The first report opens it."""
        call = self._stub.Follow(report_to_wire(report) async for report in reports)
        async with aclosing(self._heard(call)) as plans:
            async for plan in plans:
                yield plan_from_wire(plan)

    async def _heard(self, call: Any) -> AsyncGenerator[Any, None]:
        """What a stream brings. It never ends well, and is over when nobody listens any more."""
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._told(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC's word for a stream whose sending half has failed.
            raise Unavailable("what is sent to the scheduler has ended") from None
        finally:
            call.cancel()
        raise Unavailable("the scheduler ended the stream")

    def turn_away(self) -> None:
        """The next call goes to the next replica."""
        self._at = (self._at + 1) % len(self._stubs)

    @property
    def _stub(self) -> pb_grpc.SchedulingAsyncStub:
        return self._stubs[self._at]

    async def _call(
        self,
        method: str,
        request: Any,
        timeout_s: float | None = None,
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> Any:
        try:
            return await getattr(self._stub, method)(
                request, timeout=timeout_s or self._call_s, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._told(error) from error

    def _told(self, error: grpc.aio.AioRpcError) -> DsparkError:
        """What an error says; after one of the replica's own the next call goes to the next."""
        told = error_from_rpc(error)
        if not _said_by_server(error) and not isinstance(told, InvalidRequest):
            why = plain_words(error.details() or "", secured=self._credentials is not None)
            told = Unavailable(f"{error.code().name}: {why}")  # gRPC's own word
        if isinstance(told, Unavailable):
            self.turn_away()
        return told


def _said_by_server(error: grpc.aio.AioRpcError) -> bool:
    metadata: Any = error.trailing_metadata() or ()
    return any(name == ERROR_METADATA for name, _ in metadata)
