"""`dspark up`: a cluster of separate pools, on this machine or on a Ray that runs."""

from __future__ import annotations

import json
import os
import shlex
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli.console import console, say

if TYPE_CHECKING:
    from dspark.deploy.cluster_config import ClusterConfig
    from dspark.deploy.ray.changes import Patience
    from dspark.deploy.ray.doors import Door

# Seconds for pools on a Ray that runs: images may have to be pulled, models to be fetched.
DEPLOY_S = 1800.0


def up(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="The cluster's YAML or JSON file; without one, the default model and one replica "
            "of each pool.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Dashboard of a Ray that runs (http://HOST:8265): deploy there and return.",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option("--wait", help="With --address or a cluster that runs: seconds to wait."),
    ] = DEPLOY_S,
    print_serve_config: Annotated[
        bool,
        typer.Option(
            "--print-serve-config",
            help="Print what Ray Serve would be told, as YAML (KubeRay's serveConfigV2), and stop.",
        ),
    ] = False,
) -> None:
    """Bring a cluster up: scheduler, gateway, verifiers and drafters, each a pool of its own.

    Without --address it runs here, in the foreground: a Ray and (unless REDIS_URL or store.url
    names one) a Valkey of its own, ready at the READY line, drained and gone at Ctrl-C; a second
    Ctrl-C ends it at once. Nothing is left behind, also when it is killed.

    Where a cluster of this name runs already, the file is applied to it, as with `kubectl apply`:
    pools that changed are replaced, new verifiers and drafters before old ones go, and streams of
    replicas that go are finished or move to others. Then it returns.

    With --address it does that on a Ray that runs, whose token is in RAY_AUTH_TOKEN or the file
    RAY_AUTH_TOKEN_PATH.

    Exit status: 0 up (or applied), or stopped when told; 1 it could not; 2 bad input.
    """
    from dspark.deploy.cluster_config import ClusterConfig, read_cluster

    config = ClusterConfig.of({}) if file is None else read_cluster(file)
    if print_serve_config:
        import yaml

        from dspark.deploy.ray.serve_config import serve_config

        typer.echo(yaml.safe_dump(serve_config(config), sort_keys=False), nl=False)
        return
    if address is not None:
        _deploy(config, address, wait)
    else:
        raise typer.Exit(_here(config, wait))


def _here(config: ClusterConfig, wait: float) -> int:
    from dspark.deploy.preflight import preflight
    from dspark.deploy.ray.cluster_file import ClusterFile
    from dspark.deploy.ray.doors import KeeperDoor
    from dspark.deploy.ray.serve_config import serve_config

    file = ClusterFile(config.name)
    lock = file.hold()
    if lock is None:
        running = file.read()
        if running is None:
            raise _starting(config.name)
        say(f"cluster {config.name} runs (process {running.pid}): applying to it")
        preflight(config, os.environ, ports=False)
        # Here nothing else begins at the same time: what cannot start now never will.
        _apply(KeeperDoor(running.socket), config, wait, at_once=True)
        return 0
    _check_cluster_extra()
    preflight(config, os.environ)
    embed = not config.store_config(os.environ).url
    from dspark.deploy.ray.local import bring_up

    return bring_up(
        file,
        lock,
        serve_config(config),
        embed=embed,
        ready=_ready_lines(config),
        version=version("dspark"),
        told=say,
    )


def _deploy(config: ClusterConfig, address: str, wait: float) -> None:
    from dspark.core.errors import ConfigError
    from dspark.deploy.ray.doors import RestDoor, auth_token

    if not config.store.url and not config.store.url_file and not os.environ.get("REDIS_URL"):
        raise ConfigError(
            "store.url: a cluster on a Ray that runs needs a Redis or Valkey that its schedulers "
            "reach: set store.url or store.url_file"
        )
    _check_reached(config)
    _apply(RestDoor(address, auth_token()), config, wait)


def _check_reached(config: ClusterConfig) -> None:
    """Replicas of a Ray that runs may be on any of its nodes. Raises ConfigError for those that
    listen where only their own node reaches them, unless the file says that all are on one."""
    from dspark.core.errors import ConfigError
    from dspark.deploy.pools import LOOPBACK, POOLS

    for name in POOLS:
        pool = config.pool(name)
        if pool.host in LOOPBACK and pool.advertise is None and pool.initial:
            raise ConfigError(
                f"{name}.host: {pool.host} is reached from its own node only: listen on 0.0.0.0, "
                f"or say that all nodes are one machine: {name}.advertise: {pool.host}"
            )


def _apply(door: Door, config: ClusterConfig, wait: float, *, at_once: bool = False) -> None:
    from dspark.deploy.ray import changes
    from dspark.deploy.ray.serve_config import serve_config

    begun = time.monotonic()
    patient = patience(wait, begun, at_once=at_once)
    changed = changes.apply(door, serve_config(config), patient)
    took = time.monotonic() - begun
    what = f"changed: {', '.join(changed)}" if changed else "nothing to change"
    typer.echo(f"READY  cluster {config.name}, after {took:.0f} s; {what}")


def patience(seconds: float, begun: float, *, at_once: bool = False) -> Patience:
    """Progress to stderr, a line with the seconds since `begun` each."""
    from dspark.deploy.ray.changes import Patience

    out = console()
    return Patience(
        seconds,
        lambda line: say(f"[{time.monotonic() - begun:5.1f} s] {line}", out),
        at_once=at_once,
    )


def _ready_lines(config: ClusterConfig) -> list[str]:
    """Where it answers, and what to do first."""
    pool = config.gateway
    scheme = "http" if pool.tls is None else "https"
    host = pool.advertise or ("127.0.0.1" if pool.host in ("0.0.0.0", "::") else pool.host)
    host = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{host}:{pool.http_port or 'PORT'}"
    asked = {
        "model": config.model_name,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "stream": True,
    }
    trusted = [] if pool.tls is None else ["--cacert", pool.tls.certificate]
    words = ["curl", "-N", *trusted, f"{url}/v1/chat/completions"]
    key = "" if pool.keys is None else '-H "Authorization: Bearer $DSPARK_API_KEY" '
    body = ["-H", "Content-Type: application/json", "-d", json.dumps(asked)]
    named = "" if config.name == "default" else f" --cluster {config.name}"
    return [
        f"  OpenAI HTTP  {url}/v1",
        f"  gRPC         {host}:{pool.grpc_port or 'PORT'}",
        f"  try          {shlex.join(words)} {key}{shlex.join(body)}",
        f"  look         dspark status{named}",
        f"  resize       dspark scale{named} drafter 2",
        f"  stop         Ctrl-C, or dspark down{named}",
    ]


def _check_cluster_extra() -> None:
    """Raises ConfigError, before anything is started. Looked up without importing: that is slow."""
    from importlib.util import find_spec

    from dspark.core.errors import ConfigError

    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'dspark[cluster]'")


def _starting(name: str) -> Exception:
    from dspark.core.errors import Unavailable

    return Unavailable(
        f"cluster {name} is just being started or stopped by another process: try again in a moment"
    )
