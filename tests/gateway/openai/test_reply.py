"""One response, told to the end: a stream whose last event nobody took still says why it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from dspark.core.errors import Overloaded
from dspark.gateway.openai.errors import failure
from dspark.gateway.openai.reply import Reply

LATE = Overloaded("nothing was taken", 1.0)


class Client:
    """Takes what is sent to it while it reads."""

    def __init__(self) -> None:
        self.took: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def take(self, message: Any) -> None:
        await self.reads.wait()
        self.took.append(message)


async def hand(writing: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(writing, 0.01)
    except TimeoutError:
        raise LATE from None


@pytest.mark.parametrize("last", [False, True])
async def test_what_was_not_taken_ends_in_an_error_event(last: bool) -> None:
    client = Client()
    reply = Reply(client.take, "1.1", {}, hand)
    await reply.events(b"data: 1\n\n")
    client.reads.clear()
    with pytest.raises(Overloaded):
        await reply.events(b"data: 2\n\n", last=last)
    telling = asyncio.create_task(reply.fail(failure(LATE)))
    await asyncio.wait([telling], timeout=0.05)
    assert not telling.done(), "it waits as long as the connection does"
    client.reads.set()
    await telling
    bodies = [message.get("body") for message in client.took[1:]]
    assert bodies[0] == b"data: 1\n\n"
    assert bodies[1].startswith(b"event: error\n")
    assert [message["more_body"] for message in client.took[1:]] == [True, False]


async def test_a_stream_that_has_ended_has_no_second_end() -> None:
    client = Client()
    reply = Reply(client.take, "1.1", {}, hand)
    await reply.events(b"data: [DONE]\n\n", last=True)
    await reply.fail(failure(LATE))
    assert len(client.took) == 2
