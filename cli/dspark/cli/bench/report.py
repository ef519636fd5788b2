"""What was measured, as JSON and as tables."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dspark.cli.bench.load import Answered, Load, Open, Slice
from dspark.cli.bench.measure import Cell
from dspark.cli.bench.stats import paired_ratio, percentiles

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("dspark", "torch", "transformers", "xllamacpp", "httpx", "numpy")

RULES = (
    "answers are greedy and exactly max_tokens long: every server goes on past the model's end",
    "a token's time is that of the chunk that brought it; chunks count by the tokens they hold, "
    "and their sum must be what the server's usage says",
    "ttft_s runs from the request (in an open loop from when it was due) to the first token, and "
    "tpot_s from the first token to the last, over the tokens after the first",
    "tokens_per_s_per_user is 1 / the median tpot_s",
    "throughput counts the tokens of a closed loop until its first user has nothing more to ask, "
    "those of answers under way then by the share of their time, of an open loop all",
    "each prompt begins with a line that no other has, so that no prefix cache answers for the "
    "model; every arm gets the same prompts in a round",
    "arms take turns, forwards and backwards; those that wait are stopped (SIGSTOP); the first "
    "answer after each pause and a warm-up before the rounds are not measured",
    "ratios are ours over theirs, paired by round: geometric mean and bootstrap 95 % interval",
)

# What is compared, by round; above 1 is more of it.
COMPARED: Mapping[str, Callable[[Slice], float]] = {
    "throughput": lambda s: s.throughput,
    "ttft_p50": lambda s: percentiles([a.ttft_s for a in s.answers])["p50"],
    "tpot_p50": lambda s: percentiles([a.tpot_s for a in s.answers])["p50"],
}


def surroundings() -> dict[str, Any]:
    """When, where and with what. Taken before the load begins, which would show in the average."""
    from dspark.scheduler import hardware

    return {
        "command": shlex.join(["dspark", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "hardware": hardware(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
            "load_average_before": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "rules": list(RULES),
    }


def results(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One object a load that has at least one whole round; ratios are of the first arm over each
    other."""
    return [_result(cell) for cell in cells if cell.rounds]


def _result(cell: Cell) -> dict[str, Any]:
    ours, *others = cell.rounds[0]
    slices = {name: [row[name] for row in cell.rounds] for name in (ours, *others)}
    return {
        "load": _load(cell.load),
        "arms": {name: {**figures(slices[name]), **cell.facts[name]} for name in slices},
        "ratios": {
            other: {
                what: asdict(paired_ratio(_each(of, slices[ours]), _each(of, slices[other])))
                for what, of in COMPARED.items()
                if min(*_each(of, slices[ours]), *_each(of, slices[other])) > 0
            }
            for other in others
        },
    }


def figures(slices: Sequence[Slice]) -> dict[str, Any]:
    """Of one arm under one load, over all its rounds."""
    answers = [answer for part in slices for answer in part.answers]
    seconds = sum(part.seconds for part in slices)
    tpot = percentiles([answer.tpot_s for answer in answers])
    return {
        "requests": len(answers),
        "prompt_tokens": sum(answer.usage.prompt_tokens for answer in answers),
        "completion_tokens": sum(part.tokens for part in slices),
        "throughput_tokens_per_s": (
            sum(part.counted_tokens for part in slices) / sum(part.counted_s for part in slices)
        ),
        "throughput_by_round": [part.throughput for part in slices],
        "tokens_per_s_per_user": 1 / tpot["p50"] if tpot["p50"] else None,
        "ttft_s": percentiles([answer.ttft_s for answer in answers]),
        "tpot_s": tpot,
        "accepted_length": accepted_length(answers),
        "client_cpu_share": sum(part.client_s for part in slices) / seconds,
    }


def accepted_length(answers: Sequence[Answered]) -> float | None:
    """τ: tokens a verify round committed, the bonus token counted; None without speculation."""
    rounds = sum(answer.usage.rounds for answer in answers)
    return 1 + sum(answer.usage.accepted for answer in answers) / rounds if rounds else None


def warnings(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes the arms of a load differ in more than speed."""
    return [
        f"{told(result['load'])}: prompts are not equally long: {counts} tokens"
        for result in found
        if len(set((counts := {n: a["prompt_tokens"] for n, a in result["arms"].items()}).values()))
        > 1
    ]


def show(found: Sequence[Mapping[str, Any]], out: Console) -> None:
    """A table a load."""
    from rich.table import Table

    for result in found:
        table = Table(title=told(result["load"]), title_justify="left")
        for column in ("", "tokens/s", "/s/user", "TTFT ms", "TPOT ms", "τ", "ours is"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for name, arm in result["arms"].items():
            speed, tau = arm["tokens_per_s_per_user"], arm["accepted_length"]
            table.add_row(
                name,
                f"{arm['throughput_tokens_per_s']:.1f}",
                f"{speed:.1f}" if speed else "–",
                _milliseconds(arm["ttft_s"]),
                _milliseconds(arm["tpot_s"]),
                f"{tau:.2f}" if tau else "–",
                times(result["ratios"].get(name, {}).get("throughput")),
            )
        out.print(table)
    out.print(
        "TTFT, TPOT: p50 / p90 / p99. τ: tokens a verify round. ours is: times their tokens/s"
    )


def told(load: Mapping[str, Any]) -> str:
    if load["kind"] == "open":
        return f"open loop, {load['requests_per_s']:g} requests/s"
    return f"closed loop, {load['concurrency']} at once"


def _load(load: Load) -> dict[str, Any]:
    if isinstance(load, Open):
        return {"kind": "open", "requests_per_s": load.rate}
    return {"kind": "closed", "concurrency": load.users}


def _each(of: Callable[[Slice], float], slices: Sequence[Slice]) -> list[float]:
    return [of(part) for part in slices]


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _milliseconds(points: Mapping[str, float]) -> str:
    return f"{1e3 * points['p50']:.0f} / {1e3 * points['p99']:.0f}"


def times(ratio: Mapping[str, Any] | None) -> str:
    """A `Ratio` in words, nothing for none."""
    if ratio is None:
        return ""
    if ratio["low"] is None:
        return f"{ratio['ratio']:.2f}×"
    return f"{ratio['ratio']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})"
