"""`dspark scale`: another number of replicas in a pool that runs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dspark.cli.cluster_door import Address, Cluster, Wait, door

SCALE_S = 600.0


def scale(
    pool: Annotated[str, typer.Argument(help="gateway, verifier or drafter.")],
    replicas: Annotated[int, typer.Argument(help="How many there should be.")],
    cluster: Cluster = None,
    address: Address = None,
    wait: Wait = SCALE_S,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return at once; `dspark status` tells the rest.")
    ] = False,
) -> None:
    """Give a pool another number of replicas, and wait until they are there, or gone.

    Replicas that go are drained: what runs on them is finished, and what is left after drain_s goes
    on elsewhere; no stream is cut. `dspark up -f` sets the number of the file again.

    Exit status: 0 done; 1 not in time, or it cannot; 2 the pool or the number cannot be.
    """
    from dspark.cli.up import patience
    from dspark.deploy.ray import changes

    begun = time.monotonic()
    changes.scale(door(cluster, address), pool, replicas, patience(wait, begun), wait=not no_wait)
    if not no_wait:
        typer.echo(f"{pool}: {replicas} ready, after {time.monotonic() - begun:.0f} s")
