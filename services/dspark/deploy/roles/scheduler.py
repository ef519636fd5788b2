"""A scheduler replica: it answers, and one of them plans. Its state is in the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dspark.core.errors import ConfigError, Unavailable
from dspark.deploy.cluster_config import STORE_URL
from dspark.deploy.roles.place import Place
from dspark.deploy.roles.running import RunningRole
from dspark.gateway.keys import KeyRing
from dspark.scheduler.central import Scheduler
from dspark.scheduler.store import Store, open_store
from dspark.scheduler.store.config import IN_MEMORY
from dspark.scheduling.servicer import SchedulingServicer, WireCodec

log = logging.getLogger(__name__)

# Seconds that a store may take to be there, as when all of a cluster is started at once.
STORE_WAIT_S, STORE_LOOK_S = 60.0, 0.2


@asynccontextmanager
async def scheduler_role(place: Place) -> AsyncIterator[RunningRole]:
    """Raises ConfigError, and Unavailable for a store that is not there."""
    config = place.config
    found = config.store_config(place.environment)
    if config.scheduler.most > 1 and found.url in ("", IN_MEMORY):
        raise ConfigError(
            f"scheduler.replicas: {config.scheduler.most} need one store that all reach: set "
            f"{STORE_URL} or store.url"
        )
    shares = {} if config.gateway.keys is None else KeyRing.load(config.gateway.keys).shares
    settings = config.scheduler_config(shares)
    async with AsyncExitStack() as stack:
        told = await stack.enter_async_context(place.tells())
        store = await stack.enter_async_context(open_store(found))
        await _there(store)
        scheduler = await stack.enter_async_context(
            Scheduler(store, WireCodec(), settings, place.name)
        )
        told.watch_scheduler(scheduler)
        service = SchedulingServicer(scheduler, told.tracer)
        server = await place.serve(stack, service)
        yield RunningRole(
            place.pool,
            place.name,
            place.reached(server.port),
            (server,),
            metrics_address=told.metrics_address,
        )


async def _there(store: Store) -> None:
    """Wait for it. Raises Unavailable, and ConfigError for one that can never be used."""
    give_up, told = time.monotonic() + STORE_WAIT_S, False
    while True:
        try:
            await store.ping()
            return
        except Unavailable as error:
            if time.monotonic() >= give_up:
                raise
            if not told:
                log.warning("waiting for the store: %s", error)
            told = True
        await asyncio.sleep(STORE_LOOK_S)
