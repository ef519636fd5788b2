"""Where the commands find a cluster that runs on this machine: a file for each name, and a lock
that its processes hold while any of them lives, so that a file that was left behind is known."""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from dspark.core.errors import ConfigError, NotFound

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Running:
    """name: of the cluster. pid: of its `dspark up`. socket: that its keeper listens on. version:
    of dspark, there."""

    name: str
    pid: int
    socket: str
    version: str


class ClusterFile:
    """name: of the cluster. folder: None for where they are kept, which only we may enter."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name: {name!r} must be letters, digits, '.', '_' or '-', 63 at most"
            )
        self.name = name
        self._folder = folder or clusters_folder()
        self._file = self._folder / f"{name}.json"
        self._lock = self._folder / f"{name}.lock"

    def hold(self) -> int | None:
        """Take the name for this process and those it hands the descriptor to. None: it is taken.

        Raises ConfigError for a folder that cannot be written."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._folder}: {error.strerror}: set DSPARK_CACHE") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def write(self, running: Running) -> None:
        """For who holds the name. Whole or not at all."""
        partial = self._file.with_suffix(".partial")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(running), file)
        partial.replace(self._file)

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)

    def taken(self) -> bool:
        """A process of the cluster lives."""
        lock = self.hold() if self._lock.exists() else -1
        if lock is None:
            return True
        if lock >= 0:
            os.close(lock)
        return False

    def read(self) -> Running | None:
        """None: it does not run, or has just begun to. A file left behind is removed."""
        try:
            told = json.loads(self._file.read_text())
            running = Running(**told)
        except (OSError, ValueError, TypeError):
            return None
        if not self.taken():
            self.remove()
            return None
        return running


def clusters_folder() -> Path:
    from dspark.models.cache import default_cache

    return default_cache() / "clusters"


def running_clusters(folder: Path | None = None) -> list[Running]:
    """By name."""
    folder = folder or clusters_folder()
    found = (ClusterFile(file.stem, folder).read() for file in sorted(folder.glob("*.json")))
    return [running for running in found if running is not None]


def find_cluster(name: str | None = None, folder: Path | None = None) -> Running:
    """The one of a name, or the only one. Raises NotFound, and ConfigError if there are several."""
    if name is not None:
        running = ClusterFile(name, folder).read()
        if running is None:
            raise NotFound(f"no cluster {name!r} runs on this machine: start it with `dspark up`")
        return running
    found = running_clusters(folder)
    if not found:
        raise NotFound(
            "no cluster runs on this machine: start one with `dspark up`, or name one elsewhere "
            "with --address"
        )
    if len(found) > 1:
        names = ", ".join(running.name for running in found)
        raise ConfigError(f"--cluster: several run on this machine, say which: {names}")
    return found[0]
