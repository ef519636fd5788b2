"""A drafter replica: it drafts for the verifiers that find it in the list of members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dspark.core.drafts import Drafter
from dspark.core.replicas import DrafterLoad, Member, Pool, Replica
from dspark.deploy.roles.place import Place
from dspark.deploy.roles.running import Load, RunningRole
from dspark.drafter.handshake import DrafterOffer, sound_tables
from dspark.drafter.runner import DraftRunner
from dspark.drafter.servicer import DraftingServicer
from dspark.models.drafters import NgramDrafter, load_drafter
from dspark.scheduling.membership import Membership


@asynccontextmanager
async def drafter_role(place: Place) -> AsyncIterator[RunningRole]:
    """Loads the drafter, then serves it. Raises ModelError, ConfigError."""
    config = place.config
    drafter = await asyncio.to_thread(_load, place)
    offer = DrafterOffer.of(drafter, feature_dtype=config.drafter.feature_dtype)
    batching = config.batching()
    async with AsyncExitStack() as stack:
        told = await stack.enter_async_context(place.tells())
        runner = await stack.enter_async_context(DraftRunner(drafter, batching, watch=told.drafts))
        told.watch_drafter(runner)
        servicer = DraftingServicer(runner, offer, Replica(place.name))
        server = await place.serve(stack, servicer)
        address = place.reached(server.port)
        scheduler = await stack.enter_async_context(place.asks())
        loads = _Loads(batching.max_batch)
        running = RunningRole(
            place.pool,
            place.name,
            address,
            (server,),
            metrics_address=told.metrics_address,
            lives=lambda: runner.alive,
            told=lambda: loads.now(runner),
        )
        running.membership = await stack.enter_async_context(
            Membership(
                scheduler,
                Member(
                    Pool.DRAFTER,
                    Replica(place.name, address),
                    runner.card,
                    calibration=sound_tables(offer),
                ),
                load=lambda: loads.since(runner),
                on_drain=running.drain_wanted.set,
                on_fenced=running.fenced.set,
            )
        )
        told.watch_outage("scheduler", running.membership.outage)
        yield running


class _Loads:
    """What heartbeats said last: a runner's load is of the time since it was asked."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._last = DrafterLoad()

    def since(self, runner: DraftRunner) -> DrafterLoad:
        self._last = runner.load()
        return self._last

    def now(self, runner: DraftRunner) -> Load:
        """Full is a drafter that drafts all the time, or has a whole pass waiting."""
        last, queue = self._last, runner.queue
        busy = last.tokens_per_s / last.capacity_tokens_per_s if last.capacity_tokens_per_s else 0.0
        figures = {
            "sessions": runner.sessions,
            "queue": queue,
            "busy": busy,
            "drafted": runner.figures.tokens,
        }
        return Load(max(busy, queue / self._max_batch), figures)


def _load(place: Place) -> Drafter:
    """Raises ModelError with both values for one that was made for another target."""
    config = place.config
    pool = config.drafter
    if config.drafts_plainly:
        return NgramDrafter(pool.gamma or max(config.engine.gamma, 1))
    import torch

    from dspark.gateway.tokenizer import Tokenizer
    from dspark.models import resolve
    from dspark.models.drafters.native import NativeDraftOptions
    from dspark.models.drafters.target_tensors import TargetTensors
    from dspark.models.targets.fingerprint import fingerprint_of

    if pool.threads:
        torch.set_num_threads(pool.threads)
    settings = config.target()
    native = None
    if settings.tries_native:  # in the precision that its targets have
        native = NativeDraftOptions(settings.dtype, threads=pool.threads)
    target = resolve(config.model, progress=place.progress.line)
    return load_drafter(
        config.chosen_drafter,
        TargetTensors.read(target),
        target_id=fingerprint_of(target, getattr(torch, settings.weights_dtype)),
        tokenizer_hash=Tokenizer.load(target).tokenizer_hash,
        window=pool.window,
        candidates=pool.candidates,
        native=native,
        progress=place.progress.line,
    )
