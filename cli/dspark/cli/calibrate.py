"""`dspark calibrate`: temperatures and offsets that make a drafter's confidences probabilities."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli import options
from dspark.cli.console import console, say
from dspark.cli.evaluate import TargetName, plain
from dspark.cli.long_work import rate_bar
from dspark.cli.target import Target
from dspark.core.errors import InvalidRequest
from dspark.core.sampling import SamplingMode

if TYPE_CHECKING:
    from dspark.training.records import Records

Ids = tuple[int, ...]


def calibrate(
    drafter: Annotated[
        Path,
        typer.Option(
            "--drafter",
            help="A checkpoint's folder; the tables are saved beside it.",
            rich_help_panel=options.TARGET,
        ),
    ],
    target: TargetName = "smollm2-135m",
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            help="Folders it was trained on, whose held-out prompts are asked; default: those that "
            "it names itself.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Lines to ask in their place, none of them trained on."),
    ] = None,
    modes: Annotated[
        str, typer.Option("--modes", help="Of greedy, rejection, coupled.")
    ] = "greedy,rejection,coupled",
    rounds: Annotated[
        int, typer.Option("--rounds", help="Of each mode, if the prompts give so many.")
    ] = 50_000,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Of the sampled modes.")
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of an answer at most.")] = 192,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Answers at once.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampling.")] = 0,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="A file for the reliability diagrams.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="A file for the figures, as JSON.")
    ] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Beside the checkpoint.")] = True,
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
) -> None:
    """Fit sequential temperature scaling (STS) for each mode on rounds of held-out prompts.

    Half of the answers fit, the other half judge what was fitted: ECE against what a perfectly
    calibrated drafter would show, AUC and Brier score by position.
    """
    chosen = _modes(modes)
    for name, value in (
        ("rounds", rounds),
        ("max_tokens", max_tokens),
        ("concurrency", concurrency),
    ):
        if value < 1:
            raise InvalidRequest(name, value, "must be at least 1")
    if not 0 < temperature <= 100:
        raise InvalidRequest("temperature", temperature, "must be in (0, 100]")
    opened = Target(target, backend, dtype, device, threads)
    model = opened.drafter(str(drafter))
    ids = _held_out(opened, drafter, data or [], prompts)
    from dspark.core.plans import CalibrationTable
    from dspark.models.drafters.calibration_file import save_calibration
    from dspark.training.calibration import fit, halves, join, judge_calibration
    from dspark.training.records import records
    from dspark.training.rounds import Asking, ask

    gamma = model.card.gamma
    tables, judged = [], []
    for mode in chosen:
        heat = 0.0 if mode is SamplingMode.GREEDY else temperature
        asking = Asking(heat, mode is SamplingMode.COUPLED, max_tokens, concurrency, seed)
        with rate_bar(f"{mode} rounds", console()) as advance:
            answers = ask(
                opened.backend,
                model,
                ids if mode is SamplingMode.GREEDY else _again(ids, rounds),
                asking,
                eos_ids=opened.eos_ids,
                enough=lambda found: found >= rounds,
                watch=lambda _done, _all, found, tell=advance: tell(  # type: ignore[misc]
                    min(found, rounds), rounds, ""
                ),
            )
        by_answer: list[Records] = [records(answer.rounds, gamma) for answer in answers]
        to_fit, to_judge = (join(part, gamma) for part in halves(by_answer))
        scaling = fit(to_fit)
        temperatures, offsets = map(tuple, scaling.tolist())
        tables.append(CalibrationTable(model.card.drafter_id, mode, temperatures, offsets))
        judged.append(plain(judge_calibration(str(mode), to_judge, scaling).to_json()))
        _tell(judged[-1], len(to_fit) + len(to_judge))
    if save:
        save_calibration(drafter, model.card.drafter_id, tables)
        say(f"saved beside {drafter}")
    if output is not None:
        from dspark.training.whole_files import write_json

        write_json(output, {"drafter": model.card.drafter_id, "modes": judged})
    if figure is not None:
        from dspark.training.pictures import draw_reliability

        draw_reliability(judged, figure)
        say(f"wrote {figure}")


def _modes(text: str) -> list[SamplingMode]:
    try:
        return list(dict.fromkeys(SamplingMode(part) for part in text.split(",")))
    except ValueError:
        raise InvalidRequest("modes", text, "must be of greedy, rejection, coupled") from None


def _held_out(opened: Target, drafter: Path, data: list[Path], prompts: Path | None) -> list[Ids]:
    """Prompts that were not trained on, each once."""
    if prompts is not None:
        return list(dict.fromkeys(p.ids for p in opened.prompts(prompts, skip_bad=False)))
    from dspark.training.sources import ShardSource, split
    from dspark.training.whole_files import read_json

    told: Any = read_json(drafter / "config.json").get("training", {})
    section = told.get("config", {}).get("data", {}) if isinstance(told, dict) else {}
    folders = data or [Path(folder) for folder in section.get("folders", [])]
    if not folders:
        raise InvalidRequest("data", [], "must be given: the drafter names no folder of data")
    share = section.get("held_out", 0.02)
    source = ShardSource(folders)
    _, held_out = split(source, float(share))
    found = (
        tuple(example.token_ids[: example.prompt_tokens].tolist())
        for example in source.examples(held_out, features=False)
    )
    ids = list(dict.fromkeys(found))
    if not ids:
        raise InvalidRequest("data", list(map(str, folders)), "hold no answer that was held out")
    say(f"{len(ids)} held-out prompts")
    return ids


def _again(ids: list[Ids], rounds: int) -> list[Ids]:
    """Prompts over and over: each time another answer. At least one round an answer is sure."""
    return list(itertools.islice(itertools.cycle(ids), max(rounds, len(ids))))


def _tell(judged: dict[str, Any], rounds: int) -> None:
    table = Table(title=f"{judged['mode']}, {rounds} rounds, judged on half of them")
    columns = ("k", "t", "offset", "stood", "ECE", "after", "perfect")
    for column in (*columns, "AUC", "Brier"):
        table.add_column(column, justify="right")
    rows = zip(judged["temperatures"], judged["offsets"], judged["positions"], strict=True)
    for t, b, row in rows:
        table.add_row(
            str(row["position"]),
            f"{t:.3f}",
            f"{b:+.3f}",
            *(_percent(row[key]) for key in ("stood", "ece_before", "ece", "ece_perfect")),
            "–" if row["auc"] is None else f"{row['auc']:.3f}",
            "–" if row["brier"] is None else f"{row['brier']:.4f}",
        )
    Console(highlight=False, markup=False, emoji=False).print(table)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
