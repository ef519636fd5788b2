"""What the scheduler's replicas share, in Redis or Valkey or in this process.

`open_store` gives a `Store` on a server, by default an embedded one; `MemoryStore` is its twin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec

from dspark.core.errors import ConfigError
from dspark.scheduler.store.config import IN_MEMORY, StoreConfig
from dspark.scheduler.store.embedded import EmbeddedValkey
from dspark.scheduler.store.memory import MemoryStore
from dspark.scheduler.store.names import MAX_TTL_MS, lease_id
from dspark.scheduler.store.records import (
    Candidate,
    Claim,
    Members,
    Plans,
    Refusal,
    Renewed,
    StoredCalibration,
    StoredReport,
    Taken,
    Usage,
)
from dspark.scheduler.store.store import Store

__all__ = [
    "MAX_TTL_MS",
    "Candidate",
    "Claim",
    "EmbeddedValkey",
    "Members",
    "MemoryStore",
    "Plans",
    "Refusal",
    "Renewed",
    "Store",
    "StoreConfig",
    "StoredCalibration",
    "StoredReport",
    "Taken",
    "Usage",
    "lease_id",
    "open_store",
]


@asynccontextmanager
async def open_store(config: StoreConfig) -> AsyncIterator[Store]:
    """Connections are opened when they are needed, so a server that is down now may come later:
    `ping` tells. Without a URL a Valkey is started that lives as long as this is open."""
    if config.url == IN_MEMORY:
        async with MemoryStore() as memory:
            yield memory
        return
    if find_spec("redis") is None:
        raise ConfigError("the package redis is missing: pip install 'dspark[cluster]'")
    from dspark.scheduler.store.redis_store import RedisStore  # a single process needs none of it

    async with AsyncExitStack() as stack:
        if not config.url:
            config = replace(config, url=await stack.enter_async_context(EmbeddedValkey()))
        yield await stack.enter_async_context(RedisStore(config))
