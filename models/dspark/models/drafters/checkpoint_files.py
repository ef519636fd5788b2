"""Files of a drafter's checkpoint: strict reading, and writing that is whole or did not happen."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dspark.core.errors import ModelError
from dspark.models.checkpoint import check_checkpoint, summary

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

# Out of space, out of quota, above the process's file size limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Tensors = dict[str, torch.Tensor]


def read_files(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and all tensors, in the dtypes they are stored in.

    Raises ModelError for a file that is missing, damaged or cut short.
    """
    facts = check_checkpoint(directory)
    single = directory / WEIGHTS
    files = [single] if single.is_file() else sorted(directory.glob("model-*.safetensors"))
    tensors: Tensors = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as held:
                tensors.update({name: held.get_tensor(name) for name in held.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read: {summary(error)}") from error
    return facts, tensors


def check_tensors(
    directory: Path, held: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Size]
) -> None:
    """Raises ModelError unless the tensors are just those wanted, of their shapes, and floats."""
    if missing := sorted(set(wanted) - set(held)):
        raise ModelError(
            f"{directory}: lacks {len(missing)} tensors that its configuration asks for, "
            f"first {missing[0]}"
        )
    if unknown := sorted(set(held) - set(wanted)):
        raise ModelError(
            f"{directory}: holds {len(unknown)} tensors that its configuration does not know, "
            f"first {unknown[0]}"
        )
    for name in sorted(wanted):
        if held[name].shape != wanted[name]:
            raise ModelError(
                f"{directory}: {name} has shape {list(held[name].shape)} instead of "
                f"{list(wanted[name])}"
            )
        if not held[name].is_floating_point():
            raise ModelError(f"{directory}: {name} is {held[name].dtype} instead of a float")


def content_hash(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """16 hex digits of plain JSON facts and of tensors as they are stored."""
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_files(
    directory: Path, facts: Mapping[str, Any], tensors: Tensors, *, replace: bool = False
) -> None:
    """Write a checkpoint; at `directory` stands all of it, or what stood there before.

    replace: whether something may stand there. Raises ModelError.
    """
    with whole_directory(directory, replace=replace) as room:
        # A copy of each: a tied embedding and LM head are one tensor, which a file does not take.
        plain = {
            name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, t in tensors.items()
        }
        save_file(plain, room / WEIGHTS, metadata={"format": "pt"})
        write_json(room / CONFIG, facts)


def write_json(file: Path, facts: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def whole_directory(directory: Path, *, replace: bool) -> Iterator[Path]:
    """An empty directory to fill, beside `directory`; synced and renamed to it at the end.

    A crash leaves `.<name>.partial`, which nobody reads and the next writer wipes. One in the
    moment of a replacement leaves what stood there before as `.<name>.old`.
    """
    directory = directory.absolute()
    room = directory.with_name(f".{directory.name}.partial")
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists() and not replace:
        raise ModelError(f"{directory}: is there already; give another place or remove it")
    try:
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir(parents=True)
        yield room
        for file in room.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        _sync(room)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        room.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        why = "the disk is full" if _number(error) in _FULL else summary(error)
        raise ModelError(f"{directory}: cannot be written: {why}") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _number(error: OSError | SafetensorError) -> int | None:
    """The error number, which safetensors tells in its message only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return None if found is None else int(found[1])


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
