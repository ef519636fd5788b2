"""How confidence logits are scaled, beside a drafter's checkpoint (§3.2.1, STS)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from dspark.core.errors import ModelError
from dspark.core.plans import CalibrationTable
from dspark.core.sampling import SamplingMode
from dspark.models.drafters.checkpoint_files import write_json

CALIBRATION = "calibration.json"


def read_calibration(directory: Path, drafter_id: str) -> tuple[CalibrationTable, ...]:
    """Tables by mode; none if the checkpoint was never calibrated.

    Raises ModelError for a file that is not what `save_calibration` writes, or of another drafter.
    """
    file = directory / CALIBRATION
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        of, offsets = facts["drafter_id"], facts.get("offsets", {})
        read = tuple(
            CalibrationTable(
                drafter_id,
                SamplingMode(mode),
                tuple(map(float, temperatures)),
                tuple(map(float, offsets.get(mode, ()))),
            )
            for mode, temperatures in facts["temperatures"].items()
        )
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file}: is not a calibration: {error!r}") from error
    if of != drafter_id:
        raise ModelError(f"{file}: is of the drafter {of!r}, the checkpoint is {drafter_id!r}")
    _check(file, read)
    return read


def save_calibration(directory: Path, drafter_id: str, tables: Sequence[CalibrationTable]) -> None:
    """Put tables beside a checkpoint, in place of any before. Raises ModelError."""
    file = directory / CALIBRATION
    _check(file, tables)
    if others := {table.drafter_id for table in tables} - {drafter_id}:
        raise ModelError(f"{file}: a table of {min(others)!r}, the checkpoint is {drafter_id!r}")
    room = file.with_suffix(".partial")
    facts = {
        "drafter_id": drafter_id,
        "temperatures": {str(table.mode): list(table.temperatures) for table in tables},
        "offsets": {str(table.mode): list(table.offsets) for table in tables if table.offsets},
    }
    try:
        write_json(room, facts)
        with room.open("rb") as opened:
            os.fsync(opened.fileno())
        room.replace(file)
    except OSError as error:
        room.unlink(missing_ok=True)
        raise ModelError(f"{file}: cannot be written: {error.strerror}") from error


def _check(file: Path, tables: Sequence[CalibrationTable]) -> None:
    for table in tables:
        if (fault := table.fault()) is not None:
            field, value, limit = fault
            raise ModelError(f"{file}: {table.mode}: {field}: {value!r} {limit}")
