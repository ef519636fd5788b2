"""`dspark top`: the pools of a cluster, live in the terminal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dspark.cli.cluster_door import Address, Cluster, door
from dspark.core.errors import ConfigError, DsparkError, Unavailable
from dspark.core.replicas import DrafterLoad
from dspark.core.status import ClusterStatus, MemberStatus, VerifierLoad

if TYPE_CHECKING:
    from dspark.deploy.cluster_config import ClusterConfig

POOLS = ("gateway", "verifier", "drafter")
# Seconds; a scheduler looks at the cluster ten times a second.
SHORTEST_S = 0.1
# Columns where there is no terminal to say how many.
_WIDE = 200

Views = Mapping[str, ClusterStatus | DsparkError]


def top(
    scheduler: Annotated[
        list[str] | None,
        typer.Option("--scheduler", help="host:port of a scheduler; may be repeated."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="The cluster's file: its schedulers and certificates."),
    ] = None,
    cluster: Cluster = None,
    address: Address = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON, one object a look and line.")
    ] = False,
) -> None:
    """Show the pools of a cluster as its schedulers see them: load, cache, drafts, calibration.

    The cluster that `dspark up` started here is found by itself; --scheduler or --file names one
    that was started otherwise. Ctrl-C ends it.

    kv: cache that sequences own. τ: tokens a round commits. wait: for drafts, a round. off: step
    time above what was predicted. busy: of what a drafter could draft.

    Exit status: 0; 1 no scheduler answers; 2 bad input.
    """
    if interval < SHORTEST_S:
        raise ConfigError(f"--interval: {interval:g} must be at least {SHORTEST_S:g} s")
    config = _config(scheduler, file, cluster, address)
    if once:
        state = _look(config)
        typer.echo(json.dumps(state, ensure_ascii=False)) if as_json else _print(state)
        return
    try:
        _follow(config, interval, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _config(
    scheduler: list[str] | None, file: Path | None, cluster: str | None, address: str | None
) -> ClusterConfig:
    """Raises NotFound and ConfigError."""
    from dspark.deploy.cluster_config import ClusterConfig, read_cluster

    if file is None and not scheduler:
        from dspark.deploy.ray.observed import seen
        from dspark.deploy.ray.state import config_of

        return config_of(seen(door(cluster, address).details()))
    if cluster is not None or address is not None:
        raise ConfigError("--scheduler and --file name a cluster: leave out --cluster, --address")
    config = ClusterConfig() if file is None else read_cluster(file)
    if not scheduler:
        return config
    pool = config.scheduler.model_dump() | {"addresses": scheduler}
    return ClusterConfig.of(config.model_dump() | {"scheduler": pool})


def _look(config: ClusterConfig) -> dict[str, Any]:
    """Raises Unavailable if no scheduler answers."""
    from dspark.deploy.ray.state import views

    found = asyncio.run(views(config))
    state = live_state(found, time.time())
    if not state["scheduler"]["answer"]:
        why = "; ".join(f"{where}: {what}" for where, what in state["scheduler"]["silent"].items())
        raise Unavailable(f"no scheduler answers: {why}")
    return state


def _follow(config: ClusterConfig, interval: float, as_json: bool) -> None:
    """Until Ctrl-C. A cluster that does not answer now is shown so, and asked again."""
    if as_json:
        while True:
            try:
                typer.echo(json.dumps(_look(config), ensure_ascii=False))
            except Unavailable as error:
                typer.echo(json.dumps({"at": time.time(), "error": str(error)}))
            time.sleep(interval)
    out = _console()
    with Live(console=out, screen=out.is_terminal, auto_refresh=False) as live:
        while True:
            shown: RenderableType
            try:
                shown = rendered(_look(config))
            except Unavailable as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)
            time.sleep(interval)


def _print(state: Mapping[str, Any]) -> None:
    _console().print(rendered(state), soft_wrap=True)


def _console() -> Console:
    """As wide as the terminal; a file or a pipe has no width, and gets every column whole."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = _WIDE
    return out


def live_state(found: Views, now: float) -> dict[str, Any]:
    """Plain data of what schedulers say, by address. now: seconds since 1970. The view is that of
    who plans, else of any that answers."""
    from dspark.deploy.ray.state import best, control_state

    view = best(found) or ClusterStatus("", False)
    pools = {
        pool: [_replica(one) for one in view.members if one.member.pool == pool] for pool in POOLS
    }
    return {
        "at": round(now, 3),
        "seen_s": view.seen_s,
        **control_state(found),
        "total": _total(view),
        "pools": pools,
        "drift": [asdict(drift) for drift in view.drift],
    }


def _total(view: ClusterStatus) -> dict[str, float]:
    verifiers = [one.load for one in view.members if isinstance(one.load, VerifierLoad)]
    return {
        "running": sum(load.running for load in verifiers),
        "waiting": sum(load.waiting for load in verifiers),
        "tokens_per_s": round(sum(load.tokens_per_s for load in verifiers), 1),
        "drafted_per_s": round(sum(load.drafted_per_s for load in verifiers), 1),
    }


def _replica(status: MemberStatus) -> dict[str, Any]:
    from dspark.deploy.ray.state import version_of

    member = status.member
    return {
        "id": member.replica.replica_id,
        "address": member.replica.address,
        "epoch": member.replica.epoch,
        "state": "draining" if member.draining else "ready",
        "version": version_of(status),
        "runs": status.runs,
        "claimed_tokens": status.claimed_tokens,
        "load": None if status.load is None else asdict(status.load),
    }


def rendered(state: Mapping[str, Any]) -> RenderableType:
    return Group(*_lines(state), *(_pool(pool, state["pools"][pool]) for pool in POOLS))


def _lines(state: Mapping[str, Any]) -> Iterator[RenderableType]:
    scheduler, store, total = state["scheduler"], state["store"], state["total"]
    yield Text(
        f"{total['tokens_per_s']:.0f} tok/s, {total['running']:.0f} running, "
        f"{total['waiting']:.0f} waiting, {total['drafted_per_s']:.0f} drafted/s",
        style="bold",
    )
    yield Text(
        f"plans: {scheduler['leader'] or 'nobody'} ({scheduler['plans']} so far, for "
        f"{scheduler['following']} verifiers), calibration {scheduler['calibration']}"
    )
    for where, why in scheduler["silent"].items():
        yield Text(f"scheduler at {where} does not answer: {why}", style="red")
    if store["away_s"] is not None:
        away = f"the store is away for {store['away_s']:.0f} s; serving goes on without it"
        yield Text(away, style="red")
    for drift in state["drift"]:
        if drift["error"] > 2 * drift["noise"]:
            yield Text(
                f"calibration of {drift['drafter_id']} ({drift['mode']}) is off by "
                f"{drift['error']:.3f}, noise {drift['noise']:.3f}",
                style="yellow",
            )


# Of each pool: column, and what stands in it for a load.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "gateway": (),
    "verifier": ("run", "wait", "kv", "tok/s", "steps/s", "τ", "drafted/s", "wait ms", "off ms"),
    "drafter": ("sessions", "queue", "tok/s", "busy"),
}


def _pool(pool: str, replicas: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, title=None)
    table.add_column(f"{pool} ({len(replicas)})", no_wrap=True, style="cyan")
    for column in ("state", "address"):
        table.add_column(column, no_wrap=True)
    for column in COLUMNS[pool]:
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("version", no_wrap=True)
    for one in replicas:
        cells = _cells(pool, one["load"]) or ("",) * len(COLUMNS[pool])
        style = "yellow" if one["state"] == "draining" else None
        row = (one["id"], one["state"], one["address"], *cells, one["version"])
        table.add_row(*row, style=style)
    return table


def _cells(pool: str, load: Mapping[str, Any] | None) -> tuple[str, ...]:
    if load is None:
        return ()
    if pool == "verifier":
        v = VerifierLoad(**load)
        return (
            str(v.running),
            str(v.waiting),
            f"{1 - v.free_blocks / v.blocks:.0%}" if v.blocks else "",
            f"{v.tokens_per_s:.0f}",
            f"{v.steps_per_s:.1f}",
            f"{v.accepted_length:.2f}" if v.accepted_length else "",
            f"{v.drafted_per_s:.0f}",
            f"{1000 * v.draft_wait_s:.1f}",
            f"{1000 * v.step_residual_s:+.1f}",
        )
    d = DrafterLoad(**load)
    capacity = d.capacity_tokens_per_s
    busy = f"{d.tokens_per_s / capacity:.0%}" if capacity else ""
    return str(d.sessions), str(d.queue), f"{d.tokens_per_s:.0f}", busy
