"""What a round of the planning replica costs (bound: the plan interval).

    OMP_NUM_THREADS=1 python benchmarks/scheduler_round.py [--verifiers 1000] [--rounds 12]

Verifiers × 8 tenants, a quarter as many drafters, a new report of each verifier every round, the
in-memory store (Redis's own part: store_operations.py), messages as on the wire. Prints medians of
processor time in ms as JSON: taking the reports in as they come (`take`), the look at the store
where others have taken them (`look_others`) or this replica itself (`look_own`), and the plan until
it is published, where drafters have room and where they are full and floors are missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
from bench_joint import DRAFTERS, GAMMA, Cluster, cluster, later

from dspark.core.drafts import DrafterCard
from dspark.core.replicas import DrafterLoad, Pool, Replica, VerifierCard
from dspark.core.requests import Limits
from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.store.memory import MemoryStore
from dspark.scheduling.servicer import WireCodec

TTL_S = 600.0
CARD = VerifierCard("m", "m", "m", "x", Limits(1000, 10**5, 10**5), 16, 128, 128)


async def registered(store: MemoryStore, now: Cluster) -> Cluster:
    """Everybody of the cluster is a member; their reports say so."""
    views = {}
    for name, view in now.verifiers.items():
        place = Replica(name, f"{name}:1")
        epoch = await store.register(Pool.VERIFIER, place, CARD, view.step_cost, TTL_S)
        assert view.report is not None
        views[name] = replace(view, report=replace(view.report, epoch=epoch))
    for name, capacity in now.drafters.items():
        card = DrafterCard("c", "dspark", GAMMA)
        epoch = await store.register(Pool.DRAFTER, Replica(name, "h:1"), card, None, TTL_S)
        await store.heartbeat(name, epoch, False, DrafterLoad(1, 0, 10.0, capacity), TTL_S)
    return replace(now, verifiers=views)


async def measure(now: Cluster, rounds: int) -> dict[str, float]:
    store, codec = MemoryStore(), WireCodec()
    config = SchedulerConfig(report_ttl_s=TTL_S, ttl_s=TTL_S, plan_ttl_s=100.0)
    plans, others = (Scheduler(store, codec, config, name) for name in ("s1", "s2"))
    now = await registered(store, now)
    spent: dict[str, list[float]] = {
        name: [] for name in ("take", "look_own", "look_others", "plan")
    }

    async def timed(name: str, call: Any) -> None:
        begin = time.process_time()
        if (work := call()) is not None:
            await work
        spent[name].append(1e3 * (time.process_time() - begin))

    await plans.planner.lead()
    for number in range(2 * rounds):
        taker = plans if number % 2 else others
        wire = [
            codec.report(v.report) for v in later(now, number + 1).verifiers.values() if v.report
        ]

        def take(taker: Scheduler = taker, wire: list[bytes] = wire) -> None:
            for data in wire:
                taker.take(codec.read_report(data))

        await timed("take", take)
        await store.put_reports([*taker._reports.values()], TTL_S)
        taker._reports.clear()
        look = "look_own" if number % 2 else "look_others"
        await timed(look, lambda: plans.view.look(store, codec))
        await timed("plan", lambda: plans.planner.plan(plans.view))
    return {name: round(float(np.median(ms[3:])), 1) for name, ms in spent.items()}


def some(now: Cluster, verifiers: int) -> Cluster:
    kept = dict(list(now.verifiers.items())[:verifiers])
    pool = {f"d{d}": now.drafters[f"d{d}"] for d in range(max(DRAFTERS * verifiers // 1000, 4))}
    return replace(now, verifiers=kept, drafters=pool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifiers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    for name, asked in (
        ("drafters with room", cluster(0, 1e9)),
        ("drafters full, all tenants wait, floors missed", cluster(4, 30_000.0, 40.0)),
    ):
        found = asyncio.run(measure(some(asked, arguments.verifiers), arguments.rounds))
        print(json.dumps({"case": name, "verifiers": arguments.verifiers, "cpu_ms": found}))


if __name__ == "__main__":
    main()
