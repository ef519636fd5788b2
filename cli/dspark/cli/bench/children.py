"""Processes that are started, paused and ended with everything they start themselves.

Each leads a session of its own: Ctrl-C reaches the command alone, which then ends them in order;
signals go to the whole process group. The kernel kills them if the command itself is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from dspark.core.errors import Unavailable

GRACE_S = 10.0  # to end by itself before it is killed
SHOWN_LINES = 12  # of its output, in an error

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

# Looks at a line of output; what it returns, unless None, is what was waited for.
Listener = Callable[[str], str | None]


class Child:
    """A process of ours. Its output (both streams, by line) is read to the end."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, grace_s: float) -> None:
        self.name = name
        self.process = process
        self._grace_s = grace_s
        self._last: deque[str] = deque(maxlen=SHOWN_LINES)
        self._kept: asyncio.Queue[str | None] = asyncio.Queue()

    async def heard(self) -> str:
        """The next thing its listener kept. Raises Unavailable once it has ended."""
        kept = await self._kept.get()
        if kept is None:
            self._kept.put_nowait(None)
            raise Unavailable(f"it ended with status {await self.process.wait()}{self.told}")
        return kept

    async def say(self, line: str) -> None:
        """A line to its standard input."""
        assert self.process.stdin is not None
        with suppress(ConnectionError):  # it has ended, which `heard` tells
            self.process.stdin.write(f"{line}\n".encode())
            await self.process.stdin.drain()

    def pause(self) -> None:
        """Take the cores and leave it its memory, weights and caches."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @property
    def told(self) -> str:
        """What it last said, to stand behind an error."""
        return "".join(f"\n  {self.name}: {line}" for line in self._last)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def _listen(self, listener: Listener) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            if (kept := listener(text)) is not None:
                self._kept.put_nowait(kept)
            elif text:
                self._last.append(text)
        self._kept.put_nowait(None)

    async def _end(self) -> None:
        """Ask the group to end and, after a grace, kill what is left of it."""
        try:
            self._signal(signal.SIGTERM)
            self.resume()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await self.process.wait()
        finally:
            self._signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def child(
    name: str,
    command: Sequence[str],
    listener: Listener,
    environment: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> AsyncIterator[Child]:
    """Run a command until the context is left, however it is left."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,  # bytes of a line
        start_new_session=True,
        preexec_fn=_die_with_parent,
        env=environment,
    )
    started = Child(name, process, grace_s)
    listening = asyncio.create_task(started._listen(listener))
    try:
        yield started
    finally:
        await started._end()
        listening.cancel()  # whoever left the process group may hold the pipe open
        await asyncio.gather(listening, return_exceptions=True)


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
