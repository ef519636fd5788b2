"""The figures of a run by step: `curve.jsonl`, and TensorBoard's event files if asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError
from dspark.training.errors import writing
from dspark.training.whole_files import whole_file

FILE = "curve.jsonl"


class Curve:
    """One line a step and kind ("train" or "held_out"). Lines after `step` are cut off first: a run
    that goes on from a checkpoint writes them again, and so they stand there once."""

    def __init__(self, run: Path, step: int, *, tensorboard: bool = False) -> None:
        self._file = run / FILE
        kept = [line for line in read_curve(run) if line["step"] <= step]
        with whole_file(self._file) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._board: Any = _board(run, step) if tensorboard else None

    def add(self, step: int, kind: str, figures: Mapping[str, Any]) -> None:
        with writing(self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": kind, **figures}) + "\n")
        if self._board is not None:
            for name, value in figures.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def read_curve(run: Path) -> list[dict[str, Any]]:
    """All whole lines; a last one that a kill cut short is left out."""
    file = run / FILE
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _board(run: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "run.tensorboard: needs the package tensorboard: pip install 'dspark[train]'"
        ) from None
    return SummaryWriter(run / "tensorboard", purge_step=step + 1)
