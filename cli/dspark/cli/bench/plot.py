"""The figures as a picture: throughput over load, what a user gets at each throughput, and how many
draft tokens were verified where that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError

# Of an arm, where it was measured in the process of its engine.
LENGTH = "mean_verify_length"
KINDS = (".png", ".svg", ".pdf")


def check_plot(file: Path) -> None:
    """Raises ConfigError for what could not be written after hours of measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed; pip install 'dspark[bench]' brings it")
    if file.suffix not in KINDS:
        raise ConfigError(f"plot: {file}: its name must end in one of: {', '.join(KINDS)}")
    if not file.parent.is_dir():
        raise ConfigError(f"plot: {file.parent} is no directory")


def plot(found: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write `file` (png, svg or pdf by its name) from the `results` of a report."""
    from importlib import import_module

    figure_type = import_module("matplotlib.figure").Figure  # without pyplot: no window, no state
    known = any(LENGTH in arm for row in found for arm in row["arms"].values())
    figure = figure_type(figsize=(16 if known else 11, 4.5), layout="constrained")
    over_load, for_user, *lengths = figure.subplots(1, 3 if known else 2)
    kinds = {
        "closed": ("concurrency", "requests at once"),
        "open": ("requests_per_s", "requests/s"),
    }
    shown = [kind for kind in kinds if any(row["load"]["kind"] == kind for row in found)]
    for kind in shown:
        axis, words = kinds[kind]
        rows = sorted(
            (row for row in found if row["load"]["kind"] == kind), key=lambda row: row["load"][axis]
        )
        loads = [row["load"][axis] for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row["arms"]):
            arms = [(row["load"][axis], row["arms"][name]) for row in rows if name in row["arms"]]
            y = [arm["throughput_tokens_per_s"] for _, arm in arms]
            user = [arm["tokens_per_s_per_user"] for _, arm in arms]
            label = name if kind == "closed" else f"{name}, open loop"
            for_user.plot(user, y, "o-" if kind == "closed" else "s--", label=label)
            if kind == shown[0]:  # the other kind has no place on this axis
                x = [load for load, _ in arms]
                over_load.plot(x, y, "o-", label=name)
                for axes in lengths:
                    axes.plot(x, [arm[LENGTH] for _, arm in arms], "o-", label=name)
        if kind == shown[0]:
            for axes in (over_load, *lengths):
                axes.set_xscale("log")
                axes.set_xticks(loads, [f"{load:g}" for load in loads])
                axes.minorticks_off()
                axes.set_xlabel(words)
    for_user.set_xlabel("tokens/s a user (1 / median TPOT)")
    for axes in (over_load, for_user, *lengths):
        axes.set_ylabel("draft tokens verified a round" if axes in lengths else "tokens/s")
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)
