"""Whether calls are let in, and when those inside are sent out."""

from __future__ import annotations

import asyncio
from enum import StrEnum

from dspark.core.errors import Unavailable


class DoorState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Door:
    """Closed at first. `open` lets calls in, `drain` lets in no more, `shut` ends those inside."""

    def __init__(self) -> None:
        self.state = DoorState.STARTING
        self._shut = asyncio.Event()

    def open(self) -> None:
        self.state = DoorState.READY

    def drain(self) -> None:
        self.state = DoorState.DRAINING

    def shut(self) -> None:
        self.drain()
        self._shut.set()

    async def wait_shut(self) -> None:
        await self._shut.wait()

    def check(self) -> None:
        """Raises Unavailable unless calls are let in."""
        if self.state is not DoorState.READY:
            raise Unavailable(f"the server is {self.state}")
