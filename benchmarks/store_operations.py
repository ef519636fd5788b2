"""What the store costs a cluster: commands on a real server, inside scripts too.

    python benchmarks/store_operations.py --verifiers 1000 --rounds 20

Makes the calls that a planning scheduler makes each interval, and those of heartbeats, leases and
renewals, one kind at a time, and reads off `INFO commandstats` what each came to. Reports and plans
are bytes of the size that 8 tenants with verdicts give.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from redis.asyncio import Redis

from dspark.core.leases import Lease, LeaseRequest
from dspark.core.replicas import Pool, Replica, VerifierCard
from dspark.core.requests import Limits
from dspark.scheduler import StepCost
from dspark.scheduler.store import Candidate, EmbeddedValkey, Store, StoreConfig, StoredReport
from dspark.scheduler.store.redis_store import RedisStore

CARD = VerifierCard("m", "m", "m", "simulation", Limits(1, 10**6, 10**6), 16, 64, 64)
COST = StepCost((1, 4096), (0.01, 0.1))
REPORT_BYTES, PLAN_BYTES = 4000, 400
TTL_S = 600.0


async def commands(client: Redis) -> tuple[int, int]:
    """So far: sent by clients, and run inside scripts."""
    stats = await client.info("commandstats")
    scripts = sum(s["calls"] for name, s in stats.items() if name.startswith("cmdstat_eval"))
    every = sum(s["calls"] for name, s in stats.items() if not name.endswith(("info", "hello")))
    return scripts, every - scripts


async def measured(
    client: Redis, name: str, times: int, call: Callable[[int], Awaitable[object]]
) -> None:
    before, begin = await commands(client), time.perf_counter()
    for i in range(times):
        await call(i)
    seconds = time.perf_counter() - begin
    scripts, inside = (now - was for now, was in zip(await commands(client), before, strict=True))
    print(
        f"{name:12} {scripts / times:8.2f} scripts, {inside / times:10.1f} commands in them, "
        f"{1e3 * seconds / times:8.3f} ms a call"
    )


async def cluster(store: Store, client: Redis, verifiers: int, rounds: int) -> None:
    epochs = {}
    for v in range(verifiers):
        name = f"verifier-{v}"
        epochs[name] = await store.register(Pool.VERIFIER, Replica(name), CARD, COST, TTL_S)
    owner = await store.register(Pool.GATEWAY, Replica("gateway"), None, None, TTL_S)
    names = [*epochs]
    leases: list[Lease] = []

    async def heartbeat(i: int) -> None:
        name = names[i % verifiers]
        await store.heartbeat(name, epochs[name], False, None, TTL_S)

    async def acquire(i: int) -> None:
        chosen = [names[(i + k) % verifiers] for k in range(8)]
        candidates = [Candidate(Replica(n, "", epochs[n]), 10**6, 128) for n in chosen]
        request = LeaseRequest(f"r{i}", 0, "gateway", owner, 100, tenant=f"t{i % 8}")
        lease = await store.acquire(request, 500, candidates, TTL_S)
        assert isinstance(lease, Lease)
        leases.append(lease)

    async def renew(_: int) -> None:
        await store.renew(leases, TTL_S)

    async def release(i: int) -> None:
        await store.release([leases[i].lease_id])

    async def put_reports(i: int) -> None:
        data = b"r" * REPORT_BYTES
        await store.put_reports([StoredReport(n, e, i, data) for n, e in epochs.items()], TTL_S)

    async def publish(_: int) -> None:
        term = await store.lead("scheduler", TTL_S)
        assert term is not None
        await store.publish(term, dict.fromkeys(names, b"p" * PLAN_BYTES), TTL_S)

    known = await store.members()
    assert known is not None
    await measured(client, "heartbeat", verifiers, heartbeat)
    await measured(client, "acquire", 1000, acquire)
    await measured(client, f"renew {len(leases)}", 5, renew)
    await measured(client, "put_reports", rounds, put_reports)
    await measured(client, "members", rounds, lambda _: store.members(known=known.version))
    await measured(client, "usage", rounds, lambda _: store.usage())
    await measured(client, "reports", rounds, lambda _: store.reports())
    await measured(client, "lead+publish", rounds, publish)
    await measured(client, "plans", rounds, lambda _: store.plans(names))
    await measured(client, "release", len(leases), release)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--verifiers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    async with EmbeddedValkey() as url:
        config = StoreConfig(url, answer_timeout_s=10.0)
        client = Redis(unix_socket_path=urlsplit(url).path)
        async with RedisStore(config) as store:
            await cluster(store, client, given.verifiers, given.rounds)
        await client.aclose()


if __name__ == "__main__":
    asyncio.run(main())
