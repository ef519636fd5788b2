"""How many threads a step may use: what the process was given, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path


def usable_threads(asked: int = 0, root: Path = Path("/")) -> int:
    """`asked`, else the processors of this process's affinity, cut to its control group's quota."""
    if asked:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota(root)
    return max(1, min(cores or 1, cores or 1 if quota is None else round(quota)))


def cpu_quota(root: Path) -> float | None:
    """Processors that the process's control group and those around it grant, None for no limit."""
    quotas = [quota for directory in _groups(root) if (quota := _quota(directory)) is not None]
    return min(quotas, default=None)


def _groups(root: Path) -> list[Path]:
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        parts = [part for part in path.split("/") if part]
        found += [top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return found


def _quota(directory: Path) -> float | None:
    """cpu.max (version 2: "quota period") or cpu.cfs_quota_us over cpu.cfs_period_us."""
    words = _read(directory / "cpu.max").split()
    if not words:
        words = [_read(directory / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    return None  # "max", -1, or no such file


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
