"""The arms: what is measured, how each is started, and that only one of them runs at a time.

Servers that wait for their turn are stopped (SIGSTOP), not ended: a new start in each round would
measure cold caches and cost minutes, and an idle server still takes a core now and then from the
one that is measured (threads that spin, timers, heartbeats). Stopped, it keeps its memory and
nothing else. The first request after a pause finds cold processor caches: it is not measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dspark.cli.bench.children import Child, Listener, child
from dspark.cli.bench.load import Ask, Closed, Endpoint, Load, Slice, Tokens, Usage, timed
from dspark.core.errors import Unavailable

START_S = 600.0  # a first start converts the model and profiles the machine

_ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost|\[::1\]):[1-9]\d*")


@dataclass(frozen=True, slots=True)
class Server:
    """An arm that is up. facts: its settings, for the report. child: None is not ours to pause."""

    name: str
    connect: Callable[[], AbstractAsyncContextManager[Endpoint]]
    facts: Mapping[str, Any]
    child: Child | None = None

    @asynccontextmanager
    async def awake(self, first: Ask) -> AsyncIterator[Endpoint]:
        """Its turn: it runs, has answered `first`, and is paused afterwards."""
        try:
            if self.child is not None:
                self.child.resume()
            async with self.connect() as endpoint:
                await timed(endpoint, first, 0.0, time.perf_counter)
                yield endpoint
        except Unavailable as error:
            told = self.child.told if self.child else ""
            raise Unavailable(f"{self.name}: {error}{told}") from error
        finally:
            if self.child is not None:
                self.child.pause()


# Measures a server that is up, for arms that choose their settings by trying them.
Trial = Callable[[Server], Awaitable[Slice]]


class Arm(Protocol):
    """What can be measured."""

    @property
    def name(self) -> str: ...

    def takes(self, load: Load) -> bool:
        """Whether it can be put under such a load at all."""
        ...

    def serve(self, load: Load, trial: Trial) -> AbstractAsyncContextManager[Server]:
        """Started and paused; ended when the context is left."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A server that is a command: it prints its address when it is ready and ends at SIGTERM."""

    name: str
    command: Sequence[str]
    shown: str = ""

    def takes(self, load: Load) -> bool:
        return True

    @asynccontextmanager
    async def serve(self, load: Load, trial: Trial) -> AsyncIterator[Server]:
        from dspark.cli.bench.streams import connected

        async with started(self.name, self.command, _address) as (up, address):
            facts = {"command": self.shown or shlex.join(self.command)}
            yield Server(self.name, lambda: connected(address), facts, up)


@dataclass(frozen=True, slots=True)
class Running:
    """A server somebody else started; it cannot be paused."""

    name: str
    url: str

    def takes(self, load: Load) -> bool:
        return True

    @asynccontextmanager
    async def serve(self, load: Load, trial: Trial) -> AsyncIterator[Server]:
        from dspark.cli.bench.streams import connected

        facts = {"url": self.url, "paused_between_its_turns": False}
        yield Server(self.name, lambda: connected(self.url), facts)


@dataclass(frozen=True, slots=True)
class Transformers:
    """transformers' `generate`, one request after the other and without HTTP: it is a library call
    and takes no request while it runs, so it stands at concurrency 1 only."""

    model: str
    dtype: str
    threads: int
    name: str = "transformers"

    def takes(self, load: Load) -> bool:
        return load == Closed(1)

    @asynccontextmanager
    async def serve(self, load: Load, trial: Trial) -> AsyncIterator[Server]:
        module = "dspark.cli.bench.generate_loop"
        arguments = [self.model, self.dtype, str(self.threads)]
        command = [sys.executable, "-m", module, *arguments]
        async with started(self.name, command, _json_object) as (up, ready):
            facts = {**json.loads(ready), "command": shlex.join(["python", "-m", *command[2:]])}

            @asynccontextmanager
            async def connect() -> AsyncIterator[Endpoint]:
                yield LineEndpoint(up)

            yield Server(self.name, connect, facts, up)


class LineEndpoint:
    """A child that reads an ask a line and writes a line a token, then one with the usage."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def answer(self, ask: Ask) -> AsyncGenerator[Tokens | Usage, None]:
        asked = {"messages": list(ask.messages), "max_tokens": ask.max_tokens}
        await self._child.say(json.dumps(asked))
        while True:
            said = json.loads(await self._child.heard())
            if "prompt_tokens" in said:
                yield Usage(said["prompt_tokens"], said["completion_tokens"])
                return
            yield Tokens(said["tokens"])


@asynccontextmanager
async def started(
    name: str,
    command: Sequence[str],
    listener: Listener,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Child, str]]:
    """A child that has said that it is ready; paused. Raises Unavailable with its last words."""
    async with child(name, command, listener, environment) as up:
        try:
            async with asyncio.timeout(START_S):
                ready = await up.heard()
        except TimeoutError:
            raise Unavailable(f"{name}: not ready in {START_S:.0f} s{up.told}") from None
        except Unavailable as error:
            raise Unavailable(f"{name}: does not start: {error}") from None
        up.pause()
        yield up, ready


def ours(name: str, options: Mapping[str, str | int]) -> Command:
    """`dspark serve` with some options, on ports the system picks."""
    arguments = ["serve", "--http-port", "0", "--grpc-port", "0"]
    for option, value in options.items():
        arguments += [f"--{option}", str(value)]
    program = "from dspark.cli.main import main; raise SystemExit(main())"
    return Command(
        name,
        [sys.executable, "-c", program, *arguments],
        shlex.join(["dspark", *arguments]),
    )


def _address(line: str) -> str | None:
    found = _ADDRESS.search(line)
    return found[0] if found else None


def _json_object(line: str) -> str | None:
    return line if line.startswith("{") else None
