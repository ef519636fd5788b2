"""Processes below this one: who they are, and that none is left.

Linux only: elsewhere a process whose parent has died belongs to the system, and nobody finds it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

# prctl's number: orphans below this process become its children, not the system's.
_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.02


def adopt_orphans() -> None:
    """From now on, every process below this one stays below it, whichever of them dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(pid: int) -> list[int]:
    """All processes below one that have not ended, children before theirs."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # "pid (name) state parent …"; a name may hold anything, also brackets.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # ended meanwhile
        if state != "Z":
            children[int(parent)].append(int(entry.name))
    found, ask = [], [pid]
    while ask:
        mine = children[ask.pop()]
        found += mine
        ask += mine
    return found


def kill_below(seconds: float) -> list[int]:
    """End all processes below this one, however many begin meanwhile, and reap them. Those that are
    left after `seconds`, as in an uninterruptible call. For the end of a process: it takes the
    status of every child."""
    end = time.monotonic() + seconds
    while True:
        left = below(os.getpid())
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        if not left or time.monotonic() > end:
            return left
        time.sleep(_LOOK_S)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
