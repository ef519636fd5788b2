"""`dspark status`: the pools of a cluster that runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from dspark.cli.cluster_door import Address, Cluster, door

COLUMNS = ("replica", "state", "address", "load", "version")


def status(
    cluster: Cluster = None,
    address: Address = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything, as one JSON object.")
    ] = False,
) -> None:
    """Show the pools of a cluster: what is wanted, what is ready, who drains, and their load.

    Runs: that the scheduler has placed there. KV: cache that sequences own. τ: tokens a round
    commits. `dspark top` shows the same live.

    Exit status: 0 every pool is as it should be; 1 it is not, or nothing answers; 2 bad input.
    """
    from dspark.deploy.ray.observed import seen
    from dspark.deploy.ray.state import cluster_state, config_of, healthy, views

    pools = seen(door(cluster, address).details())
    state = cluster_state(pools, asyncio.run(views(config_of(pools))))
    if as_json:
        typer.echo(json.dumps(state, ensure_ascii=False))
    else:
        _show(state)
    raise typer.Exit(0 if healthy(state) else 1)


def _show(state: Mapping[str, Any]) -> None:
    typer.echo(f"cluster {state['cluster']}: {state['model']}")
    for name, pool in state["pools"].items():
        size = "" if pool["size"] == "fixed" else f" ({pool['size']})"
        drains = f", {pool['draining']} draining" if pool["draining"] else ""
        typer.echo(f"{name}: {pool['ready']} of {pool['wanted']} ready{size}{drains}")
        if pool["trouble"]:
            typer.echo(f"  cannot start: {pool['trouble']}")
    typer.echo()
    for line in _table(COLUMNS, *map(_row, _replicas(state))):
        typer.echo(line)
    typer.echo()
    scheduler, store = state["scheduler"], state["store"]
    leader = scheduler["leader"] or "nobody"
    typer.echo(f"plans: {leader}, for {scheduler['following']} verifiers")
    for where, why in scheduler["silent"].items():
        typer.echo(f"scheduler at {where} does not answer: {why}")
    if not store["there"]:
        away = store["away_s"]
        since = "nobody can tell" if away is None else f"away for {away:.0f} s"
        typer.echo(f"store: {since}; serving goes on without it")


def _replicas(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for pool in state["pools"].values():
        yield from pool["replicas"]


def _row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    load = ", ".join(_load(replica))
    return replica["id"], replica["state"], replica["address"], load, replica["version"]


def _table(*rows: tuple[str, ...]) -> Iterator[str]:
    """As wide as it has to be: an id that is cut is no use."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _load(replica: Mapping[str, Any]) -> Iterator[str]:
    load = replica["load"]
    if "blocks" in load:
        yield f"{load['running']} running"
        if load["waiting"]:
            yield f"{load['waiting']} waiting"
        if load["blocks"]:
            yield f"KV {1 - load['free_blocks'] / load['blocks']:.0%}"
        if load["tokens_per_s"]:
            yield f"{load['tokens_per_s']:.0f} tok/s"
        if load["accepted_length"]:
            yield f"τ {load['accepted_length']:.2f}"
    elif "sessions" in load:
        yield f"{load['sessions']} sessions"
        if load["queue"]:
            yield f"{load['queue']} queued"
        if load["capacity_tokens_per_s"]:
            yield f"busy {load['tokens_per_s'] / load['capacity_tokens_per_s']:.0%}"
    elif replica["runs"]:
        yield f"{replica['runs']} runs"
