"""The state of a cluster for people and scripts: what Serve says of its pools, and what the
scheduler says of their replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dspark.core.drafts import DrafterCard
from dspark.core.errors import ConfigError, DsparkError, NotFound, Unavailable
from dspark.core.replicas import VerifierCard
from dspark.core.status import ClusterStatus, MemberStatus
from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.ray.observed import SeenPool, SeenReplica
from dspark.scheduling.client import SchedulingClient

# Seconds for a scheduler's answer.
ANSWER_S = 2.0


def config_of(pools: Mapping[str, SeenPool]) -> ClusterConfig:
    """As far as every pool is told: addresses of schedulers, how to be let in. Raises NotFound."""
    for pool in pools.values():
        if view := pool.config.get("args", {}).get("config"):
            return ClusterConfig.of(view)
    raise NotFound("no pools of dspark are deployed there")


def scheduling_client(config: ClusterConfig, address: str = "") -> SchedulingClient:
    """Of all schedulers, or one."""
    addresses = (address,) if address else config.scheduler_addresses()
    tls = None if config.tls is None else config.tls.files()
    return SchedulingClient(
        addresses,
        credentials=None if tls is None else tls.credentials(),
        server_name="" if tls is None else tls.server_name,
        call_s=ANSWER_S,
    )


async def views(config: ClusterConfig) -> dict[str, ClusterStatus | DsparkError]:
    """What each scheduler says, by address."""

    async def ask(address: str) -> ClusterStatus | DsparkError:
        async with scheduling_client(config, address) as client:
            try:
                return await client.status(ANSWER_S)
            except DsparkError as error:
                return error

    addresses = config.scheduler_addresses()
    return dict(zip(addresses, await asyncio.gather(*map(ask, addresses)), strict=True))


def best(found: Mapping[str, ClusterStatus | DsparkError]) -> ClusterStatus | None:
    """The view of who plans, else of any scheduler that answers."""
    answers = [view for view in found.values() if isinstance(view, ClusterStatus)]
    return next((view for view in answers if view.leads), answers[0] if answers else None)


def cluster_state(
    pools: Mapping[str, SeenPool], found: Mapping[str, ClusterStatus | DsparkError]
) -> dict[str, Any]:
    """Plain data. found: of `views`."""
    view = best(found)
    config = config_of(pools)
    members = {} if view is None else {one.member.replica.replica_id: one for one in view.members}
    schedulers = {
        answer.scheduler: address
        for address, answer in found.items()
        if isinstance(answer, ClusterStatus)
    }
    return {
        "cluster": config.name,
        "model": config.model_name,
        "pools": {name: _pool(pool, members, schedulers) for name, pool in pools.items()},
        **control_state(found),
    }


def control_state(found: Mapping[str, ClusterStatus | DsparkError]) -> dict[str, Any]:
    """Of schedulers and their store, as `dspark status` and `dspark top` tell it. Plain data."""
    view = best(found)
    answer = [address for address, one in found.items() if isinstance(one, ClusterStatus)]
    return {
        "scheduler": {
            "leader": view.scheduler if view is not None and view.leads else None,
            "plans": 0 if view is None else view.plans,
            "calibration": 0 if view is None else view.calibration,
            "following": 0 if view is None else view.following,
            "answer": sorted(answer),
            "silent": {a: str(e) for a, e in found.items() if isinstance(e, DsparkError)},
        },
        "store": {
            "there": view is not None and view.store_away_s is None,
            "away_s": None if view is None else view.store_away_s,
        },
    }


def healthy(state: Mapping[str, Any]) -> bool:
    """Every pool has what is wanted of it, a scheduler answers, and the store is there."""
    pools = state["pools"].values()
    enough = all(pool["ready"] >= pool["wanted"] for pool in pools)
    return enough and bool(state["scheduler"]["answer"]) and state["store"]["there"]


async def wish_drain(config: ClusterConfig, replica_id: str) -> None:
    """Raises NotFound naming who there is, and Unavailable if no scheduler answers."""
    found = best(await views(config))
    if found is None:
        raise Unavailable(f"no scheduler answers at {', '.join(config.scheduler_addresses())}")
    known = [one.member.replica.replica_id for one in found.members]
    if replica_id not in known:
        raise NotFound(
            f"{replica_id}: no such replica is alive; there are: {', '.join(sorted(known))}"
        )
    async with scheduling_client(config) as client:
        await client.drain(replica_id)


def owner(pools: Mapping[str, SeenPool], replica_id: str) -> tuple[SeenPool, SeenReplica]:
    """Where a replica stands in Serve. Raises NotFound, and ConfigError for a scheduler's."""
    for pool in pools.values():
        for replica in pool.replicas:
            if _is(replica, pool.name, replica_id):
                if pool.name == "scheduler":
                    raise ConfigError(
                        f"{replica_id}: schedulers hold nothing that could be drained"
                    )
                return pool, replica
    raise NotFound(f"{replica_id}: no such replica is deployed; `dspark status` lists them")


def _is(replica: SeenReplica, pool: str, replica_id: str) -> bool:
    return replica_id.startswith(f"{pool}-") and replica_id.endswith(f"-{replica.key}")


def _pool(
    pool: SeenPool, members: Mapping[str, MemberStatus], schedulers: Mapping[str, str]
) -> dict[str, Any]:
    replicas = [_replica(pool, replica, members, schedulers) for replica in pool.replicas]
    return {
        "wanted": pool.wanted,
        "ready": sum(replica["state"] == "ready" for replica in replicas),
        "draining": sum(replica["state"] == "draining" for replica in replicas),
        "size": pool.size,
        "status": pool.status,
        "trouble": pool.trouble,
        "replicas": replicas,
    }


def _replica(
    pool: SeenPool,
    replica: SeenReplica,
    members: Mapping[str, MemberStatus],
    schedulers: Mapping[str, str],
) -> dict[str, Any]:
    names: Sequence[str] = [*members, *schedulers]
    name = next((one for one in names if _is(replica, pool.name, one)), "")
    member = members.get(name)
    state = replica.state
    if state == "stopping" or (member is not None and member.member.draining):
        state = "draining"
    elif state == "running":
        state = "ready" if name else "not registered"
    return {
        "id": name or f"{pool.name}-…-{replica.key}",
        "state": state,
        "address": schedulers.get(name, "") if member is None else member.member.replica.address,
        "host": replica.host,
        "pid": replica.pid,
        "version": "" if member is None else version_of(member),
        "runs": 0 if member is None else member.runs,
        "load": {} if member is None or member.load is None else asdict(member.load),
    }


def version_of(member: MemberStatus) -> str:
    """Of what it has loaded."""
    card = member.member.card
    if isinstance(card, VerifierCard):
        return f"{card.model} {card.target_id}"
    if isinstance(card, DrafterCard):
        return f"{card.kind} {card.drafter_id}"
    return ""
