"""Replicas of one pool share a range of ports on a machine: each takes the first that is free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TypeVar

from dspark.core.errors import ConfigError

# Seconds between two looks at ports that were all taken.
AGAIN_S = 0.1

Server = TypeVar("Server")


async def on_first_free(
    stack: AsyncExitStack,
    field: str,
    ports: Sequence[int],
    serve: Callable[[int], AbstractAsyncContextManager[Server]],
    *,
    wait_s: float = 0.0,
) -> Server:
    """What `serve` gives on the first port that it can have, entered on the stack.

    field: of the configuration, for errors. ports: [0] for any free one. wait_s: seconds in which
    one may become free, as while another replica drains. Raises ConfigError.
    """
    give_up = time.monotonic() + wait_s
    while True:
        for port in ports:
            try:
                return await stack.enter_async_context(serve(port))
            except ConfigError as error:
                why = error
        if time.monotonic() >= give_up:
            raise ConfigError(f"{field}: {_told(ports)}: {why}")
        await asyncio.sleep(AGAIN_S)


def _told(ports: Sequence[int]) -> str:
    if len(ports) == 1:
        return str(ports[0])
    return f"none of {ports[0]} to {ports[-1]} can be had, the last"
