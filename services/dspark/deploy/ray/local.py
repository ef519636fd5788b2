"""A cluster on this machine, in the foreground: `dspark up` is its parent and waits; the keeper
below it does the work. Light: no Ray is imported here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dspark.deploy.ray import processes
from dspark.deploy.ray.cluster_file import ClusterFile, Running
from dspark.deploy.ray.order import SOCKET, Order

# Seconds for processes to be gone once they are killed.
KILL_S = 10.0
# Bytes: the paths of sockets below it must stay under 104.
_LONGEST_FOLDER = 30


def bring_up(
    file: ClusterFile,
    lock: int,
    serve: dict[str, Any],
    *,
    embed: bool,
    ready: Sequence[str],
    version: str,
    told: Callable[[str], None],
) -> int:
    """Until it is told to stop: SIGINT, SIGTERM or SIGHUP drain, a second one ends at once. The
    exit status. lock: of `file.hold()`."""
    processes.adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="dspark-", dir=_short_place()))  # mode 0700
    pipe, ours = os.pipe()
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "dspark.deploy.ray.keeper"],
            stdin=subprocess.PIPE,
            pass_fds=(pipe, lock),
            start_new_session=True,  # Ctrl-C is for us: it is told what that means
        )
        os.close(pipe)

        def stop(_number: int, _frame: FrameType | None) -> None:
            keeper.send_signal(signal.SIGTERM)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        file.write(Running(file.name, os.getpid(), str(folder / SOCKET), version))
        order = Order(file.name, str(folder), pipe, lock, serve, embed, list(ready))
        assert keeper.stdin is not None
        keeper.stdin.write(order.to_json().encode())
        keeper.stdin.close()
        status = keeper.wait()
        if status < 0:
            told(f"the cluster's keeper was ended by {signal.Signals(-status).name}")
            status = 1
        return status
    finally:
        left = processes.kill_below(KILL_S)
        if left:
            told(f"could not be ended: processes {', '.join(map(str, left))}")
        shutil.rmtree(folder, ignore_errors=True)
        file.remove()
        os.close(ours)


def _short_place() -> str | None:
    return None if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER else "/tmp"
