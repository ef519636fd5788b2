"""Which fixed ports a cluster's pools may have: none of Ray's, and none twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from dspark.core.errors import ConfigError
from dspark.deploy.pools import RAY_PORTS, PoolSection


def check_ports(pools: Mapping[str, PoolSection]) -> None:
    """pools: by name. Raises ConfigError."""
    taken = list(_fixed_ports(pools))
    for field, ports in taken:
        if ports[-1] > 65_535:
            raise ConfigError(
                f"{field}: {ports[0]} and one for each of {len(ports)} replicas end at "
                f"{ports[-1]}, above 65535"
            )
        if ports[-1] >= RAY_PORTS[0] and ports[0] <= RAY_PORTS[-1]:
            raise ConfigError(
                f"{field}: {_told(ports)} must be outside {_told(RAY_PORTS)}, which Ray's workers "
                "take"
            )
    for (field, ports), (other, theirs) in combinations(taken, 2):
        if ports[0] <= theirs[-1] and theirs[0] <= ports[-1]:
            raise ConfigError(
                f"{other}: {_told(theirs)} and {field}: {_told(ports)} overlap: a port is for one "
                "replica"
            )


def _fixed_ports(pools: Mapping[str, PoolSection]) -> Iterator[tuple[str, range]]:
    for name, pool in pools.items():
        for field, ports in pool.fixed_ports().items():
            if ports:
                yield f"{name}.{field}", ports


def _told(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
