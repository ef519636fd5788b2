"""Replies that wait to be read: the newest of each session, and so many at most."""

from __future__ import annotations

import asyncio

from dspark.drafter.batching import no_draft
from dspark.drafter.outbox import Outbox


async def test_of_a_session_the_newest_waits() -> None:
    dropped: list[int] = []
    box = Outbox(dropped=dropped.append)
    box.put([no_draft("a", 1), no_draft("b", 1)])
    box.put([no_draft("a", 2)])
    replies = await box.next()
    assert [(reply.session, getattr(reply, "round", None)) for reply in replies] == [
        ("b", 1),
        ("a", 2),
    ]
    assert dropped == [1]


async def test_the_oldest_go_beyond_the_bound() -> None:
    dropped: list[int] = []
    box = Outbox(10, dropped.append)
    box.put([no_draft(str(n), 0) for n in range(25)])
    assert [reply.session for reply in await box.next()] == [str(n) for n in range(15, 25)]
    assert dropped == [15]


async def test_a_sign_of_life_is_no_reply() -> None:
    box = Outbox()
    box.put()
    assert await box.next() == []
    waiting = asyncio.ensure_future(box.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    box.put([no_draft("a", 1)])
    assert len(await waiting) == 1
