"""Any pool's replica by the pool's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module

from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.roles.place import Place, replica_id
from dspark.deploy.roles.running import RunningRole
from dspark.deploy.single import Progress


def role(
    pool: str,
    config: ClusterConfig,
    name: str = "",
    schedulers: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    advertise: str = "",
    port_wait_s: float = 0.0,
    progress: Progress | None = None,
) -> AbstractAsyncContextManager[RunningRole]:
    """A replica, to be entered on an event loop that is its own; it may be ready later.

    name: "" for one that nobody had. schedulers: host:port, as the configuration says if none is
    given. environment: where secrets may be. advertise: see `Place`. port_wait_s:
    seconds in which a fixed port may become free. Raises ConfigError; entering it raises
    ConfigError, ModelError and Unavailable.
    """
    config.pool(pool)
    place = Place(
        config,
        pool,
        name or replica_id(pool),
        tuple(schedulers) or config.scheduler_addresses(),
        environment,
        advertise,
        port_wait_s,
        progress or Progress(),
    )
    # Late: a gateway needs no torch, and a scheduler no tokenizer.
    of_pool: Callable[[Place], AbstractAsyncContextManager[RunningRole]] = getattr(
        import_module(f"dspark.deploy.roles.{pool}"), f"{pool}_role"
    )
    return of_pool(place)
