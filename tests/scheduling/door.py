"""What stands between a client and a server that goes wrong: it lets through, swallows, or answers
for a Redis that is still loading."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum

LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"


class Mode(Enum):
    OPEN = "open"
    SILENT = "silent"  # a black hole: what is sent is lost, and nobody is told
    LOADING = "loading"


class Door:
    """`async with Door("host:port" or "unix:///path") as door`; clients call `door.address`. host,
    port: of its own."""

    def __init__(self, to: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.to = to
        self._where = host, port
        self._mode = Mode.OPEN
        self._silenced: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Door:
        self._server = await asyncio.start_server(self._accept, *self._where)
        self.address = f"{self._where[0]}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._hang_up()
        await asyncio.gather(*self._tasks)

    def turn(self, mode: Mode) -> None:
        """What was connected is lost, but into silence nobody is told even that."""
        self._mode = mode
        if mode is Mode.SILENT:
            self._silenced |= self._tasks
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._silenced.discard)
        self._writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            if self._mode is Mode.LOADING:
                await self._answer(reader, writer)
            elif self._mode is Mode.SILENT:
                await reader.read()
            else:
                await self._pipe(reader, writer)
        writer.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.to.startswith("unix://"):
            far = await asyncio.open_unix_connection(self.to.removeprefix("unix://"))
        else:
            host, _, port = self.to.rpartition(":")
            far = await asyncio.open_connection(host, int(port))
        self._writers.add(far[1])
        task = asyncio.current_task()
        await asyncio.gather(self._carry(reader, far[1], task), self._carry(far[0], writer, task))

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[None] | None,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if task not in self._silenced:
                    writer.write(data)
                    await writer.drain()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                await reader.readexactly(size + 2)
            writer.write(LOADING)
