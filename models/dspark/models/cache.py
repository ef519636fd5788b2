"""Where made checkpoints are kept: an entry is whole or absent, whoever is killed or races.

An entry is a directory. It is filled under a lock in `.<name>.partial` beside its place, synced and
renamed. A process that dies leaves a partial directory that nobody reads and the next one wipes.
Any entry may be deleted by hand at any time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dspark.core.errors import ModelError

Progress = Callable[[str], None]

# Out of space, out of quota, above the process's file size limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def default_cache() -> Path:
    """`$DSPARK_CACHE`, else the user's cache directory on this system."""
    if named := os.environ.get("DSPARK_CACHE"):
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("dspark"))


def find(cache: Path, name: str) -> Path | None:
    """The entry if it is there; never writes, so a read-only cache serves what it holds."""
    final = cache / "models" / name
    return final if final.is_dir() else None


def keep(
    cache: Path, name: str, needs: int, fill: Callable[[Path], Path], progress: Progress
) -> Path:
    """The entry `name`, made by `fill(room)` unless it is already there.

    `fill` works in the empty directory `room` and returns the directory below it that becomes the
    entry. needs: bytes of disk it takes at most, checked beforehand. Of several processes that ask
    at once one fills and the others wait for it.

    Raises `ModelError` when the cache cannot be written or is too small.
    """
    root = cache / "models"
    final, room = root / name, root / f".{name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", name, progress):
            if final.is_dir():
                return final
            # We hold the lock, so whoever made this is dead.
            shutil.rmtree(room, ignore_errors=True)
            if _free(root) < needs:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            try:
                room.mkdir()
                made = fill(room)
                _sync(made)
                made.rename(final)
                _sync_directory(root)
            finally:
                shutil.rmtree(room, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise _told(error, root, needs) from error
    return final


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock; the kernel lets go of it when its holder dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"{name}: waiting for another process that is preparing it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(directory: Path) -> None:
    """Put the files on the disk before the rename does, or a power cut keeps the name alone."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _told(error: OSError | SafetensorError, root: Path, needs: int) -> ModelError:
    code, reason = _reason(error)
    if code not in _FULL:
        return ModelError(
            f"{root}: the cache cannot be written: {reason}; name another place with DSPARK_CACHE"
        )
    return ModelError(
        f"{root}: no room in the cache: {reason} ({megabytes(needs)} needed, "
        f"{megabytes(_free(root))} free); free some or name another place with DSPARK_CACHE"
    )


def _free(directory: Path) -> int:
    """Bytes free where `directory` is or will be."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).free


def _reason(error: OSError | SafetensorError) -> tuple[int | None, str]:
    """The error number and its text. safetensors tells the number in its message only."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None and (found := re.search(r"os error (\d+)", str(error))):
        code = int(found[1])
    return code, str(error) if code is None else os.strerror(code)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
