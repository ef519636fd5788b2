"""A server that speaks as much of OpenAI's HTTP as a bench needs, and answers by a script.

Run as a program it answers every chat with `max_tokens` tokens, three of them to a chunk, tells its
address, and writes its process id to the file (a FIFO: whoever reads it waits for the first chat)
named by its first argument.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Body = dict[str, Any]


@dataclass
class Reply:
    """The response to one chat, to be sent event by event or byte by byte."""

    writer: asyncio.StreamWriter

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, event: Body) -> None:
        await self.raw(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def tokens(self, *ids: int) -> None:
        await self.event({"choices": [{"delta": {"content": "x"}, "token_ids": list(ids)}]})

    async def usage(self, prompt: int, completion: int, **more: Any) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, **more}
        await self.event({"choices": [], "usage": usage})
        await self.raw(b"data: [DONE]\n\n")


Script = Callable[[Body, Reply], Awaitable[None]]


@asynccontextmanager
async def fake_server(
    script: Script, owned_by: str = "dspark", status: str = "200 OK"
) -> AsyncIterator[str]:
    """Its address. status: of the responses to chats."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get /v1/models "):
                models = json.dumps({"data": [{"id": "fake", "owned_by": owned_by}]}).encode()
                writer.write(_head("200 OK", "application/json") + models)
            else:
                length = int(head.split("content-length:")[1].split()[0])
                body = json.loads(await reader.readexactly(length))
                writer.write(_head(status, "text/event-stream"))
                await script(body, Reply(writer))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()[:2])


def _head(status: str, kind: str) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode()


async def threes(body: Body, reply: Reply) -> None:
    """All tokens, three to a chunk; speculation says that two of each three were drafts."""
    left = body["max_tokens"]
    rounds = -(-left // 3)
    while left:
        ids = range(min(3, left))
        await reply.tokens(*ids)
        left -= len(ids)
    speculation = {"rounds": rounds, "accepted": body["max_tokens"] - rounds}
    await reply.usage(11, body["max_tokens"], speculation=speculation)


async def main() -> None:
    told = False

    async def script(body: Body, reply: Reply) -> None:
        nonlocal told
        if not told and len(sys.argv) > 1:
            told = True
            await asyncio.to_thread(Path(sys.argv[1]).write_text, f"{os.getpid()}\n")
        await threes(body, reply)

    async with fake_server(script) as address:
        print(f"ready at {address}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
