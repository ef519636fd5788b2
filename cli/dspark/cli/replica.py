"""`dspark replica`: one replica of a cluster in the foreground, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli.console import console, say
from dspark.cli.serve import loop_factory

if TYPE_CHECKING:
    from dspark.deploy.roles import RunningRole


def replica(
    pool: Annotated[str, typer.Argument(help="scheduler, gateway, verifier or drafter.")],
    file: Annotated[
        Path, typer.Option("--file", "-f", help="The cluster's YAML or JSON file.")
    ] = Path("cluster.yaml"),
    name: Annotated[
        str, typer.Option("--name", help="Its replica id; one that nobody had by default.")
    ] = "",
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler",
            help="host:port of a scheduler; may be repeated. The file's by default.",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            help="Seconds until it must be ready, beside the loading of its model; gateway.wait_s "
            "by default.",
        ),
    ] = None,
) -> None:
    """Run one replica of a pool until SIGTERM or Ctrl-C, then drain it.

    For machines without Ray (systemd), and to try a cluster by hand: a scheduler, a verifier, a
    gateway, each in a terminal of its own. REDIS_URL says where the store is; without it the
    scheduler starts a Valkey that lives as long as itself. Ready is one line on stdout.

    Exit status: 0 stopped when told; 1 it could not go on; 2 bad input; 3 a newer replica of this
    name has registered; 128 + N ended at once by a second signal N.
    """
    from dspark.deploy.cluster_config import read_cluster
    from dspark.deploy.preflight import preflight

    config = read_cluster(file)
    config.pool(pool)
    preflight(config, os.environ, pools=(pool,), ports=False)
    from dspark.deploy.one_replica import one_replica
    from dspark.deploy.roles import replica_id, role, without_torch
    from dspark.deploy.single import Progress
    from dspark.telemetry.logs import set_up_logging

    name = name or replica_id(pool)
    set_up_logging(config.log_level, config.telemetry.log_format, pool=pool, replica=name)
    if pool == "gateway":
        without_torch(config)
    # While it loads Ctrl-C ends it at once: Python's own way would wait for the thread that loads.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = console()
    made = role(
        pool,
        config,
        name,
        scheduler or (),
        environment=os.environ,
        progress=Progress(lambda text: say(text, out)),
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        status = runner.run(
            one_replica(
                made,
                _tell,
                wait_s=config.gateway.wait_s if wait is None else wait,
                drain_s=config.drain_s,
            )
        )
    say("stopped" if not status else f"ended with status {status}")
    raise typer.Exit(status)


def _tell(running: RunningRole) -> None:
    """The ready line on stdout, for scripts too."""
    url = f"{running.url} and gRPC " if running.url else ""
    typer.echo(f"dspark {running.pool} {running.name} is ready: {url}{running.address}")
