"""The paper's figures 2 to 6, of our own drafters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

# Result of `dspark eval` by the drafter's name.
Results = Mapping[str, Mapping[str, Any]]


def draw_figures(results: Results, folder: Path, *, baseline: str | None = None) -> list[Path]:
    """Figures 2 to 5 of one or more results, one set a temperature; the files that were written.

    baseline: the drafter that figure 4's gains are over, the first unless given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared = [{row["temperature"] for row in result["temperatures"]} for result in results.values()]
    written = []
    for temperature in sorted(set.intersection(*shared)):
        rows = {
            name: next(r for r in result["temperatures"] if r["temperature"] == temperature)
            for name, result in results.items()
        }
        drawings = {
            "figure2-acceptance-by-position": _by_position(rows),
            "figure3-tau-by-domain": _taus(rows),
            "figure5-thresholds": _thresholds(rows),
        }
        if len(rows) > 1:
            drawings["figure4-gain"] = _gains(rows, baseline or next(iter(rows)))
        for name, figure in drawings.items():
            path = folder / f"{name}-t{temperature:g}.png"
            figure.savefig(path, dpi=150)
            written.append(path)
    return written


def draw_reliability(judged: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Figure 6: of each mode and position, what survivals said against what came."""
    modes, gamma = len(judged), max(len(one["positions"]) for one in judged)
    figure = _figure(2.1 * gamma, 2.3 * modes)
    panels = figure.subplots(modes, gamma, squeeze=False, sharex=True, sharey=True)
    for one, row in zip(judged, panels, strict=True):
        for axes, position, bins in zip(row, one["positions"], one["reliability"], strict=False):
            axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
            largest = max((count for _, _, count in bins), default=1)
            axes.scatter(
                [told for told, _, _ in bins],
                [came for _, came, _ in bins],
                s=[4 + 40 * count / largest for _, _, count in bins],
            )
            axes.set_title(
                f"{one['mode']}, {position['position']}\nECE {_percent(position['ece_before'])} → "
                f"{_percent(position['ece'])}, AUC {_percent(position['auc'])}",
                fontsize=7,
            )
    for axes in panels[-1]:
        axes.set_xlabel("survival said", fontsize=7)
    for row in panels:
        row[0].set_ylabel("share that stood", fontsize=7)
    figure.savefig(path, dpi=150)


def _by_position(rows: Mapping[str, Mapping[str, Any]]) -> Any:
    domains = _domains(rows)
    figure = _figure(3.4 * len(domains), 3.2)
    for axes, domain in zip(_panels(figure, len(domains)), domains, strict=True):
        for name, row in rows.items():
            y = row["domains"].get(domain, {}).get("acceptance_by_position", [])
            axes.plot(range(1, len(y) + 1), _numbers(y), "o-", label=name)
        axes.set_title(domain)
        axes.set_xlabel("position in the block")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("acceptance, given all before stood")
    figure.axes[0].legend(fontsize=8)
    return figure


def _taus(rows: Mapping[str, Mapping[str, Any]]) -> Any:
    domains = _domains(rows)
    figure = _figure(1.2 + 1.8 * len(domains), 3.2)
    (axes,) = _panels(figure, 1)
    width = 0.8 / len(rows)
    for place, (name, row) in enumerate(rows.items()):
        x = [i + (place - (len(rows) - 1) / 2) * width for i in range(len(domains))]
        y = [row["domains"].get(domain, {}).get("tau", math.nan) for domain in domains]
        axes.bar(x, _numbers(y), width, label=name)
    axes.set_xticks(range(len(domains)), domains)
    axes.set_ylabel("tokens a round (τ)")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
    return figure


def _gains(rows: Mapping[str, Mapping[str, Any]], baseline: str) -> Any:
    domains = _domains(rows)
    figure = _figure(1.2 + 1.8 * len(domains), 3.2)
    (axes,) = _panels(figure, 1)
    others = [name for name in rows if name != baseline]
    width = 0.8 / max(len(others), 1)
    for place, name in enumerate(others):
        x = [i + (place - (len(others) - 1) / 2) * width for i in range(len(domains))]
        y = []
        for domain in domains:
            ours, theirs = (
                rows[which]["domains"].get(domain, {}).get("tau") for which in (name, baseline)
            )
            y.append(100 * (ours / theirs - 1) if ours and theirs else math.nan)
        axes.bar(x, y, width, label=name)
    axes.axhline(0, color="0.4", linewidth=1)
    axes.set_xticks(range(len(domains)), domains)
    axes.set_ylabel(f"τ over {baseline}, %")
    axes.legend(fontsize=8)
    return figure


def _thresholds(rows: Mapping[str, Mapping[str, Any]]) -> Any:
    """For each drafter: what a threshold keeps, accepted on rejected, and its acceptance."""
    figure = _figure(4.2 * len(rows), 3.4)
    for axes, (name, row) in zip(_panels(figure, len(rows)), rows.items(), strict=True):
        sweep = row["all"]["thresholds"]
        x = [point["threshold"] for point in sweep]
        accepted = [point["accepted"] for point in sweep]
        axes.bar(x, accepted, 0.04, label="accepted")
        rejected = [point["rejected"] for point in sweep]
        axes.bar(x, rejected, 0.04, bottom=accepted, label="rejected")
        axes.set_xlabel("threshold on the confidence")
        axes.set_title(name)
        twin = axes.twinx()
        shares = _numbers([point["acceptance"] for point in sweep])
        twin.plot(x, shares, "k.-", label="acceptance")
        twin.set_ylim(0, 1)
        axes.legend(fontsize=8, loc="upper right")
    figure.axes[0].set_ylabel("verified tokens")
    return figure


def _domains(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(domain for row in rows.values() for domain in row["domains"]))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _figure(width: float, height: float) -> Any:
    """Without pyplot: no window, no state."""
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _panels(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(1, count, squeeze=False)[0])
