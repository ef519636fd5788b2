"""An embedded Valkey that is there again when it has died, at the same path."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from dspark.core.errors import DsparkError
from dspark.scheduler.store import EmbeddedValkey

# In the cluster's folder: a link to the socket of the one that lives.
STORE = "store.sock"
# Seconds until another try.
AGAIN_S = 1.0


@asynccontextmanager
async def kept_valkey(
    folder: Path, over: Callable[[], bool], tell: Callable[[str], None]
) -> AsyncIterator[None]:
    """It answers at folder/STORE. A new one takes over from one that died, empty, and fills from
    heartbeats. over: no other is wanted any more. Raises as entering an EmbeddedValkey does."""
    started = asyncio.Event()
    task = asyncio.create_task(_keep(folder, over, tell, started))
    first = asyncio.create_task(started.wait())
    try:
        await asyncio.wait((task, first), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield
    finally:
        first.cancel()
        task.cancel()
        await asyncio.wait((task,))


async def _keep(
    folder: Path, over: Callable[[], bool], tell: Callable[[str], None], started: asyncio.Event
) -> None:
    while not over():
        try:
            await _one(folder, tell, started)
        except DsparkError as error:
            if not started.is_set():
                raise
            tell(f"the store does not start again: {error}")
            await asyncio.sleep(AGAIN_S)


async def _one(folder: Path, tell: Callable[[str], None], started: asyncio.Event) -> None:
    """Until it has died."""
    server = EmbeddedValkey(folder)
    async with server as url:
        link = folder / "store.new"
        link.unlink(missing_ok=True)
        link.symlink_to(url.removeprefix("unix://"))
        link.replace(folder / STORE)
        if started.is_set():
            tell("the store is back, empty")
        started.set()
        await _ended(server.pid)
    tell("the store has died")


async def _ended(pid: int) -> None:
    """When a child has; never where the system cannot tell (no Linux)."""
    if not hasattr(os, "pidfd_open"):
        await asyncio.Event().wait()
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    watched = os.pidfd_open(pid)
    loop.add_reader(watched, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
