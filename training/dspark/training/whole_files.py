"""Files that are whole or absent, whoever is killed when."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.training.errors import DataError, writing


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path to write; what stands there becomes `path` when the block ends well.

    It is synced and renamed, so a kill at any moment leaves the old `path` or the new one. A
    leftover of a killed process is `.<name>.partial`, which nobody reads and the next one replaces.
    Raises `DataError`.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
            sync_directory(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """`value` as one whole JSON file."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `DataError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: is not a JSON object")
    return value


def sync_directory(directory: Path) -> None:
    """A rename in it survives a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
