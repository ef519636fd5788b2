"""`dspark simulate`: a cluster in simulated time, on the planner and scheduler that serve."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options
from dspark.cli.console import console, say
from dspark.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.scheduler.simulation import Anchor, Figures, Point, Progress, SimulationConfig

# Seconds between two words of progress where nobody watches a bar.
TELL_S = 30.0
# Characters of a line that no terminal breaks.
FILE_WIDTH = 200


def simulate(
    config: Annotated[
        Path | None, typer.Option("--config", help="What to simulate (TOML); docs/simulation.md.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="v4-flash or v4-pro, as the paper has them; no file needed."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Instead of the file's; same seed, same say."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=options.OUTPUT)
    ] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Write a picture here.", rich_help_panel=options.OUTPUT),
    ] = None,
) -> None:
    """Throughput, speed a user gets, verify lengths and waits of a cluster that need not exist.

    Ctrl-C ends it and prints what is done so far.
    """
    from dspark.scheduler.simulation import config_of, read_config, sweep
    from dspark.verifier.guidance import Guidance

    if (config is None) == (preset is None):
        raise ConfigError("give one of --config FILE and --preset NAME")
    if plot_file is not None:
        _check_plot(plot_file)
    asked = read_config(config) if config is not None else config_of({"preset": preset})
    if seed is not None:
        asked = replace(asked, seed=seed)
    with _interruptible() as stop, _progress(len(asked.swept()) * len(asked.arms)) as progress:
        points = asyncio.run(sweep(asked, Guidance, progress, stop))
    _report(asked, points, stop(), as_json=as_json, plot_file=plot_file)
    if stop():
        say("cut short by Ctrl-C", style="red")
        raise typer.Exit(128 + signal.SIGINT)


def _report(
    config: SimulationConfig,
    points: Sequence[Point],
    cut_short: bool,
    *,
    as_json: bool,
    plot_file: Path | None,
) -> None:
    from rich.console import Console

    from dspark.scheduler.simulation import PAPER, anchors, enough_drafters

    found = [point.figures for point in points]
    paper = PAPER.get(config.preset)
    compared = anchors(paper, found) if paper is not None else []
    sizing = {arm: count for arm, count, _ in enough_drafters(found)}
    if plot_file is not None and found:
        from dspark.cli.simulate_plot import plot

        plot(found, paper, plot_file)
    if as_json:
        told = {
            "config": asdict(config),
            "points": [asdict(point) for point in points],
            "anchors": [{**asdict(anchor), "error": anchor.error} for anchor in compared],
            "enough_drafters": sizing,
            "peak_memory_bytes": peak_memory(),
            "cut_short": cut_short,
        }
        typer.echo(json.dumps(told))
        return
    width = None if sys.stdout.isatty() else FILE_WIDTH
    out = Console(highlight=False, markup=False, emoji=False, width=width)
    show(config, points, out)
    for arm, drafters in sizing.items():
        out.print(f"{arm}: {drafters} drafters are enough (within 2 % of the best of the sweep)")
    if compared:
        show_anchors(compared, out)


def show(config: SimulationConfig, points: Sequence[Point], out: Console) -> None:
    """A table of all points, and beside it what does not fit into one."""
    from rich.table import Table

    if not points:
        out.print("nothing was simulated beyond the warm-up")
        return
    found = [point.figures for point in points]
    setting = found[0].setting
    columns: dict[str, Callable[[Figures], str]] = {
        "arm": lambda f: f.arm,
        setting: lambda f: f"{f.value:g}",
        "tokens/s": lambda f: f"{f.throughput:.4g}",
        "/s/user": lambda f: f"{f.per_user:.4g}",
        "budget": lambda f: f"{f.budget:.2f}",
        "τ": lambda f: f"{f.accepted_length:.2f}",
        "TTFT ms": lambda f: _milliseconds(f.ttft_s),
        "TPOT ms": lambda f: _milliseconds(f.tpot_s),
    }
    if not setting:
        del columns[setting]
    if any(f.draft_wait_s for f in found):
        columns["draft wait ms"] = lambda f: f"{1e3 * f.draft_wait_s:.2f}"
    if config.drafters:
        columns["drafters busy"] = lambda f: f"{f.drafters_busy:.0%}"
    for name in sorted({name for f in found for name in f.misses}):
        columns[f"{name} missed"] = lambda f, name=name: _share(f.misses.get(name))  # type: ignore[misc]
    if any(f.refused or f.late_refused for f in found):
        columns["refused"] = lambda f: str(f.refused + f.late_refused)
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for figures in found:
        table.add_row(*(tell(figures) for tell in columns.values()))
    out.print(table)
    out.print("budget: tokens verified of a request in a step, the anchor included; TTFT, TPOT: "
              "p50 / p99")  # fmt: skip
    if len(config.tenants) > 1:
        _show_tenants(found, out)
    for point in points:
        if point.costs.rounds:
            _show_centre(point, out)


def _show_tenants(found: Sequence[Figures], out: Console) -> None:
    for f in found:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in f.tenants.items())
        out.print(f"{_named(f)}: of the tokens {shares}")


def _show_centre(point: Point, out: Console) -> None:
    costs = point.costs
    out.print(
        f"{_named(point.figures)}: {costs.rounds} central plans, planning "
        f"{_milliseconds(costs.plan_s)} ms, looking {_milliseconds(costs.look_s)} ms (p50 / p99); "
        f"{point.figures.store_calls['all']:.3g} store calls a verifier and second"
    )


def show_anchors(compared: Sequence[Anchor], out: Console) -> None:
    from rich.table import Table

    table = Table(title="against the paper", title_justify="left")
    for name in ("", "paper", "simulated", "error"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for anchor in compared:
        budget = anchor.name.startswith("budget")
        tell = "{:.2f}".format if budget else "{:+.0%}".format
        error = "{:+.2f}".format if budget else lambda e: f"{100 * e:+.0f} points"
        found = anchor.found
        table.add_row(
            anchor.name,
            tell(anchor.said),
            "beyond the sweep" if found is None else tell(found),
            "" if anchor.error is None else error(anchor.error),
        )
    out.print(table)


def peak_memory() -> int:
    """Bytes of this process at most so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; a second one ends the process as usual."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(number, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(points: int) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; else a line at once and every TELL_S seconds."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    out = console()
    told_at = time.monotonic()
    if not out.is_terminal:
        say(f"{points} points to simulate", out)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("simulating", total=1.0)

        def tell(told: Progress) -> None:
            nonlocal told_at
            done = (told.point - 1 + min(told.done, 1.0)) / told.points
            where = f"{told.name} ({told.point} of {told.points})"
            bar.update(task, completed=done, description=where)
            if not out.is_terminal and time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                say(f"{where}: {told.done:.0%}, {done:.0%} of all", out)

        yield tell


def _check_plot(file: Path) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed; pip install 'dspark[bench]' brings it")
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"plot: {file}: its name must end in .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise ConfigError(f"plot: {file.parent} is no directory")


def _named(figures: Figures) -> str:
    if not figures.setting:
        return figures.arm
    return f"{figures.arm}, {figures.setting} {figures.value:g}"


def _milliseconds(points: Any) -> str:
    if not points:
        return "–"
    return " / ".join(
        f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"
        for ms in (1e3 * points["p50"], 1e3 * points["p99"])
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
