"""Replies on their way to one verifier, which may read them slowly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dspark.drafter.batching import Reply

# Replies that wait for a verifier to read before the oldest are dropped.
MAX_UNREAD = 1024


class Outbox:
    """Drafts are hints: of a session only the newest reply is kept, and at most `most` in all.
    Belongs to the event loop. dropped: told how many replies nobody will see."""

    def __init__(
        self, most: int = MAX_UNREAD, dropped: Callable[[int], None] = lambda n: None
    ) -> None:
        self._dropped = dropped
        self._most = most
        self._replies: dict[str, Reply] = {}
        self._news = asyncio.Event()

    def put(self, replies: Sequence[Reply] = ()) -> None:
        """None at all: a sign of life."""
        dropped = 0
        for reply in replies:
            dropped += self._replies.pop(reply.session, None) is not None
            self._replies[reply.session] = reply
        while len(self._replies) > self._most:
            del self._replies[next(iter(self._replies))]
            dropped += 1
        if dropped:
            self._dropped(dropped)
        self._news.set()

    async def next(self) -> list[Reply]:
        """All that is new, oldest first; nothing for a sign of life."""
        await self._news.wait()
        self._news.clear()
        replies, self._replies = list(self._replies.values()), {}
        return replies
