"""A verifier replica: an engine on the target, the scheduler's plans, and the drafters it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dspark.core.replicas import Member, Pool, Replica
from dspark.deploy.roles.place import Place
from dspark.deploy.roles.running import Load, RunningRole
from dspark.deploy.single import load, verifier_card
from dspark.verifier.adoption import Adoption
from dspark.verifier.engine import Engine
from dspark.verifier.enrolment import enrol
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer


@asynccontextmanager
async def verifier_role(place: Place) -> AsyncIterator[RunningRole]:
    """Loads and profiles the target, then serves it. Raises ModelError, ConfigError."""
    config = place.config
    loaded = await asyncio.to_thread(load, config.target(), place.progress, exact=True)
    card = verifier_card(loaded, config.model_name)
    async with AsyncExitStack() as stack:
        told = await stack.enter_async_context(place.tells())
        told.watch_engine(loaded.engine)
        runner = await stack.enter_async_context(EngineRunner(loaded.engine, told.runs))
        servicer = VerificationServicer(runner, card, Replica(place.name))
        server = await place.serve(stack, servicer)
        address = place.reached(server.port)
        scheduler = await stack.enter_async_context(place.asks())
        adoption = await stack.enter_async_context(
            Adoption(
                scheduler,
                runner,
                card,
                place.name,
                loaded.layers,
                credentials=place.credentials(),
                server_name=place.server_name,
            )
        )

        def begin_life(epoch: int) -> None:
            servicer.begin_life(epoch)
            adoption.begin_life(epoch)

        running = RunningRole(
            place.pool,
            place.name,
            address,
            (server,),
            metrics_address=told.metrics_address,
            lives=lambda: runner.alive,
            told=lambda: _load(loaded.engine),
        )
        running.membership = await stack.enter_async_context(
            enrol(
                scheduler,
                runner,
                Member(Pool.VERIFIER, Replica(place.name, address), card),
                loaded.cost,
                on_life=begin_life,
                on_drain=running.drain_wanted.set,
                on_fenced=running.fenced.set,
            )
        )
        told.watch_outage("scheduler", running.membership.outage)
        yield running


def _load(engine: Engine) -> Load:
    """Full is as many choices as a step takes, or a KV cache that sequences own. Plain numbers: any
    thread may look at them at any time."""
    config, pool = engine.config, engine.cache.pool
    running, active = len(engine.running), engine.active
    kv = pool.owned / config.kv_blocks
    figures = {"running": running, "waiting": max(active - running, 0), "kv": kv}
    return Load(max(active / config.max_sequences, kv), figures)
