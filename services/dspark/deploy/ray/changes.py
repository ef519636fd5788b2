"""What operators change on a running cluster, over any door, told while it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    ModelError,
    NotFound,
    Unavailable,
)
from dspark.deploy.pools import POOLS
from dspark.deploy.ray.doors import Door, whole
from dspark.deploy.ray.observed import SeenPool, deployed, seen
from dspark.deploy.ray.resources import check_room
from dspark.deploy.ray.serve_config import FAREWELL_S

# Seconds between two looks, and between two lines about the same wait.
LOOK_S, LINE_S = 0.2, 10.0
# What stands where a pool's name does while Serve does not answer.
SERVE = "Serve"
# A target that changes changes its verifiers first, then who drafts for them and who asks them.
ORDER = ("scheduler", "verifier", "drafter", "gateway")

Told = Callable[[str], None]


@dataclass(frozen=True)
class Patience:
    """How long to wait and whom to tell. seconds: for one step. give_up: asked often; true ends the
    wait with Cancelled. at_once: fail on the first replica that says why it cannot start, instead
    of when Serve stops trying."""

    seconds: float
    told: Told
    give_up: Callable[[], bool] = lambda: False
    at_once: bool = False
    clock: Callable[[], float] = field(default=time.monotonic)


def apply(door: Door, wanted: Mapping[str, Any], patience: Patience) -> list[str]:
    """Bring the pools to a whole configuration of Serve (`serve_config`); the pools that changed.
    What is not there yet starts together; what is there and differs is replaced pool by pool, and
    goes back to what it was if its new replicas do not start. Raises ModelError with why, and
    ConfigError where the pools there are of another cluster."""
    before = deployed(door.details())
    after = {one["name"]: one for one in wanted["applications"]}
    _check_name(before, after)
    gone = [name for name in POOLS if name in before and name not in after]
    new = [name for name in ORDER if name in after and name not in before]
    changed = [name for name in ORDER if name in before and name in after]
    changed = [name for name in changed if not _same(before[name], after[name])]
    if new:
        put(door, {name: after[name] for name in new})
        wait_for(door, new, patience)
    for name in changed:
        patience.told(f"{name}: {_what(before[name], after[name])}")
        put(door, {name: after[name]})
        try:
            wait_for(door, [name], patience)
        except (ModelError, DeadlineExceeded) as error:
            put(door, {name: before[name]})
            raise ModelError(f"{error}; the {name} pool goes back to what it was") from None
    if gone:
        put(door, dict.fromkeys(gone))
        wait_for(door, gone, patience)
    return [*new, *changed, *gone]


def scale(door: Door, pool: str, replicas: int, patience: Patience, *, wait: bool = True) -> None:
    """Raises ConfigError for what the pool's kind of size or the machine does not allow, with both
    numbers."""
    details = door.details()
    found = pool_of(seen(details), pool)
    check_scale(found, replicas)
    check_grows(details, pool, replicas - found.wanted)
    resize(door, pool, replicas)
    if wait:
        wait_for(door, [pool], patience, replicas=replicas)


def check_grows(details: Mapping[str, Any], pool: str, more: int) -> None:
    """Raises ConfigError where the machine has no room for so many more replicas."""
    if free := details.get("resources"):  # elsewhere nodes may come when they are asked for
        check_room(deployed(details)[pool], more, free)


def resize(door: Door, pool: str, replicas: int) -> None:
    """Give a pool of fixed size another one. Raises NotFound."""
    config = pool_of(seen(door.details()), pool).config
    options = {**config["deployments"][0], "num_replicas": replicas}
    put(door, {pool: {**config, "deployments": [options]}})


def check_scale(pool: SeenPool, replicas: int) -> None:
    name = pool.name
    if name == "scheduler":
        raise ConfigError(
            "scheduler: its addresses are known to everybody, so its size is changed in "
            "cluster.yaml (scheduler.replicas) and applied with `dspark up -f`"
        )
    if pool.size != "fixed":
        raise ConfigError(
            f"{name}: is {pool.size}, {pool.wanted} now; change it in cluster.yaml and apply it "
            "with `dspark up -f`"
        )
    if replicas < 1:
        raise ConfigError(f"{name}: {replicas} replicas were asked for, 1 is the least")
    ports = gateway_ports(pool)
    if name == "gateway" and replicas > ports:
        raise ConfigError(
            f"gateway: {replicas} replicas were asked for, and {ports} ports are there for them"
        )


def gateway_ports(pool: SeenPool) -> int:
    """How many gateways one machine has ports for."""
    view = pool.config.get("args", {}).get("config", {})
    return int(view.get("gateway", {}).get("replicas") or 1)


def drain_s(pools: Collection[SeenPool]) -> float:
    """Seconds that replicas may take for their end, by their own configuration."""
    views = (pool.config.get("args", {}).get("config", {}) for pool in pools)
    return max((float(view.get("drain_s", 30.0)) for view in views), default=0.0) + FAREWELL_S


def take_down(door: Door, patience: Patience) -> None:
    """Drain all pools: gateways first, so that what runs may end, and schedulers last."""
    now = deployed(door.details())
    for leaving in (("gateway",), ("verifier", "drafter"), POOLS):
        going = [name for name in leaving if name in now]
        if not going:
            continue
        for name in going:
            del now[name]
        put(door, dict.fromkeys(going))
        wait_for(door, going, patience)


def put(door: Door, changed: Mapping[str, Any]) -> None:
    """Deploy these applications, None for one that goes, and leave all others as they are now:
    Serve is told of all at once, and others deploy there too."""
    now = {**deployed(door.details()), **changed}
    door.put(whole({name: one for name, one in now.items() if one is not None}))


def _check_name(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Every pool there belongs to the cluster that is wanted."""
    (ours,) = {one["args"]["config"]["name"] for one in after.values()}
    for pool in (name for name in POOLS if name in before):
        theirs = before[pool].get("args", {}).get("config", {}).get("name")
        if theirs != ours:
            whose = "an application of others" if theirs is None else f"of the cluster {theirs!r}"
            raise ConfigError(f"name: {ours!r}: the {pool} that runs there is {whose}")


def pool_of(pools: Mapping[str, SeenPool], name: str) -> SeenPool:
    """Raises NotFound naming the pools that there are."""
    if name not in pools:
        raise NotFound(f"{name}: is no pool of this cluster, whose pools are: {', '.join(pools)}")
    return pools[name]


def wait_for(
    door: Door, names: Collection[str], patience: Patience, *, replicas: int | None = None
) -> None:
    """Until pools have settled, or are gone if they are not put any more. replicas: that a pool has
    then, whatever Serve wanted of it before it heard of that. Raises ModelError with why replicas
    do not start, DeadlineExceeded, Cancelled."""
    begun = said_at = patience.clock()
    said: dict[str, str] = {}
    while True:
        waits: dict[str, str] = {}
        try:
            details = door.details()
        except Unavailable as error:  # its controller may be starting again
            waits = {**said, SERVE: str(error)}  # what was waited for still is, as far as we know
        else:
            waits = _waits(details, names, patience, replicas)
        now = patience.clock()
        for name, line in waits.items():
            if said.get(name) != line or now - said_at >= LINE_S:
                patience.told(f"{name}: {line}")
                said_at = now if said.get(name) == line else said_at
        for name in said.keys() - waits.keys():
            came = "answers again" if name == SERVE else "ready"
            patience.told(f"{name}: {came if name in (SERVE, *deployed(details)) else 'gone'}")
        said = waits
        if not waits:
            return
        if patience.give_up():
            raise Cancelled("stopped")
        if now - begun > patience.seconds:
            told = "; ".join(f"{name}: {line}" for name, line in waits.items())
            raise DeadlineExceeded(f"not done after {patience.seconds:g} s: {told}")
        time.sleep(LOOK_S)


def _waits(
    details: Mapping[str, Any],
    names: Collection[str],
    patience: Patience,
    replicas: int | None,
) -> dict[str, str]:
    """By pool, what is still waited for."""
    pools, staying = seen(details), deployed(details)
    waits = {}
    for name in names:
        pool = pools.get(name)
        if name not in staying:
            if pool is not None:
                waits[name] = f"{len(pool.replicas)} draining"
            continue
        assert pool is not None
        if pool.status == "deploy_failed" or (pool.trouble and patience.at_once):
            raise ModelError(f"{name} cannot start: {pool.trouble}")
        if not pool.settled or replicas not in (None, pool.wanted):
            again = f" (tries again after: {pool.trouble})" if pool.trouble else ""
            waits[name] = pool.told() + again
    return waits


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = ("import_path", "args", "deployments")
    return all(one.get(key) == other.get(key) for key in keys)


def _what(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """In words, what a change does."""
    if before.get("args") != after.get("args"):
        old, new = before["args"]["config"], after["args"]["config"]
        fields = ", ".join(sorted(_differences(old, new))) or "everything"
        return f"replaced, for a change of {fields}"
    return "resized"


def _differences(old: Any, new: Any, path: str = "") -> set[str]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {path} if old != new else set()
    found: set[str] = set()
    for key in old.keys() | new.keys():
        found |= _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    return found
