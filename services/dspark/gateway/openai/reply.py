"""The one response of a call: a JSON object or a stream of events, whatever happens (L7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Send

from dspark.core.errors import Unavailable
from dspark.gateway.openai.body import JSON
from dspark.gateway.openai.door import Door
from dspark.gateway.openai.errors import ClientGone, Failure
from dspark.gateway.openai.render import dumps, error_event

T = TypeVar("T")

EVENTS = "text/event-stream; charset=utf-8"


class Reply:
    """What was sent of a response, and so what can still be sent.

    hand: waits for a client to take more of a stream, and raises where it does not. A client of
    HTTP/1.0 knows no chunks: its stream is kept and sent whole.
    """

    def __init__(
        self,
        send: Send,
        http_version: str,
        headers: Mapping[str, str],
        hand: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> None:
        self._send = send
        self._hand = hand
        self._headers = headers
        self._kept: list[bytes] | None = [] if http_version == "1.0" else None
        self._begun = self._ended = False

    async def json(
        self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        await self._whole(status, JSON, dumps(body), headers or {})

    async def events(self, data: bytes, *, last: bool = False) -> None:
        """More of a stream, which the first call begins. Waits while the client does not read."""
        await self._hand(self._events(data, last))

    async def _events(self, data: bytes, last: bool) -> None:
        if self._kept is not None:
            self._kept.append(data)
            if last:
                await self._whole(200, EVENTS, b"".join(self._kept), {})
            return
        if not self._begun:
            # No proxy may hold back what is streamed.
            await self._start(200, EVENTS, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._ended = last  # not before: a client that does not take it may still be told why

    async def fail(self, failure: Failure) -> None:
        """The status, or in a stream that has begun its last event, which waits for the client as
        long as its connection does."""
        if self._ended:
            return
        if self._begun or self._kept:
            await self._events(error_event(failure.body), last=True)
        else:
            await self.json(failure.status, failure.body, failure.headers)

    async def _whole(
        self, status: int, media_type: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        await self._start(status, media_type, {**headers, "content-length": str(len(body))})
        self._ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self._begun = True
        every = {"content-type": media_type, **self._headers, **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


async def attended(work: Coroutine[Any, Any, T], receive: Receive, door: Door) -> T:
    """Does `work` unless the client hangs up (ClientGone) or the door is shut (Unavailable).

    receive: with the whole body read.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(hung_up(receive))
    shut = asyncio.create_task(door.wait_shut())
    tasks = (working, gone, shut)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("the client hung up") if gone.done() else Unavailable("it is stopping")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
