"""Packed weights in files that every process of the machine maps: one copy in memory for all.

A file is the bytes and behind them a seal, which says how many there are, what they add up to and
what they are called. It is written beside its place, under the directory's lock, and renamed when
it is whole. It is not synced: what a power cut leaves does not add up, and is made again. Any file
may be deleted at any time, those who have it mapped keep it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dspark.models.cache import Progress, megabytes

# (address, bytes) -> 64 bits.
Checksum = Callable[[int, int], int]

_SUFFIX = ".weights"
_MAGIC = b"dsparkw1"
_SEAL = struct.Struct("<8sqQ16s")  # magic, bytes before the seal, their sum; digest of these + name
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where files of weights are kept. limit_bytes: all of them at most, those that nobody has
    opened for longest go first. wait_s: at most for another process that makes one."""

    directory: Path
    limit_bytes: int = 32 << 30
    wait_s: float = 120.0


def shared_weights(
    shelf: Shelf,
    name: str,
    pack: Callable[[], Sequence[memoryview]],
    checksum: Checksum,
    progress: Progress,
) -> BinaryIO | None:
    """The whole file `name`, which may be mapped and is in use until it is closed. `pack` is called
    if it is not there, and says of what it is made; None after that if it cannot be kept, and one
    line says why. Files of other sources, `name` up to its first hyphen, go when one is made."""
    path = shelf.directory / (name + _SUFFIX)
    if (found := _sound(path, checksum)) is not None:
        return found
    parts: Sequence[memoryview] = ()
    try:
        shelf.directory.mkdir(parents=True, exist_ok=True)
        with _locked(shelf, progress):
            if (found := _sound(path, checksum)) is not None:
                return found
            parts = pack()
            needs = sum(len(part) for part in parts) + _SEAL.size
            _make_room(shelf, path, needs)
            _write(path, parts, checksum)
            found = _sound(path, checksum)
            if found is None:
                raise OSError(errno.EIO, "what was written does not read back")
            return found
    except OSError as error:
        why = error.strerror or str(error)
        progress(
            f"{shelf.directory}: the packed weights are not shared with other processes: {why}"
        )
    if not parts:
        pack()
    return None


def _sound(path: Path, checksum: Checksum) -> BinaryIO | None:
    """The file, open and marked as in use, if it is there and all that it should be."""
    try:
        file = path.open("rb")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused: it is being removed
        if _is_whole(file, path.name, checksum):
            with suppress(OSError):  # a cache that is only read serves what it holds
                os.utime(path)
            return file
    except OSError:
        pass
    file.close()
    return None


def _is_whole(file: BinaryIO, name: str, checksum: Checksum) -> bool:
    size = os.fstat(file.fileno()).st_size - _SEAL.size
    if size <= 0:
        return False
    seal = os.pread(file.fileno(), _SEAL.size, size)
    if len(seal) < _SEAL.size:
        return False
    told: int = _SEAL.unpack(seal)[2]
    if seal != _seal(size, told, name):
        return False
    return _sum_of(file, size, checksum) == told


def _sum_of(file: BinaryIO, size: int, checksum: Checksum) -> int:
    with mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        seen = np.frombuffer(mapped, np.uint8)
        total = checksum(seen.ctypes.data, size)
        del seen  # or the mapping cannot be closed
    return total


def _seal(size: int, total: int, name: str) -> bytes:
    facts = struct.pack("<8sqQ", _MAGIC, size, total)
    return facts + hashlib.blake2b(facts + name.encode(), digest_size=16).digest()


def _write(path: Path, parts: Sequence[memoryview], checksum: Checksum) -> None:
    """By `write`, which tells of a full disk; a page of a mapping that finds no room kills."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w+b") as file:
            size = sum(file.write(part) for part in parts)
            file.flush()
            file.write(_seal(size, _sum_of(file, size, checksum), path.name))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _make_room(shelf: Shelf, path: Path, needs: int) -> None:
    """Under the lock: remove what a dead process left, what another source made and nobody uses,
    and as much of the rest as the limit asks for. Raises OSError where that is not enough."""
    if needs > shelf.limit_bytes:
        told = f"{megabytes(needs)} are above the limit of {megabytes(shelf.limit_bytes)}"
        raise OSError(errno.EFBIG, told)
    for left in shelf.directory.glob(f".*{_SUFFIX}.partial"):
        left.unlink(missing_ok=True)
    path.unlink(missing_ok=True)  # it was not sound
    source = path.name.split("-", 1)[0]
    held = 0
    kept: list[tuple[float, int, Path]] = []
    for file in shelf.directory.glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):
            if file.name.split("-", 1)[0] != source and _remove_unused(file):
                continue
            facts = file.stat()
            held += facts.st_size
            kept.append((facts.st_mtime, facts.st_size, file))
    for _, size, file in sorted(kept):
        if held + needs <= shelf.limit_bytes:
            break
        if _remove_unused(file):
            held -= size
    if held + needs > shelf.limit_bytes:
        raise OSError(
            errno.EDQUOT,
            f"{megabytes(held)} in use and {megabytes(needs)} more are above the limit of "
            f"{megabytes(shelf.limit_bytes)}",
        )
    if (free := shutil.disk_usage(shelf.directory).free) < needs:
        raise OSError(errno.ENOSPC, f"{megabytes(needs)} needed, {megabytes(free)} free")


def _remove_unused(file: Path) -> bool:
    """Whether it went: no process has it open."""
    try:
        with file.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(shelf: Shelf, progress: Progress) -> Iterator[None]:
    """Hold the directory's lock, which the kernel takes back from the dead. Raises TimeoutError."""
    ends = time.monotonic() + shelf.wait_s
    with (shelf.directory / ".lock").open("a") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() >= ends:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process has packed for {shelf.wait_s:g} s"
                )
            if not told:
                progress(f"{shelf.directory}: waiting for another process that packs its weights")
                told = True
            time.sleep(_POLL_S)
        yield
