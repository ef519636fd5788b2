"""What lies outside cluster.yaml and can be wrong, looked at before a model is loaded in vain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack

from dspark.core.errors import ConfigError
from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.pools import POOLS
from dspark.gateway.keys import KeyRing
from dspark.serving import listen


def preflight(
    config: ClusterConfig,
    environment: Mapping[str, str],
    *,
    pools: Collection[str] = POOLS,
    ports: bool = True,
) -> None:
    """pools: that are to start here. ports: whether theirs have to be free now.

    Raises ConfigError for certificates, keys, passwords' files and ports that cannot be had.
    """
    if config.tls is not None:
        config.tls.files().check()
    if "gateway" in pools:
        if config.gateway.tls is not None:
            config.gateway.tls.files().check()
        if config.gateway.keys is not None:
            KeyRing.load(config.gateway.keys)
    if "scheduler" in pools:
        store = config.store_config(environment)
        if store.password_file is not None:
            store.password()
    if ports:
        _check_free(config, pools)


def _check_free(config: ClusterConfig, pools: Collection[str]) -> None:
    """As many of each fixed port's range as the pool begins with. Raises ConfigError."""
    with ExitStack() as probes:  # open together: two pools may not want one port
        for name in pools:
            pool = config.pool(name)
            wanted = pool.initial if isinstance(pool.initial, int) else 1
            for field, ports in pool.fixed_ports().items():
                free, why = 0, ""
                for port in ports:
                    try:
                        probes.enter_context(listen(pool.host, port))
                        free += 1
                    except ConfigError as error:
                        why = str(error)
                if free < wanted:
                    raise ConfigError(
                        f"{name}.{field}: {wanted} of the ports {ports[0]} to {ports[-1]} must be "
                        f"free, {free} are: {why}"
                    )
