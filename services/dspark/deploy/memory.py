"""Whether the KV cache fits into the memory there is.

On a CPU the system promises more memory than there is and kills whoever uses it, so what is too
large is found before it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError
from dspark.models.targets.backend import Backend, RaggedBatch

# Of the control group a process is in: its limit, what is used, and the line of memory.stat that
# says how much of that is files' cache, which goes when room is wanted.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still take: the least of what the machine has and what each control
    group around it (a container) leaves. None where nothing tells (no Linux)."""
    return min((*_of_machine(root), *_of_groups(root)), default=None)


def bytes_per_token(backend: Backend) -> int:
    """Of keys and values, every layer: seen in a step of one token. Allocates anew."""
    one, none = np.zeros(1, np.int32), np.empty(0, np.int32)
    ends = np.array([0, 1], np.int32)
    backend.allocate(1)
    backend.forward(RaggedBatch(one, one, ends, one, one.reshape(1, 1), one, none))
    return backend.kv_bytes // backend.block_size


def check_kv_tokens(config: EngineConfig, token_bytes: int, free: int | None) -> None:
    """Raises ConfigError where the KV cache needs more than is free, bytes."""
    needed = config.kv_blocks * config.block_size * token_bytes
    if free is not None and needed > free:
        fits = free // token_bytes // config.block_size * config.block_size
        raise ConfigError(
            f"kv_tokens: {config.kv_tokens} need {needed} bytes ({token_bytes} a token), and "
            f"there are {free}: {fits} tokens fit"
        )


def _of_machine(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024  # it says kB and means 1,024


def _of_groups(root: Path) -> Iterator[int]:
    """Of the group of this process and all around it; a container may not see where it stands, and
    then its own group is the topmost one that it sees."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            yield from _of_group(top.joinpath(*parts[:depth]), *files)


def _of_group(directory: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    most, taken = _read(directory / limit).strip(), _read(directory / used).strip()
    if most.isdigit() and taken.isdigit():  # "max" is no limit
        stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines())
        yield max(int(most) - int(taken) + int(stat.get(cache, 0)), 0)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
