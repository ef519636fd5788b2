"""A replica that runs, as whoever started it sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dspark.core.errors import Unavailable
from dspark.scheduling.membership import Membership
from dspark.serving import is_about_tls

# Seconds between two looks at whether a replica is ready.
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """For autoscaling. pressure: of what the replica can take; 1 is full, and more waits. figures:
    what it was made from, by name."""

    pressure: float
    figures: Mapping[str, float] = field(default_factory=dict)


class Drains(Protocol):
    """A GrpcServer or an HttpServer."""

    async def drain(self, grace_s: float) -> None: ...


@dataclass(eq=False)
class RunningRole:
    """address: of its gRPC server, as others reach it. url: of a gateway's HTTP, else "".
    metrics_address: host:port of GET /metrics, "" where it is off. fenced: a
    newer life of this replica has registered, so this one is to stop. drain_wanted: an operator
    wants it to drain, which is for whoever started it to do. membership: None for a scheduler.
    servers: what a drain drains. waits_for: what else it needs before it serves, "" if nothing.
    lives: whether the thread that does its work does. told: its load."""

    pool: str
    name: str
    address: str
    servers: tuple[Drains, ...]
    url: str = ""
    metrics_address: str = ""
    membership: Membership | None = None
    fenced: asyncio.Event = field(default_factory=asyncio.Event)
    drain_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    waits_for: Callable[[], str] = lambda: ""
    lives: Callable[[], bool] = lambda: True
    told: Callable[[], Load] = lambda: Load(0.0)
    draining: bool = False

    @property
    def ready(self) -> bool:
        """Requests reach it and are served."""
        return not self.why

    @property
    def why(self) -> str:
        """What it waits for, "" if it is ready. A scheduler that is away does not keep a replica
        from serving: who knows it already goes on with it. One that TLS keeps it from does: nobody
        will ever know it."""
        if self.draining:
            return "it is draining"
        if waits := self.waits_for():
            return waits
        member = self.membership
        if member is None or member.epoch:
            return ""
        outage = member.outage
        if outage.since is None:
            return member.refusal or "no scheduler has answered yet"
        return outage.why if is_about_tls(outage.why) else ""

    @property
    def alive(self) -> bool:
        """It may go on: the thread that does its work lives, and no newer life has fenced it."""
        return self.lives() and not self.fenced.is_set()

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises Unavailable with what it still waits for."""
        end = time.monotonic() + timeout_s
        while why := self.why:
            if time.monotonic() >= end or self.draining or not self.alive:
                raise Unavailable(f"{self.name} is not ready after {timeout_s:g} s: {why}")
            await asyncio.sleep(LOOK_S)

    def load(self) -> Load:
        return self.told()

    async def drain(self, grace_s: float) -> None:
        """Stop for good: it takes nothing new, what runs has grace_s to finish, and what is left
        ends with a status that makes its caller go on elsewhere. A second call with less time
        hurries the first."""
        self.draining = True
        work = [server.drain(grace_s) for server in self.servers]
        if self.membership is not None:
            work.append(self.membership.drain())
        await asyncio.gather(*work)
