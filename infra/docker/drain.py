"""Ask the Ray node of this container to drain, and wait until it has ended, or so many seconds.

For a preStop hook where something that passes no signals on is the container's first process, as
KubeRay's shell is. Told to end, `ray start --block` drains its node first.
"""

import os
import signal
import sys
import time
from pathlib import Path


def ray_node() -> int | None:
    """The process id of `ray start`, here."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended, or is another user's
                continue
            if b"start" in words and any(word.endswith(b"/ray") for word in words):
                return int(entry.name)
    return None


def main(seconds: float) -> None:
    node = ray_node()
    if node is None:
        return
    os.kill(node, signal.SIGTERM)
    end = time.monotonic() + seconds
    while time.monotonic() < end and Path(f"/proc/{node}").exists():
        time.sleep(0.2)


if __name__ == "__main__":
    main(float(sys.argv[1]))
