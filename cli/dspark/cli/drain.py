"""`dspark drain`: one replica is taken out of service and replaced."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dspark.cli.cluster_door import Address, Cluster, Wait, door

DRAIN_S = 600.0


def drain(
    replica: Annotated[str, typer.Argument(help="Its id, as `dspark status` shows it.")],
    cluster: Cluster = None,
    address: Address = None,
    wait: Wait = DRAIN_S,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return when it drains; another replaces it.")
    ] = False,
) -> None:
    """Take a replica out of service: it gets nothing new, what runs on it is finished or goes on
    elsewhere, and another one takes its place.

    The pool keeps its size (to make it smaller: `dspark scale`). The only verifier of a pool is let
    go when a second one is ready.

    Exit status: 0 done; 1 not in time; 2 bad input.
    """
    from dspark.cli.up import patience
    from dspark.deploy.ray.draining import drain_replica

    begun = time.monotonic()
    drain_replica(door(cluster, address), replica, patience(wait, begun), wait=not no_wait)
    typer.echo(f"{replica}: {'drains' if no_wait else 'gone and replaced'}")
