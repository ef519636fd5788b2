"""Ways to verifiers, opened when they are first needed and closed when their verifier is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from dspark.core.replicas import Replica
from dspark.gateway.answers import Target


class Link(Protocol):
    """An async context that gives a Target, as `VerificationClient`."""

    async def __aenter__(self) -> Target: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Connect(Protocol):
    def __call__(self, replica: Replica) -> Link: ...


@dataclass(slots=True, eq=False)
class _Open:
    """runs: that use it now."""

    link: Link
    target: asyncio.Task[Target]
    runs: int = 0


class Links:
    """By address: what registers again at the same one is reached over the same link."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def use(self, replica: Replica) -> asyncio.Task[Target]:
        """A run begins; `leave` has to follow. The task raises what entering the link raises; one
        for all, so it is to be shielded."""
        address = replica.address
        if address not in self._open:
            link = self._connect(replica)
            self._open[address] = _Open(link, asyncio.ensure_future(link.__aenter__()))
        self._open[address].runs += 1
        return self._open[address].target

    def leave(self, replica: Replica) -> None:
        if replica.address in self._open:  # not after `close`
            self._open[replica.address].runs -= 1

    async def keep(self, addresses: Collection[str]) -> None:
        """Close all others that no run uses, and those that could not be entered."""
        for address, used in list(self._open.items()):
            failed = used.target.done() and used.target.exception() is not None
            if not used.runs and (failed or address not in addresses):
                del self._open[address]
                await _close(used)

    async def close(self) -> None:
        links, self._open = list(self._open.values()), {}
        await asyncio.gather(*map(_close, links))


async def _close(used: _Open) -> None:
    used.target.cancel()
    (entered,) = await asyncio.gather(used.target, return_exceptions=True)
    if not isinstance(entered, BaseException):
        await used.link.__aexit__(None, None, None)
