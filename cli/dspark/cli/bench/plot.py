"""The figures as a picture: throughput over load, and what a user gets at each throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot(found: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write `file` (png, svg or pdf by its name) from the `results` of a report."""
    from importlib import import_module

    figure_type = import_module("matplotlib.figure").Figure  # without pyplot: no window, no state
    figure = figure_type(figsize=(11, 4.5), layout="constrained")
    over_load, for_user = figure.subplots(1, 2)
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
                over_load.plot([load for load, _ in arms], y, "o-", label=name)
        if kind == shown[0]:
            over_load.set_xscale("log")
            over_load.set_xticks(loads, [f"{load:g}" for load in loads])
            over_load.minorticks_off()
            over_load.set_xlabel(words)
    for_user.set_xlabel("tokens/s a user (1 / median TPOT)")
    for axes in (over_load, for_user):
        axes.set_ylabel("tokens/s")
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)
