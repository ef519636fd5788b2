"""Scheduler replicas of two versions on one store, as during an upgrade: what the newer one writes
is read by the older, but for what it does not know."""

from __future__ import annotations

import json
from typing import Any

from redis.asyncio import Redis

from dspark.core.plans import CalibrationTable
from dspark.core.replicas import DrafterLoad, Pool, Replica
from dspark.core.sampling import SamplingMode
from dspark.scheduler import StepCost
from dspark.scheduler.store import StoredReport
from dspark.scheduler.store.names import key
from dspark.scheduler.store.redis_store import RedisStore

from .cluster import COST, DRAFTER, TTL, Clock, asks, join, on
from .conftest import patient

WITH_JSON = ("cards", "step_costs", "loads", "leases")


def newer(value: Any) -> Any:
    """The same with another field in every object."""
    if isinstance(value, list):
        return [newer(entry) for entry in value]
    if isinstance(value, dict):
        return {name: newer(entry) for name, entry in value.items()} | {"newer": {"than": "this"}}
    return value


async def rewritten(redis: Redis, cluster: str) -> int:
    """How many objects were."""
    count = 0
    for name in WITH_JSON:
        for entry, text in (await redis.hgetall(key(cluster, name))).items():
            await redis.hset(key(cluster, name), entry, json.dumps(newer(json.loads(text))))
            count += 1
    return count


async def test_what_a_later_version_adds_is_not_read(valkey: str, clock: Clock) -> None:
    config = patient(valkey)
    tables = (CalibrationTable("d-1", SamplingMode.GREEDY, (2.0,)),)
    async with RedisStore(config, clock) as store, Redis.from_url(valkey) as redis:
        verifier = await join(store, "v", cost=COST)
        epoch = await store.register(Pool.DRAFTER, Replica("d", "h:1"), DRAFTER, None, TTL, tables)
        await join(store, "front", Pool.GATEWAY)
        await store.heartbeat("d", epoch, False, DrafterLoad(3, 1, 10.0, 100.0), TTL)
        lease = await store.acquire(asks("r"), 100, [on(verifier, drafter=Replica("d"))], TTL)
        await store.put_reports([StoredReport("v", verifier.epoch, 1, b"x")], TTL)
        before = [
            await store.members(),
            await store.usage(),
            await store.step_costs(["v"]),
            await store.reports(),
            await store.acquire(asks("r"), 100, [on(verifier)], TTL),
        ]
        assert before[-1] == lease
        assert await rewritten(redis, config.cluster) == 6
        assert [
            await store.members(),
            await store.usage(),
            await store.step_costs(["v"]),
            await store.reports(),
            await store.acquire(asks("r"), 100, [on(verifier)], TTL),
        ] == before
        await store.check_integrity()


def test_a_step_cost_of_an_earlier_version_has_the_usual_for_what_it_lacks() -> None:
    data = json.loads(COST.to_json())
    del data["per_verified_sequence_s"]
    assert StepCost.from_json(json.dumps(data), strict=False) == COST
