"""One replica in the foreground: it serves until it is told to stop, and its exit status says how
it ended."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from dspark.core.errors import Unavailable
from dspark.deploy.lives import end_of
from dspark.deploy.roles import RunningRole

log = logging.getLogger(__name__)

# Exit status of a replica whose newer life has registered. 0: it stopped when it was told to.
FENCED = 3

Signals = asyncio.Queue[signal.Signals]


async def one_replica(
    role: AbstractAsyncContextManager[RunningRole],
    ready: Callable[[RunningRole], None],
    *,
    wait_s: float,
    drain_s: float,
) -> int:
    """Serve until SIGTERM, SIGINT or an operator's wish to drain, then drain: 0. A second signal
    ends what runs at once: 128 + its number. A newer life of this replica has registered: FENCED.

    Signals are as they were until the role is entered: a model that loads has nothing to drain.
    wait_s: seconds until it has to be ready. Raises what entering the role raises, and Unavailable
    for one that does not get ready or whose work has ended by itself.
    """
    loop = asyncio.get_running_loop()
    async with role as running:
        signals: Signals = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        why = await _first(
            _once_ready(running, ready, wait_s),
            _say(signals.get(), "was told to stop"),
            _say(running.drain_wanted.wait(), "is wanted to drain"),
            _say(running.fenced.wait(), ""),
            _end_of_life(running),
        )
        if running.fenced.is_set():
            log.error("%s: a newer life of it has registered, so this one ends", running.name)
            await running.drain(0.0)
            return FENCED
        log.info("%s %s: what runs has up to %g s", running.name, why, drain_s)
        return await _drain(running, signals, drain_s)


async def _drain(running: RunningRole, signals: Signals, drain_s: float) -> int:
    draining = asyncio.create_task(running.drain(drain_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if again.done() and not draining.done():
        log.warning("%s stops at once", running.name)
        status = 128 + again.result()
        await running.drain(0.0)
    again.cancel()
    await draining
    return status


async def _once_ready(
    running: RunningRole, ready: Callable[[RunningRole], None], wait_s: float
) -> str:
    """Never ends, but with what keeps the replica from getting ready."""
    await running.wait_ready(wait_s)
    ready(running)
    await asyncio.Event().wait()
    return ""


async def _end_of_life(running: RunningRole) -> str:
    await end_of(lambda: running.alive)
    if not running.fenced.is_set():
        raise Unavailable(f"{running.name}: the thread that does its work has ended")
    return ""


async def _say(event: Coroutine[Any, Any, object], why: str) -> str:
    await event
    return why


async def _first(*work: Coroutine[Any, Any, str]) -> str:
    """What the first to end says, or what it raises; the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next(task for task in tasks if task in done).result()
