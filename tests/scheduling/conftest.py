"""Stores of a small cluster: a Valkey that the tests share, or one of their own to maltreat."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dspark.scheduler.store import EmbeddedValkey, MemoryStore, Store, StoreConfig
from dspark.scheduler.store.redis_store import RedisStore

from ..scheduler.store.conftest import clock, patient, valkey, valkey_or_none
from ..scheduler.store.conftest import store as twin

# Fixtures. `twin`: the in-memory store and a real one in turn, on `clock`.
__all__ = ["clock", "twin", "valkey", "valkey_or_none"]

# An outage is what a test waits for; a call that takes so long on a busy machine is one too.
QUICK_STORE = {"connect_timeout_s": 0.3, "answer_timeout_s": 0.3}


@pytest.fixture
def memory() -> Store:
    return MemoryStore()


@pytest.fixture
async def store(valkey: str) -> AsyncIterator[RedisStore]:
    """On the shared server, whole when the test has ended."""
    async with RedisStore(patient(valkey)) as redis:
        yield redis
        await redis.check_integrity()


@pytest.fixture
async def server(valkey: str) -> AsyncIterator[EmbeddedValkey]:
    """One that a test may maltreat. `str(server)` is its URL."""
    embedded = OwnValkey()
    async with embedded as url:
        embedded.url = url
        yield embedded


class OwnValkey(EmbeddedValkey):
    url = ""


def quick(url: str) -> StoreConfig:
    return StoreConfig(url, **QUICK_STORE)  # type: ignore[arg-type]
