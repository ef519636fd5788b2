"""A whole small cluster in one process: a store, scheduler replicas, verifiers, all over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dspark.core.replicas import Member, Pool, Replica, VerifierCard
from dspark.core.requests import Committed, Finished, Request
from dspark.gateway.dispatch import Dispatch
from dspark.gateway.links import Link
from dspark.gateway.verifier_client import VerificationClient
from dspark.scheduler import StepCost
from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.store import Store
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership
from dspark.scheduling.servicer import SchedulingServicer, WireCodec
from dspark.serving import GrpcServer, serve_grpc
from dspark.verifier.engine import Engine
from dspark.verifier.enrolment import enrol
from dspark.verifier.guidance import Guidance
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer

from ..verifier.toy import ScriptedDrafter, ToyBackend, history_rule, oracle, toy_engine

# Quick, so that a test sees a few hundred plans: all of it works the same at any pace.
QUICK: dict[str, Any] = {
    "heartbeat_s": 0.05,
    "ttl_s": 2.0,
    "lease_ttl_s": 0.5,
    "plan_interval_s": 0.01,
    "plan_ttl_s": 0.5,
    "report_ttl_s": 0.5,
    "lead_ttl_s": 0.5,
    "look_s": 0.02,
}
# What the toys' steps are said to cost: a second token adds a tenth.
COST = StepCost.from_table({1: 0.010, 8: 0.011, 64: 0.020, 256: 0.060})
# Seconds for an answer of a scheduler that does answer, on a machine that is busy.
PATIENT_S = 10.0

V = 50
RULE = history_rule(V)


def an_engine(backend: ToyBackend | None = None, **config: Any) -> Engine:
    """Drafts that are right but for every fourth token, under the scheduler's numbers."""
    return toy_engine(
        backend or ToyBackend(RULE, V),
        ScriptedDrafter(oracle(RULE, wrong_every=4)),
        **{"clock": time.monotonic, "verify": "top-k", **config},
    )


@dataclass
class Served:
    """A scheduler replica and where it is found."""

    scheduler: Scheduler
    server: GrpcServer

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def port(self) -> int:
        return self.server.port

    async def stop(self) -> None:
        """As it does when it is ended, and still in its context."""
        await self.server.refuse_new()
        await self.scheduler.__aexit__()


@asynccontextmanager
async def scheduling(
    store: Store, name: str = "s1", port: int = 0, **config: Any
) -> AsyncIterator[Served]:
    settings = SchedulerConfig(**{**QUICK, **config})
    async with Scheduler(store, WireCodec(), settings, name) as scheduler:
        service = SchedulingServicer(scheduler)
        async with serve_grpc(service, port=port, drain_s=0.0) as server:
            yield Served(scheduler, server)


def card_of(engine: Engine, model: str = "toy") -> VerifierCard:
    config = engine.config
    return VerifierCard(
        model=model,
        target_id=engine.target_id,
        tokenizer_hash="t",
        backend=engine.backend_name,
        limits=engine.limits,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        max_waiting=config.max_waiting,
    )


@dataclass
class Enrolled:
    """A verifier of the cluster. address: of its own gRPC server, "" without."""

    runner: EngineRunner
    membership: Membership
    server: GrpcServer | None = None

    @property
    def engine(self) -> Engine:
        return self.runner.engine

    @property
    def guidance(self) -> Guidance:
        return self.engine.guidance

    @property
    def name(self) -> str:
        return self.membership.replica_id

    async def say(self, request: Request) -> list[int]:
        """Ids of an answer."""
        return await ids_of(self.runner, request)


async def ids_of(target: Any, request: Request) -> list[int]:
    """Ids of an answer that ends well."""
    ids: list[int] = []
    async for event in target.run(request):
        if isinstance(event, Committed):
            ids += event.ids
        elif isinstance(event, Finished) and event.error is not None:
            raise event.error
    return ids


@asynccontextmanager
async def enrolled(
    engine: Engine,
    *addresses: str,
    name: str = "v1",
    cost: StepCost | None = COST,
    client: type[SchedulingClient] = SchedulingClient,
    runner: type[EngineRunner] = EngineRunner,
    call_s: float = PATIENT_S,
    **rest: Any,
) -> AsyncIterator[Enrolled]:
    """A verifier that has registered with the first scheduler to answer."""
    member = Member(Pool.VERIFIER, Replica(name, f"{name}:1"), card_of(engine))
    async with (
        runner(engine) as running,
        client(addresses, call_s=call_s) as scheduler,
        enrol(scheduler, running, member, cost, **rest) as membership,
    ):
        yield Enrolled(running, membership)


@asynccontextmanager
async def verifying(
    engine: Engine,
    *addresses: str,
    name: str = "v1",
    cost: StepCost | None = COST,
    call_s: float = PATIENT_S,
    reached_at: str = "",
    port: int = 0,
) -> AsyncIterator[Enrolled]:
    """The same with its own server. reached_at: where it says that it is, its own address if empty.
    Until it has been let in."""
    async with EngineRunner(engine) as running:
        servicer = VerificationServicer(running, card_of(engine), Replica(name))
        async with (
            serve_grpc(servicer, port=port, drain_s=0.0) as server,
            SchedulingClient(addresses, call_s=call_s) as scheduler,
        ):
            member = Member(
                Pool.VERIFIER, Replica(name, reached_at or server.address), card_of(engine)
            )
            async with enrol(
                scheduler, running, member, cost, on_life=servicer.begin_life
            ) as membership:
                yield Enrolled(running, membership, server)


@dataclass
class Gateway:
    """Dispatch and the membership that keeps its leases."""

    target: Dispatch
    membership: Membership

    async def say(self, request: Request) -> list[int]:
        return await ids_of(self.target, request)


@asynccontextmanager
async def gateway(
    *addresses: str,
    name: str = "g1",
    call_s: float = PATIENT_S,
    lease_s: float = PATIENT_S,
    connect: Callable[[Replica], Link] = lambda replica: VerificationClient(replica.address),
    **rest: Any,
) -> AsyncIterator[Gateway]:
    member = Member(Pool.GATEWAY, Replica(name, "", 0))
    async with SchedulingClient(addresses, call_s=call_s) as scheduler:
        lives: list[Membership] = []
        async with (
            Dispatch(
                scheduler,
                name,
                connect,
                epoch=lambda: lives[0].epoch if lives else 0,
                lease_s=lease_s,
                **rest,
            ) as target,
            Membership(scheduler, member, leases=target.leases) as membership,
        ):
            lives.append(membership)
            yield Gateway(target, membership)


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 30.0) -> None:
    """Wait for something that has to come."""
    async with asyncio.timeout(seconds):
        while True:
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
            await asyncio.sleep(0.002)
