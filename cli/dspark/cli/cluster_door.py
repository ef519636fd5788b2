"""How the commands of a running cluster find it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dspark.deploy.ray.doors import Door

Cluster = Annotated[
    str | None,
    typer.Option("--cluster", help="Name of a cluster on this machine; the only one by default."),
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Dashboard of the Ray it runs on (http://HOST:8265)."),
]
Wait = Annotated[float, typer.Option("--wait", help="Seconds to wait until it is done.")]


def door(cluster: str | None, address: str | None) -> Door:
    """Raises NotFound and ConfigError."""
    from dspark.core.errors import ConfigError
    from dspark.deploy.ray.cluster_file import find_cluster
    from dspark.deploy.ray.doors import KeeperDoor, RestDoor, auth_token

    if address is None:
        return KeeperDoor(find_cluster(cluster).socket)
    if cluster is not None:
        raise ConfigError("--cluster: names a cluster on this machine, --address one elsewhere")
    return RestDoor(address, auth_token())
