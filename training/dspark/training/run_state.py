"""What a run needs to go on exactly where it was: a folder a checkpoint, each whole or absent.

    state-00000200/drafter/               the drafter, as anybody loads it
    state-00000200/optimizer.safetensors  moments of AdamW by parameter
    state-00000200/state.json             step, and what the run was started with

Anchors, order and schedule are functions of seed and step, so no generator's state is kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dspark.core.errors import ModelError
from dspark.models.drafters.checkpoint import TargetFacts, save_checkpoint
from dspark.models.drafters.trunk import Trunk
from dspark.training.errors import DataError, writing
from dspark.training.whole_files import read_json, sync_directory, write_json

DRAFTER = "drafter"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"
_PREFIX = "state-"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class RunState:
    """A checkpoint on disk: step, its folder, and what the run was started with."""

    step: int
    folder: Path
    facts: dict[str, Any]

    @property
    def drafter(self) -> Path:
        return self.folder / DRAFTER


def states(run: Path) -> list[RunState]:
    """The checkpoints of a run, oldest first. Raises DataError for one that cannot be read."""
    found = []
    for folder in sorted(run.glob(f"{_PREFIX}*")):
        facts = read_json(folder / _STATE)
        found.append(RunState(int(folder.name.removeprefix(_PREFIX)), folder, facts))
    return found


def save_state(
    run: Path,
    step: int,
    model: Trunk,
    optimizer: torch.optim.Optimizer,
    target: TargetFacts,
    facts: Mapping[str, Any],
    training: Mapping[str, Any],
    *,
    keep: int,
) -> RunState:
    """Write a checkpoint, then drop all but the newest `keep`. Raises DataError."""
    folder = run / f"{_PREFIX}{step:08d}"
    room = run / f".{folder.name}.partial"
    with writing(folder):
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir(parents=True)
        try:
            save_checkpoint(room / DRAFTER, model, target, training=training)
            save_file(_moments(model, optimizer), room / _OPTIMIZER)
            write_json(room / _STATE, {"step": step, **facts})
            with (room / _OPTIMIZER).open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(room)
            shutil.rmtree(folder, ignore_errors=True)
            room.rename(folder)
            sync_directory(run)
        except (ModelError, SafetensorError) as error:
            raise DataError(f"{folder}: cannot be written: {error}") from error
        finally:
            shutil.rmtree(room, ignore_errors=True)
    for old in states(run)[:-keep]:
        shutil.rmtree(old.folder, ignore_errors=True)
    return RunState(step, folder, dict(facts))


def load_optimizer(state: RunState, model: Trunk, optimizer: torch.optim.Optimizer) -> None:
    """Moments of a checkpoint into a fresh optimizer of the same parameters. Raises DataError."""
    file = state.folder / _OPTIMIZER
    try:
        held = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file}: is damaged or cut short ({type(error).__name__})") from error
    for name, parameter in trained(model).items():
        try:
            optimizer.state[parameter] = {
                part: held[f"{part}.{name}"].to(parameter.device) for part in _MOMENTS
            }
        except KeyError as error:
            raise DataError(f"{file}: lacks {error.args[0]}") from None


def _moments(model: Trunk, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": optimizer.state[parameter][part].cpu().contiguous()
        for name, parameter in trained(model).items()
        for part in _MOMENTS
        if parameter in optimizer.state
    }


def trained(model: Trunk) -> dict[str, torch.nn.Parameter]:
    """By name, the parameters that are not the target's."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
