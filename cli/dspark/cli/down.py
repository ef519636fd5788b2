"""`dspark down`: the end of a cluster."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dspark.cli.cluster_door import Address, Cluster, Wait
from dspark.cli.console import say

DOWN_S = 120.0


def down(
    cluster: Cluster = None,
    address: Address = None,
    wait: Wait = DOWN_S,
    force: Annotated[
        bool, typer.Option("--force", help="End it at once: what runs ends with a status.")
    ] = False,
) -> None:
    """Drain a cluster and end it: gateways finish what they have, then the rest goes.

    On this machine all its processes are gone when this returns. With --address the pools are
    removed from the Ray there, which runs on.

    Exit status: 0 it is down; 1 not in time, or none runs; 2 bad input.
    """
    begun = time.monotonic()
    if address is not None:
        _elsewhere(address, cluster, force, wait, begun)
    else:
        _here(cluster, force, wait, begun)


def _elsewhere(address: str, cluster: str | None, force: bool, wait: float, begun: float) -> None:
    from dspark.cli.cluster_door import door
    from dspark.cli.up import patience
    from dspark.deploy.ray import changes

    there = door(cluster, address)
    if not force:
        changes.take_down(there, patience(wait, begun))
    there.close(force=force, told=say)
    typer.echo("down")


def _here(cluster: str | None, force: bool, wait: float, begun: float) -> None:
    from dspark.core.errors import DeadlineExceeded
    from dspark.deploy.ray.cluster_file import ClusterFile, find_cluster
    from dspark.deploy.ray.doors import KeeperDoor

    running = find_cluster(cluster)
    late = DeadlineExceeded(
        f"cluster {running.name} is not down after {wait:g} s: process {running.pid}; "
        "--force ends it at once"
    )
    try:
        KeeperDoor(running.socket, begun + wait).close(force=force, told=say)
    except DeadlineExceeded:
        raise late from None
    file = ClusterFile(running.name)
    while file.taken():
        if time.monotonic() - begun > wait:
            raise late
        time.sleep(0.05)
    typer.echo(f"cluster {running.name} is down")
