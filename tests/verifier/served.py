"""A toy engine behind its real gRPC server, and a wire that can be cut or fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from dspark.core.replicas import Replica, VerifierCard
from dspark.core.requests import Committed, Finished, Request
from dspark.serving import GrpcServer, serve_grpc
from dspark.verifier.engine import Engine
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer

from .toy import (
    Answer,
    ScriptedDrafter,
    ToyBackend,
    history_rule,
    oracle,
    target_only,
    toy_engine,
)

V = 48
RULE = history_rule(V, seed=13, loop=9)
PROMPT = tuple(range(10))
# Seconds of work: only a request that is ended from outside asks for so many tokens.
FOR_EVER = 20_000
ROOM = 32_768


def engine(backend: ToyBackend | None = None, *drafters: Any, **config: Any) -> Engine:
    backend = backend or ToyBackend(RULE, V, context_length=ROOM)
    drafters = drafters or (ScriptedDrafter(oracle(RULE, wrong_every=4)),)
    return toy_engine(backend, *drafters, **{"kv_tokens": ROOM, **config})


def card_of(engine: Engine) -> VerifierCard:
    return VerifierCard(
        model="toy",
        target_id="toy-1",
        tokenizer_hash="abc",
        backend="toy float32 cpu",
        limits=engine.limits,
        block_size=engine.config.block_size,
        max_sequences=engine.config.max_sequences,
        max_waiting=engine.config.max_waiting,
    )


@dataclass
class Served:
    engine: Engine
    runner: EngineRunner
    servicer: VerificationServicer
    server: GrpcServer

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def at_base(self) -> bool:
        return self.engine.idle and self.engine.cache.pool.owned == 0


@asynccontextmanager
async def served(
    engine: Engine, replica: Replica | None = None, **options: Any
) -> AsyncIterator[Served]:
    async with EngineRunner(engine) as runner:
        servicer = VerificationServicer(runner, card_of(engine), replica)
        async with serve_grpc(servicer, **options) as server:
            yield Served(engine, runner, servicer, server)


async def answer(target: Any, asked: Request) -> Answer:
    """All that a target tells of a request."""
    told = Answer()
    async for event in target.run(asked):
        told.take(event)
    return told


async def begun(events: AsyncIterator[Any]) -> Committed:
    """Wait until a request's first tokens are out."""
    event = await anext(events)
    assert isinstance(event, Committed)
    return event


async def rest_of(events: AsyncIterator[Any], told: Iterable[Committed] = ()) -> Answer:
    """What is still to come of a request, after what was `told`."""
    whole = Answer()
    for event in told:
        whole.take(event)
    async for event in events:
        whole.take(event)
    return whole


def error_of(told: Answer) -> Exception | None:
    assert isinstance(told.finished, Finished)
    return told.finished.error


def right(told: Answer, tokens: int | None = None) -> bool:
    """Whether the ids are the target's own, from the prompt on."""
    return tokens in (None, len(told.ids)) and told.ids == target_only(RULE, PROMPT, len(told.ids))


class Wire:
    """TCP between a gateway and a verifier. `address` is the gateway's end."""

    def __init__(self, to: str) -> None:
        self._host, _, port = to.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._silent = False
        self._heard = asyncio.Semaphore(0)

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Both ends are lost, and nobody gets through any more."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def fall_silent(self) -> None:
        """What is sent gets lost on the way, and no end is told."""
        self._silent = True

    async def heard(self, times: int) -> None:
        """Wait until the verifier has spoken so many times more."""
        self._heard = asyncio.Semaphore(0)
        for _ in range(times):
            await self._heard.acquire()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(
            self._carry(reader, far_writer), self._carry(far_reader, writer, down=True)
        )

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, down: bool = False
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                if down:
                    self._heard.release()
                if not self._silent:
                    writer.write(data)
                    await writer.drain()
        writer.close()
