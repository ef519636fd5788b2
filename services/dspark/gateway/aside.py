"""Work that would keep an event loop from everybody else, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")

# Characters, ids or what costs as much, from which on work is done aside: the event loop would
# stand still for 3 ms and more.
LONG_PROMPT = 2048


async def aside(size: int, function: Callable[[A], R], argument: A) -> R:
    """What a function says, in a thread where that takes so long that others would notice."""
    if size <= LONG_PROMPT:
        return function(argument)
    return await asyncio.to_thread(function, argument)
