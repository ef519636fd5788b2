"""A gateway replica: it speaks with clients, and runs their requests on the verifiers of the
cluster. It needs a tokenizer and no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from dspark.core.replicas import Member, Pool, Replica
from dspark.core.requests import Limits
from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.roles.place import Place, beside
from dspark.deploy.roles.running import Load, RunningRole
from dspark.gateway.dispatch import Dispatch
from dspark.gateway.gateway import Gateway, ServedModel
from dspark.gateway.keys import KeyRing
from dspark.gateway.metrics import Metrics
from dspark.gateway.openai.app import make_app
from dspark.gateway.openai.door import Door, DoorState
from dspark.gateway.openai.server import serve_http
from dspark.gateway.served import Served
from dspark.gateway.servicer import GenerationServicer
from dspark.gateway.tokenizer import Tokenizer
from dspark.gateway.verifier_client import VerificationClient
from dspark.models import resolve
from dspark.models.drafters import NgramDrafter
from dspark.scheduling.membership import Membership
from dspark.serving import GrpcServer, serve_grpc

# Choices in flight that count as a full gateway.
FULL_CHOICES = 512


@asynccontextmanager
async def gateway_role(place: Place) -> AsyncIterator[RunningRole]:
    """Its ports are open at once and say that it is not ready; with the first verifier it lets
    calls in. Raises ConfigError, ModelError."""
    config, pool = place.config, place.config.gateway
    keys = KeyRing() if pool.keys is None else KeyRing.load(pool.keys)
    tls = None if pool.tls is None else pool.tls.files()
    tokenizer = await asyncio.to_thread(_tokenizer, place)
    bounds, door, known = config.http_bounds(), Door(), asyncio.Event()
    members: list[Membership] = []

    def take(model: ServedModel) -> None:
        gateway.model = model
        known.set()

    served = Served(_model(config), tokenizer.tokenizer_hash, take)
    connect = partial(
        VerificationClient,
        credentials=place.credentials(),
        server_name=place.server_name,
        expect=served.expect,
        gateway=place.name,
    )
    async with AsyncExitStack() as stack:
        told = await stack.enter_async_context(place.tells())
        scheduler = await stack.enter_async_context(place.asks())
        target = await stack.enter_async_context(
            Dispatch(
                scheduler,
                place.name,
                lambda replica: connect(replica.address),
                epoch=lambda: members[0].epoch if members else 0,
                tracer=told.tracer,
            )
        )
        told.watch_dispatch(target)
        gateway = Gateway(
            target,
            tokenizer,
            _model(config),
            metrics=Metrics(registry=told.registry),
            tracer=told.tracer,
            stall_timeout_s=config.engine.stall_timeout_s,
        )
        service = GenerationServicer(gateway, keys, door.check)
        over_grpc = partial(
            serve_grpc, service, pool.host, tls=tls, drain_s=config.drain_s, ready=False
        )
        grpc = await place.listen(stack, "grpc_port", over_grpc)
        app = make_app(gateway, keys, door, bounds)
        over_http = partial(serve_http, app, door, pool.host, tls=tls, config=bounds)
        http = await place.listen(stack, "http_port", over_http)
        address = place.reached(grpc.port)
        running = RunningRole(
            place.pool,
            place.name,
            address,
            (http, grpc),
            url=f"{'http' if tls is None else 'https'}://{place.reached(http.port)}",
            metrics_address=told.metrics_address,
            waits_for=lambda: served.waits_for,
            told=lambda: Load(target.running / FULL_CHOICES, {"choices": float(target.running)}),
        )
        running.membership = await stack.enter_async_context(
            Membership(
                scheduler,
                Member(Pool.GATEWAY, Replica(place.name, address)),
                leases=target.leases,
                on_drain=running.drain_wanted.set,
                on_fenced=running.fenced.set,
            )
        )
        members.append(running.membership)
        told.watch_outage("scheduler", running.membership.outage)
        await stack.enter_async_context(beside(served.follow(scheduler)))
        await stack.enter_async_context(beside(_open(known, door, grpc)))
        yield running


async def _open(known: asyncio.Event, door: Door, grpc: GrpcServer) -> None:
    """Let calls in once it is known what is served."""
    await known.wait()
    if door.state is DoorState.STARTING:
        door.open()
        await grpc.say_ready()


def _tokenizer(place: Place) -> Tokenizer:
    return Tokenizer.load(resolve(place.config.model, progress=place.progress.line))


def _model(config: ClusterConfig) -> ServedModel:
    """As it is known before there is a verifier."""
    engine = config.engine
    local = config.verifier.fallback == "ngram" and engine.gamma
    return ServedModel(
        name=config.model_name,
        target_id="",
        limits=Limits(0, 0, 0),
        drafters=(NgramDrafter(engine.gamma).card,) if local else (),
        gamma=engine.gamma,
        verify=engine.verify,
        couple_unseeded=config.gateway.couple_unseeded,
    )
