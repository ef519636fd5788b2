"""A small cluster in nouns, a clock that stands still, and a server that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dspark.core.drafts import DrafterCard
from dspark.core.leases import LeaseRequest
from dspark.core.replicas import Card, Pool, Replica, VerifierCard
from dspark.core.requests import Limits
from dspark.scheduler import StepCost
from dspark.scheduler.store import Candidate, Store

VERIFIER = VerifierCard("m", "target", "hash", "native int8", Limits(300, 4096, 9000), 16, 8, 32)
DRAFTER = DrafterCard("d-1", "dspark", 7, 300, "target", "hash", (1, -1), "feature", 64)
COST = StepCost((1, 8), (0.01, 0.02), 0.001)
TTL = 5.0


@dataclass
class Clock:
    """Seconds. Tests move it. So late that milliseconds have more digits than Lua prints."""

    now: float = 123_456_789_012.0

    def __call__(self) -> float:
        return self.now


def replica(name: str, epoch: int = 0) -> Replica:
    return Replica(name, f"{name}.local:50051", epoch)


async def join(
    store: Store,
    name: str,
    pool: Pool = Pool.VERIFIER,
    ttl_s: float = TTL,
    cost: StepCost | None = None,
) -> Replica:
    """Register, as the pool's card has it."""
    cards: dict[Pool, Card | None] = {
        Pool.GATEWAY: None,
        Pool.VERIFIER: VERIFIER,
        Pool.DRAFTER: DRAFTER,
    }
    return replica(name, await store.register(pool, replica(name), cards[pool], cost, ttl_s))


def asks(name: str, attempt: int = 0, tenant: str = "t", choices: int = 1) -> LeaseRequest:
    """Of an owner that is not a member."""
    return LeaseRequest(name, attempt, "g", 0, 10, tenant=tenant, choices=choices)


def on(
    verifier: Replica, tokens: int = 100, runs: int = 10, drafter: Replica | None = None
) -> Candidate:
    return Candidate(verifier, tokens, runs, drafter)


Answer = Callable[[list[bytes]], bytes | Awaitable[bytes]]


@asynccontextmanager
async def fake_server(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server whose reply to a command, in the wire's words, is `answer(command)`;
    b"" for none."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
        try:
            while head := await reader.readline():
                command = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    command.append((await reader.readexactly(size + 2))[:-2])
                reply = answer(command)
                writer.write(reply if isinstance(reply, bytes) else await reply)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()
            tasks.discard(task)  # type: ignore[arg-type]

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bulk(text: str) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text.encode())
