"""What a simulation found, as a picture: Pareto curves, and verify budgets over the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.scheduler.simulation import Figures
    from dspark.scheduler.simulation.presets import Paper

WORDS = {"users": "requests at once", "rate": "requests/s", "drafters": "drafters", "": ""}


def plot(found: Sequence[Figures], paper: Paper | None, file: Path) -> None:
    """Write `file` (png, svg or pdf by its name). paper: drawn beside a preset of it."""
    from importlib import import_module

    from dspark.scheduler.simulation import by_arm

    figure_type = import_module("matplotlib.figure").Figure  # without pyplot: no window, no state
    figure = figure_type(figsize=(15, 4.5), layout="constrained")
    pareto, over, budgets = figure.subplots(1, 3)
    setting = found[0].setting
    for arm, points in by_arm(found).items():
        values = [point.value for point in points]
        pareto.plot([p.per_user for p in points], [p.throughput for p in points], "o-", label=arm)
        over.plot(values, [p.throughput for p in points], "o-", label=arm)
        budgets.plot(values, [p.budget for p in points], "o-", label=arm)
    if paper is not None:
        speed, throughput = zip(*paper.mtp1_speed, strict=True)
        pareto.plot(speed, throughput, "kx", label="paper, MTP-1")
        users, budget = zip(*paper.budgets, strict=True)
        budgets.plot(users, budget, "k+", label="paper, DSpark")
    pareto.set_xlabel("tokens/s a user")
    for axes in (over, budgets):
        axes.set_xlabel(WORDS[setting])
    for axes in (pareto, over):
        axes.set_ylabel("tokens/s")
    budgets.set_ylabel("tokens verified a request and step, anchor included")
    for axes in (pareto, over, budgets):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)
