"""Waiting for a thread that works beside the event loop to be no longer of use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Seconds between two looks: a hanging thread tells nobody.
LOOK_S = 0.5


async def end_of(lives: Callable[[], bool]) -> None:
    """Returns once `lives` says no."""
    while lives():
        await asyncio.sleep(LOOK_S)
