"""The calls that run in a servicer: each ends in one status, also when the server stops (L7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from dspark.client.wire_client import ERROR_METADATA, error_to_wire, status_of
from dspark.core.errors import DsparkError, Unavailable

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Calls:
    """who: what callers know the server as, "this gateway"."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._running: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def one(self, context: Context) -> AsyncIterator[None]:
        """One call, from its begin to how it ends: an error as its status, a hang-up as it is."""
        end = asyncio.timeout(None)
        try:
            async with end:
                self._running.add(end)
                self._idle.clear()
                try:
                    yield
                finally:
                    self._running.discard(end)
                    if not self._running:
                        self._idle.set()
        except Exception as error:
            told = Unavailable(f"{self._who} has stopped") if end.expired() else error
            await _refuse(context, told)

    async def finish(self, grace_s: float) -> None:
        """Wait for running calls, and end those that are left after grace_s with UNAVAILABLE: their
        clients may go on elsewhere. A second wait with less time hurries the first."""
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for end in self._running:
                if not end.expired():
                    end.reschedule(asyncio.get_running_loop().time())
            await self._idle.wait()


def metadata(context: Context, name: str) -> str | None:
    """What a call brought under this name."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else None
    return None


def traceparent_of(context: Context) -> str:
    """The W3C trace context of a call, "" without one."""
    return metadata(context, "traceparent") or ""


async def _refuse(context: Context, error: Exception) -> None:
    gone = grpc.aio.InternalError  # what gRPC raises when there is nobody to write to any more
    if not isinstance(error, DsparkError | gone):
        log.error("a call failed", exc_info=error)
    wire = error_to_wire(error)
    trailing = ((ERROR_METADATA, wire.SerializeToString()),)
    try:
        await context.abort(status_of(error), wire.message, trailing)
    except gone:
        raise asyncio.CancelledError from None
