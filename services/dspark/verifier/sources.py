"""Drafters as an engine asks them: one in this process answers at once, a link answers later."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from dspark.core.drafts import Answer, Drafter, DrafterCard, DrafterLink, DraftRequest, Lost
from dspark.scheduler import DraftCost

# Dates of a bell that nobody has looked at yet: a second of a busy drafter's replies.
MAX_RINGS = 1024

# A request, what was said to it, and when it came (the engine's clock).
Reply = tuple[DraftRequest, object, float]


class Bell:
    """Rung by a link, from any thread, when there is something new: notes the time and wakes."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._wake = wake
        self._rings: deque[float] = deque(maxlen=MAX_RINGS)

    def __call__(self) -> None:
        self._rings.append(self._clock())
        self._wake()

    def take(self) -> list[float]:
        """When it rang since the last call."""
        taken: list[float] = []
        while self._rings:
            taken.append(self._rings.popleft())
        return taken


class LocalSource:
    """A drafter in this process: its whole time is added to the step. spent_s: all of it so far.
    faults: the desk's; what a drafter does wrong as a whole is counted there."""

    linked = False
    available = True
    draining = False
    context_window = 0

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        faults: Counter[str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.cost = DraftCost()
        self.sessions: set[str] = set()
        self.spent_s = 0.0
        self.drafter = drafter
        self._faults = faults
        self._clock = clock
        self._replies: list[Reply] = []

    @property
    def card(self) -> DrafterCard:
        return self.drafter.card

    def ask(self, requests: Sequence[DraftRequest]) -> None:
        begin = self._clock()
        why = ""
        replies: list[object] = []
        try:
            replies = list(self.drafter.propose(requests))
        except Exception:  # an untrusted reply may be wrong in any way at all
            why = "raised"
        finally:
            self.spent_s += self._clock() - begin
        if not why and len(replies) != len(requests):
            why = "wrong count"
        if why:
            self._faults[why] += 1
            replies = [Lost(request.session, request.round, why) for request in requests]
        # By their places, not by their names: a drafter that swaps two is caught so.
        self._replies += [(q, r, 0.0) for q, r in zip(requests, replies, strict=True)]

    def answers(self, asked: Callable[[str], DraftRequest | None], now: float) -> list[Reply]:
        replies, self._replies = self._replies, []
        return [(request, reply, now) for request, reply, _ in replies]

    def close(self, session: str) -> None:
        self.sessions.discard(session)
        try:
            self.drafter.close(session)
        except Exception:  # the same distrust on the way out
            self._faults["raised"] += 1


class LinkSource:
    """A drafter behind a link. card: as it was adopted; a link that comes back with another one
    counts as gone until it is adopted anew. bell: the one that the link was made with.

    late, stale: counted in the desk's `answers`.
    """

    linked = True
    spent_s = 0.0

    def __init__(
        self,
        name: str,
        link: DrafterLink,
        faults: Counter[str],
        outcomes: Counter[str],
        bell: Bell | None = None,
    ) -> None:
        self.name = name
        self.link = link
        self.card = link.card
        self.cost = DraftCost()
        self.sessions: set[str] = set()
        self._faults = faults
        self._outcomes = outcomes
        self._bell = bell or Bell(lambda: 0.0)

    @property
    def available(self) -> bool:
        return self.link.available and self.link.card == self.card

    @property
    def draining(self) -> bool:
        return self.link.draining

    @property
    def context_window(self) -> int:
        return self.link.context_window

    def ask(self, requests: Sequence[DraftRequest]) -> None:
        self.link.ask(requests)

    def answers(self, asked: Callable[[str], DraftRequest | None], now: float) -> list[Reply]:
        """Replies to rounds that are under way; any other is counted and dropped. asked: what a
        session waits for."""
        rings = self._bell.take()
        try:
            said = list(self.link.answers())
        except Exception:  # a hint that cannot even be read
            self._faults["raised"] += 1
            return []
        replies: list[Reply] = []
        for i, answer in enumerate(said):
            try:
                request = self._asked_by(answer, asked)
            except Exception:
                self._faults["malformed"] += 1
                continue
            if request is not None:
                replies.append(
                    (request, answer, min(_rung(rings, len(said) - i, len(said), now), now))
                )
        return replies

    def _asked_by(
        self, answer: Answer, asked: Callable[[str], DraftRequest | None]
    ) -> DraftRequest | None:
        request = asked(answer.session)
        if request is None:  # given up, ended, or said twice
            self._outcomes["late"] += 1
            return None
        # NeedContext names no round; a re-sent window that nobody needed is bounded by its retries.
        if getattr(answer, "round", request.round) != request.round:
            self._outcomes["stale"] += 1
            return None
        return request

    def close(self, session: str) -> None:
        self.sessions.discard(session)
        try:
            self.link.close(session)
        except Exception:
            self._faults["raised"] += 1


def _rung(rings: Sequence[float], nth_last: int, replies: int, now: float) -> float:
    """When the nth of `replies` from the end came. They ring in turn, so of m replies and k rings
    the nth from the end came with ring 1 + ⌊(n − 1)·k/m⌋ from the end. From the end: a reply that
    is read just before it rings leaves a ring behind, which is older than what rings next."""
    return rings[-1 - (nth_last - 1) * len(rings) // replies] if rings else now


Source = LocalSource | LinkSource
