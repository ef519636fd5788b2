"""`dspark train`: a drafter from answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli.console import console, say
from dspark.cli.long_work import rate_bar
from dspark.core.errors import InvalidRequest

if TYPE_CHECKING:
    from dspark.training.trainer import StepReport


def train(
    config_file: Annotated[
        Path, typer.Option("--config", help="TOML; examples/train/*.toml show all of it.")
    ],
    workers: Annotated[
        int, typer.Option("--workers", help="Processes on Ray Train; 1 needs no Ray.")
    ] = 1,
    threads: Annotated[int, typer.Option("--threads", help="0 takes all cores.")] = 0,
    stop_at: Annotated[
        int | None, typer.Option("--stop-at", help="Stop after this step; go on another time.")
    ] = None,
) -> None:
    """Train a drafter, from where the run's folder stands to its last step.

    May be stopped at any time: the same command goes on from the last checkpoint with the same
    curve. Each checkpoint holds a drafter to serve, in its folder `drafter`.
    """
    if workers < 1:
        raise InvalidRequest("workers", workers, "must be at least 1")
    from dspark.training.config import read_config

    config = read_config(config_file)
    if threads:
        import torch

        torch.set_num_threads(threads)
    from dspark.training.training_run import Watch

    with rate_bar("training", console()) as advance:
        smooth = _Smooth(config.training.steps, advance)
        watch = Watch(line=say, step=smooth.step, held_out=_tell)
        if workers > 1:
            from dspark.training.ray_workers import train_on_ray

            outcome = train_on_ray(config, workers, threads=threads, stop_at=stop_at, watch=watch)
        else:
            from dspark.training.training_run import train as run

            outcome = run(config, watch=watch, stop_at=stop_at)
    spent = outcome.spent
    say(
        f"{outcome.step} steps done: {spent['tokens']:,.0f} block tokens, "
        f"{spent['flops'] / 1e12:,.1f} TFLOP, {spent['seconds']:,.0f} s; "
        f"the drafter is {outcome.drafter}"
    )


class _Smooth:
    """Loss and rate over the last steps."""

    def __init__(self, steps: int, advance: Any) -> None:
        self._steps, self._advance = steps, advance
        self._loss: float | None = None
        self._rate = 0.0

    def step(self, report: StepReport) -> None:
        loss, rate = report.figures["loss"], report.block_tokens / max(report.seconds, 1e-9)
        if self._loss is None:
            self._loss, self._rate = loss, rate
        self._loss = 0.95 * self._loss + 0.05 * loss
        self._rate = 0.95 * self._rate + 0.05 * rate
        note = f"loss {self._loss:.4f}, {self._rate:,.0f} block tokens/s"
        self._advance(report.step, self._steps, note)


def _tell(step: int, figures: dict[str, Any]) -> None:
    accepted = " ".join(f"{100 * x:.0f}" for x in figures["accepted"])
    say(
        f"step {step}, held out: loss {figures['loss']:.4f}, greedy tau {figures['tau']:.3f}, "
        f"stand up to position 1, 2, …: {accepted} %"
    )
