"""One replica is taken out of service: the scheduler marks it, it drains itself and then fails
Serve's look at it, and Serve replaces it."""

from __future__ import annotations

import asyncio
import time

from dspark.core.errors import Cancelled, ConfigError, DeadlineExceeded
from dspark.deploy.ray import changes
from dspark.deploy.ray.changes import LOOK_S, Patience
from dspark.deploy.ray.doors import Door
from dspark.deploy.ray.observed import SeenPool, seen
from dspark.deploy.ray.state import config_of, owner, wish_drain


def drain_replica(door: Door, replica_id: str, patience: Patience, *, wait: bool = True) -> None:
    """Raises NotFound, ConfigError, Unavailable, DeadlineExceeded.

    The pool stays as large as it is. Serve cannot be told which replica to replace, so a pool whose
    only verifier is to go is one larger until it is gone: nobody would run the streams otherwise.
    """
    details = door.details()
    pools = seen(details)
    pool, replica = owner(pools, replica_id)
    larger = pool.name == "verifier" and pool.running == 1
    if larger:
        if pool.size != "fixed":
            raise ConfigError(
                f"{replica_id}: is the only verifier that runs, and its pool is {pool.size}: "
                "nobody would run the streams until another is there. Let a second one come first"
            )
        changes.check_grows(details, pool.name, 1)
        patience.told(f"{pool.name}: {replica_id} is the only one, so another comes first")
        changes.resize(door, pool.name, pool.wanted + 1)
    try:
        if larger:
            changes.wait_for(door, [pool.name], patience, replicas=pool.wanted + 1)
        asyncio.run(wish_drain(config_of(pools), replica_id))
        patience.told(f"{replica_id}: drains")
        if larger or wait:
            _wait_gone(door, pool, replica.key, patience)
    finally:
        if larger:
            changes.resize(door, pool.name, pool.wanted)
    if wait:
        changes.wait_for(door, [pool.name], patience)


def _wait_gone(door: Door, pool: SeenPool, key: str, patience: Patience) -> None:
    begun = patience.clock()
    while True:
        now = seen(door.details()).get(pool.name)
        if now is None or all(one.key != key or one.state == "stopping" for one in now.replicas):
            return
        if patience.give_up():
            raise Cancelled("stopped")
        if patience.clock() - begun > patience.seconds:
            raise DeadlineExceeded(f"{pool.name}: it still drains after {patience.seconds:g} s")
        time.sleep(LOOK_S)
