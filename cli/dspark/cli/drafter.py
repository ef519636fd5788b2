"""`dspark drafter export`: a trained drafter's checkpoint in another format or precision."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import options
from dspark.cli.console import say
from dspark.cli.evaluate import TargetName

app = typer.Typer(name="drafter", help="Checkpoints of trained drafters.", no_args_is_help=True)


class Format(StrEnum):
    DSPARK = "dspark"
    DEEPSPEC = "deepspec"


class Precision(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.callback()
def root() -> None:
    """Checkpoints of trained drafters."""


@app.command()
def export(
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter",
            help="A folder or a hub id, of either format.",
            rich_help_panel=options.TARGET,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", help="The folder to make.")],
    target: TargetName = "smollm2-135m",
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="dspark leaves embedding and LM head to the target and keeps draft vocabulary and "
            "calibration; deepspec is the public format, which is whole.",
        ),
    ] = Format.DSPARK,
    dtype: Annotated[
        Precision, typer.Option("--dtype", help="Of the tensors in the file.")
    ] = Precision.FLOAT32,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where something stands already.")
    ] = False,
) -> None:
    """Write a drafter's checkpoint in another format or precision, whole or not at all.

    A drafter of other numbers is another drafter: its calibration is kept only if they stay the
    same, else `dspark calibrate` makes it again.
    """
    from dataclasses import replace as with_

    import torch

    from dspark.models import resolve
    from dspark.models.drafters.calibration_file import save_calibration
    from dspark.models.drafters.checkpoint import export_deepspec, load_checkpoint, save_checkpoint
    from dspark.models.drafters.target_tensors import TargetTensors

    tensors = TargetTensors.read(resolve(target, progress=say))
    checkpoint = load_checkpoint(resolve(drafter, progress=say), tensors)
    precision = getattr(torch, dtype.value)
    if form is Format.DEEPSPEC:
        export_deepspec(output, checkpoint, tensors, dtype=precision, replace=replace)
        say(f"wrote {output}")
        return
    facts = with_(
        checkpoint.target,
        name=checkpoint.target.name or target,
        embedding_hash=tensors.embedding_hash,
        head_hash=tensors.head_hash,
    )
    drafter_id = save_checkpoint(
        output,
        checkpoint.model,
        facts,
        training=checkpoint.training,
        dtype=precision,
        replace=replace,
    )
    if drafter_id == checkpoint.drafter_id:
        if checkpoint.calibration:
            save_calibration(output, drafter_id, checkpoint.calibration)
    elif checkpoint.calibration:
        say("its calibration is of other numbers: make it again with `dspark calibrate`")
    say(f"wrote {output}: {drafter_id}")
