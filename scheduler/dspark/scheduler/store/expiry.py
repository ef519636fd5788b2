"""Names by the time at which they expire: what a sorted set is to Redis."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


class Expiry:
    """Times are whole ms. Equal ones are ordered by name, as Redis does. O(log n) a change; a time
    that was replaced stays in the heap until it is over."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __getitem__(self, name: str) -> int:
        return self._at[name]

    @property
    def all(self) -> Mapping[str, int]:
        return self._at

    def set(self, name: str, expires: int) -> None:
        if self._at.get(name) != expires:
            self._at[name] = expires
            heapq.heappush(self._heap, (expires, name))

    def drop(self, name: str) -> None:
        self._at.pop(name, None)

    def over(self, now: int, most: int) -> list[str]:
        """The first `most` whose time is over at `now`; they stay."""
        found: dict[str, int] = {}
        while self._heap and self._heap[0][0] <= now and len(found) < most:
            expires, name = heapq.heappop(self._heap)
            if self._at.get(name) == expires:
                found[name] = expires
        for name, expires in found.items():
            heapq.heappush(self._heap, (expires, name))
        return list(found)

    def beyond(self, limit: int, most: int) -> list[str]:
        """The first `most` that expire after `limit`. O(n log n)."""
        ahead = sorted((expires, name) for name, expires in self._at.items() if expires > limit)
        return [name for _, name in ahead[:most]]
