"""What a sweep found, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.cli.bench import report
from dspark.cli.bench.engine_load import Part, Work
from dspark.cli.bench.pareto import Point, matched
from dspark.cli.bench.regret import Play, oracle, regret, score
from dspark.cli.bench.replay import play, search
from dspark.cli.bench.stats import paired_ratio, percentiles
from dspark.cli.bench.sweeping import SweepCell

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.scheduler import StepCost

PLAIN = "none"
# The paper's baseline: one draft token (MTP-1), always verified.
BASELINE = "fixed:1"

RULES = (
    "engines run in this process; answers are greedy and exactly max_tokens long",
    "each policy has an engine of its own at each load, over shared weights: made anew, warmed up "
    "unmeasured, kept for all rounds; none has another's drafter state, step cost or savings",
    "none has no drafter at all; fixed:N asks its drafter for N tokens only, the others for gamma",
    "each prompt begins with a token that no other has, so that no prefix cache answers for the "
    "model (checked); every policy gets the same prompts in a round",
    "policies take turns, forwards and backwards",
    "throughput, steps and draft tokens are counted until the first user has nothing more to ask, "
    "tokens of answers under way then by the share of their time",
    "tokens_per_s_per_user is 1 / the median tpot_s, from an answer's first token to its last",
    "mean_verify_length is draft tokens verified a round (the anchor not counted), accepted_length "
    "tokens committed a round (the bonus token counted); rounds without a draft count",
    "ratios are paired by round: geometric mean and bootstrap 95 % interval; best_fixed is the "
    "fixed policy with the highest throughput of these very rounds, which favours it",
    "pareto: each policy at its best concurrency for each speed, straight lines between loads",
    "regret: rounds recorded once a load with whole blocks drafted; each policy's planner and an "
    "oracle that knows what is accepted choose lengths on these same rounds, steps cost what was "
    "profiled; 1 - (tokens a second of the planner) / (of the best choice there is); by_survival "
    "is the full search with the same survivals: what it misses, they did not foretell",
)

COMPARED: Mapping[str, Callable[[Part], float]] = {
    "throughput": lambda part: part.slice.throughput,
    "tokens_per_s_per_user": lambda part: per_user(part),
}


def per_user(part: Part) -> float:
    """1 / median TPOT."""
    return 1 / percentiles([answer.tpot_s for answer in part.slice.answers])["p50"]


def results(
    cells: Sequence[SweepCell], cost: StepCost, max_step_tokens: int
) -> list[dict[str, Any]]:
    """One object a load with at least one whole round."""
    return [_result(cell, cost, max_step_tokens) for cell in cells if cell.rounds]


def _result(cell: SweepCell, cost: StepCost, max_step_tokens: int) -> dict[str, Any]:
    names = list(cell.rounds[0])
    parts = {name: [row[name] for row in cell.rounds] for name in names}
    best = best_fixed(parts)
    rivals = {PLAIN: PLAIN, "best_fixed": best, BASELINE: BASELINE}
    return {
        "load": {"kind": "closed", "concurrency": cell.users},
        "rounds": len(cell.rounds),
        "best_fixed": best,
        "arms": {name: figures(parts[name]) for name in names},
        "ratios": {
            name: {
                rival: _ratios(parts[name], parts[other])
                for rival, other in rivals.items()
                if other in parts and other != name
            }
            for name in names
        },
        "regret": _regrets(cell, names, cost, max_step_tokens),
    }


def best_fixed(parts: Mapping[str, Sequence[Part]]) -> str | None:
    """Of the policies fixed:N the one with the highest throughput, None without any."""

    def speed(name: str) -> float:
        return float(np.mean(np.log([part.slice.throughput for part in parts[name]])))

    return max((name for name in parts if name.startswith("fixed:")), key=speed, default=None)


def _ratios(ours: Sequence[Part], theirs: Sequence[Part]) -> dict[str, Any]:
    return {
        what: asdict(paired_ratio([of(part) for part in ours], [of(part) for part in theirs]))
        for what, of in COMPARED.items()
    }


def figures(parts: Sequence[Part]) -> dict[str, Any]:
    """Of one policy at one load, over all its rounds."""
    work = sum((part.work for part in parts), Work())
    seconds = sum(part.slice.counted_s for part in parts)
    found = report.figures([part.slice for part in parts])
    del found["client_cpu_share"]  # nobody but the engine runs
    return found | {
        "tokens_per_s_per_user_by_round": [per_user(part) for part in parts],
        "accepted_length": work.accepted_length,
        "mean_verify_length": work.mean_verify_length,
        "verify_rounds": work.rounds,
        "drafted": work.drafted,
        "verified": work.verified,
        "accepted": work.accepted,
        "steps": work.steps,
        "step_s": seconds / work.steps,
        "forward_s": work.forward_s / work.steps,
        "draft_s": work.draft_s / work.steps,
        "decoding_a_step": work.rounds / work.steps,
        "prefill_tokens_a_step": work.prefill_tokens / work.steps,
    }


def _regrets(
    cell: SweepCell, names: Sequence[str], cost: StepCost, max_step_tokens: int
) -> dict[str, Any] | None:
    """Of each policy on the recorded rounds; None where nothing was recorded."""
    if cell.recording is None or not cell.recording.steps:
        return None
    steps, draft_s = cell.recording.steps, cell.recording.draft_s
    best = oracle(steps, cost, draft_s)

    def judged(plays: Sequence[Play]) -> dict[str, Any]:
        scored = score(steps, plays, cost, draft_s)
        return {
            "regret": regret(scored, best),
            "tokens_per_s": scored.rate,
            "verified": sum(sum(each.lengths) for each in plays),
            "asked": sum(each.asked for each in plays),
        }

    rounds = [known for step in steps for known in step.rounds]
    return {
        "steps": len(steps),
        "rounds": len(rounds),
        "draft_s": draft_s,
        "acceptable": sum(known.accepted for known in rounds),
        "oracle": {"tokens_per_s": best.rate, "verified": best.tokens - len(rounds)},
        "by_survival": judged(search(steps, cost, max_step_tokens)),
        "policies": {
            name: judged(play(steps, name, cost, max_step_tokens, draft_s)) for name in names
        },
    }


def pareto(cells: Sequence[SweepCell]) -> dict[str, list[dict[str, Any]]]:
    """By policy, at each load of the baseline: what it gives more at the same speed for a user, and
    at the same throughput. Of rounds that every load has; empty without the baseline."""
    done = [cell for cell in cells if cell.rounds]
    if not done or BASELINE not in done[0].rounds[0]:
        return {}

    def curves(name: str) -> list[list[Point]]:
        whole = min(len(cell.rounds) for cell in done)
        return [[_point(cell.rounds[i][name]) for cell in done] for i in range(whole)]

    baseline = curves(BASELINE)
    return {
        name: [
            {"concurrency": cell.users, **asdict(entry)}
            for cell, entry in zip(done, matched(curves(name), baseline), strict=True)
        ]
        for name in done[0].rounds[0]
        if name != BASELINE
    }


def _point(part: Part) -> Point:
    return Point(per_user(part), part.slice.throughput)


def show(
    found: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    out: Console,
) -> None:
    """A table a load, and one of the curves."""
    from rich.table import Table

    for result in found:
        best = result["best_fixed"]
        heads = [
            *("", "tokens/s", "/s/user", "ℓ", "τ", "drafted", "verified", "accepted", "step ms"),
            *("× none", f"× best fixed ({best})" if best else "× best fixed", "regret"),
        ]
        regrets = result["regret"]
        table = Table(title=report.told(result["load"]), title_justify="left")
        for head in heads:
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        for name, arm in result["arms"].items():
            ratios = result["ratios"][name]
            table.add_row(
                name,
                f"{arm['throughput_tokens_per_s']:.1f}",
                f"{arm['tokens_per_s_per_user']:.1f}",
                f"{arm['mean_verify_length']:.2f}",
                f"{arm['accepted_length']:.2f}",
                *(str(arm[count]) for count in ("drafted", "verified", "accepted")),
                f"{1e3 * arm['step_s']:.1f}",
                *(
                    report.times(ratios.get(rival, {}).get("throughput"))
                    for rival in (PLAIN, "best_fixed")
                ),
                f"{regrets['policies'][name]['regret']:.1%}" if regrets else "–",
            )
        out.print(table)
        if regrets:
            out.print(f"a full search by survivals: {regrets['by_survival']['regret']:.1%} regret")
    _show_curves(curves, out)
    out.print("ℓ: draft tokens verified a round. τ: tokens committed a round. regret: behind an "
              "oracle that knows what is accepted")  # fmt: skip


def _show_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], out: Console) -> None:
    from rich.table import Table

    if not curves:
        return
    title = f"against {BASELINE}: throughput at its speed for a user; that speed at its throughput"
    table = Table(title=title, title_justify="left")
    for head in (BASELINE, *curves):
        table.add_column(head, justify="left" if head == BASELINE else "right", no_wrap=True)
    for rows in zip(*curves.values(), strict=True):
        there = rows[0]
        table.add_row(
            f"{there['concurrency']} at once: {there['throughput']:.1f} tokens/s, "
            f"{there['per_user']:.1f}/s/user",
            *(f"{_reached(r['more_throughput'])}; {_reached(r['more_per_user'])}" for r in rows),
        )
    out.print(table)


def _reached(ratio: Mapping[str, Any] | None) -> str:
    return report.times(ratio) or "–"
