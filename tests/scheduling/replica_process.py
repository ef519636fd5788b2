"""A scheduler replica in a process of its own, to be killed: `python replica_process.py URL CLUSTER
NAME` prints its address and serves with the default settings until it is ended."""

from __future__ import annotations

import asyncio
import sys

from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.store import StoreConfig
from dspark.scheduler.store.redis_store import RedisStore
from dspark.scheduling.servicer import SchedulingServicer, WireCodec
from dspark.serving import serve_grpc


async def main(url: str, cluster: str, name: str) -> None:
    async with (
        RedisStore(StoreConfig(url, cluster, connect_timeout_s=5.0, answer_timeout_s=5.0)) as store,
        Scheduler(store, WireCodec(), SchedulerConfig(), name) as scheduler,
        serve_grpc(SchedulingServicer(scheduler)) as server,
    ):
        print(server.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
