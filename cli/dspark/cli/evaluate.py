"""`dspark eval`: what a drafter is worth on benchmarks; `dspark eval trace`: round by round."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli import options
from dspark.cli.console import console, say
from dspark.cli.inputs import parse_ids
from dspark.cli.long_work import rate_bar
from dspark.cli.target import Target
from dspark.core.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np

    from dspark.core.drafts import Drafter

app = typer.Typer(
    name="eval",
    help="Measure drafters on benchmarks.",
    invoke_without_command=True,
    no_args_is_help=True,
)

DrafterFolder = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="A folder, a hub id, or ngram.",
        rich_help_panel=options.TARGET,
    ),
]
TargetName = Annotated[
    str,
    typer.Option(
        "--target",
        "--model",
        help="A name of `dspark models`, a directory, a GGUF file or a hub id.",
        rich_help_panel=options.TARGET,
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(
        "--candidates",
        help="Of the sequential head; 0 is the whole vocabulary. Default: what it serves with.",
        rich_help_panel=options.TARGET,
    ),
]


@app.callback()
def evaluate(
    context: typer.Context,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts", help='A benchmark\'s {"prompt": …} lines, or a folder of *.jsonl; repeat.'
        ),
    ] = None,
    drafter: DrafterFolder = "",
    target: TargetName = "smollm2-135m",
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Separated by commas.")
    ] = "0,1",
    coupled: Annotated[
        bool,
        typer.Option("--coupled", help="Seeded requests above temperature 0, not rejection."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Prompts of each benchmark at most.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of an answer at most.")] = 192,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Answers at once.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampling.")] = 0,
    gamma: options.Gamma = 7,
    candidates: Candidates = None,
    name: Annotated[str | None, typer.Option("--name", help="What figures call it.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="A file for the result, as JSON.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="A folder for figures 2, 3 and 5.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
) -> None:
    """Answer benchmarks with every block verified whole, and count.

    τ is tokens a round, the bonus token counted; acceptance at a position is given that all before
    it stood; thresholds say what a cut on the confidence would have kept.
    """
    if context.invoked_subcommand is not None:
        return
    if not drafter:
        raise InvalidRequest("drafter", "", "must be given")
    heats = _temperatures(temperatures)
    for field, value in (
        ("max_tokens", max_tokens),
        ("concurrency", concurrency),
        ("limit", limit),
    ):
        if value is not None and value < 1:
            raise InvalidRequest(field, value, "must be at least 1")
    files = _files(prompts or [])
    opened = Target(target, backend, dtype, device, threads)
    model = opened.drafter(drafter, gamma=gamma, candidates=candidates)
    from dspark.training.evaluation import Asked, report
    from dspark.training.rounds import Asking, ask

    asked = []
    for file in files:
        ids = [prompt.ids for prompt in opened.prompts(file, skip_bad=False)][:limit]
        for heat in heats:
            asking = Asking(heat, coupled, max_tokens, concurrency, seed)
            with rate_bar(f"{file.stem} at {heat:g}", console()) as advance:
                answers = ask(
                    opened.backend,
                    model,
                    ids,
                    asking,
                    eos_ids=opened.eos_ids,
                    watch=lambda done, whole, rounds, tell=advance: tell(  # type: ignore[misc]
                        done, whole, f"{rounds} rounds"
                    ),
                )
            asked.append(Asked(file.stem, heat, answers))
    card = model.card
    sampled = "coupled" if coupled else "rejection"
    by_mode = {
        "greedy": _calibration(model, "greedy", card.gamma),
        "sampled": _calibration(model, sampled, card.gamma),
    }
    result = plain(
        {
            "name": name or card.drafter_id,
            "drafter": {"id": card.drafter_id, "kind": card.kind, "gamma": card.gamma},
            "target": {
                "name": target,
                "target_id": opened.backend.target_id,
                "dtype": opened.config.dtype,
            },
            "candidates": candidates,
            "mode": sampled,
            "max_tokens": max_tokens,
            "calibrated": {mode: scaling.tolist() for mode, scaling in by_mode.items()},
            "temperatures": report(asked, card.gamma, by_mode),
        }
    )
    if output is not None:
        from dspark.training.whole_files import write_json

        write_json(output, result)
    if figures is not None:
        from dspark.training.pictures import draw_figures

        for path in draw_figures({result["name"]: result}, figures):
            say(f"wrote {path}")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _tell(result)


@app.command("plot")
def plot(
    results: Annotated[list[Path], typer.Argument(help="Files of `dspark eval --output`.")],
    output: Annotated[Path, typer.Option("--output", help="A folder for the figures.")],
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Whose gains figure 4 is over.")
    ] = None,
) -> None:
    """Draw figures 2 to 5 of several drafters together."""
    from dspark.training.pictures import draw_figures
    from dspark.training.whole_files import read_json

    read = {}
    for path in results:
        result = read_json(path)
        read[result.get("name", path.stem)] = result
    if baseline is not None and baseline not in read:
        raise InvalidRequest("baseline", baseline, f"is not one of: {', '.join(read)}")
    for path in draw_figures(read, output, baseline=baseline):
        say(f"wrote {path}")


@app.command("trace")
def trace(
    drafter: DrafterFolder,
    prompt_ids: Annotated[
        str, typer.Option("--prompt-ids", help="The prompt as a JSON list of token ids.")
    ],
    target: TargetName = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of the answer.")] = 64,
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print each round of one greedy answer: anchor, draft, raw confidences, how many stood.

    Blocks are verified whole, also past --max-tokens, and drafted over the whole vocabulary.
    """
    if max_tokens < 1:
        raise InvalidRequest("max_tokens", max_tokens, "must be at least 1")
    ids = parse_ids(prompt_ids).ids
    if not ids:
        raise InvalidRequest("prompt_ids", [], "is empty")
    opened = Target(target, backend, dtype, device, threads)
    from dspark.training.trace import trace as follow

    found = follow(
        opened.backend,
        opened.drafter(drafter, candidates=0),
        ids,
        max_tokens,
        eos_ids=opened.eos_ids,
    )
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table("start", "anchor", "draft", "accepted")
    for one in found["rounds"]:
        draft = " ".join(map(str, one["draft"]))
        table.add_row(str(one["start"]), str(one["anchor"]), draft, str(one["accepted"]))
    Console(highlight=False, markup=False, emoji=False).print(table)


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= heat <= 100 for heat in found):
        raise InvalidRequest("temperatures", text, "must be numbers in [0, 100], as 0,1")
    return list(dict.fromkeys(found))


def _files(paths: list[Path]) -> list[Path]:
    found = [
        file
        for path in paths
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
    if not found:
        raise InvalidRequest("prompts", [str(p) for p in paths], "name no *.jsonl file")
    return found


def _calibration(drafter: Drafter, mode: str, gamma: int) -> np.ndarray:
    """The scaling that came with the drafter, one that changes nothing without any."""
    from dspark.core.plans import Calibration
    from dspark.core.sampling import SamplingMode
    from dspark.scheduler.calibration import scaling_for

    tables = getattr(drafter, "calibration", ())
    return scaling_for(Calibration(0, tables), drafter.card.drafter_id, SamplingMode(mode), gamma)


def plain(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def _tell(result: dict[str, Any]) -> None:
    out = Console(highlight=False, markup=False, emoji=False)
    for row in result["temperatures"]:
        table = Table(title=f"{result['name']}, temperature {row['temperature']:g}")
        for column in ("", "answers", "rounds", "τ", "acceptance by position, %"):
            table.add_column(column)
        groups = {**row["benchmarks"], **row["domains"], "all": row["all"]}
        for name, found in groups.items():
            positions = " ".join(
                "–" if x is None else f"{100 * x:.0f}" for x in found["acceptance_by_position"]
            )
            tau = "–" if found["tau"] is None else f"{found['tau']:.3f}"
            table.add_row(name, str(found["answers"]), str(found["rounds"]), tau, positions)
        out.print(table)
