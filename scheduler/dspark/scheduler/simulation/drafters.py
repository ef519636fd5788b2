"""A drafter of the pool: a line of asks, and one forward pass at a time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from dspark.core.drafts import DrafterCard
from dspark.core.replicas import DrafterLoad
from dspark.scheduler.simulation.config import Drafters
from dspark.scheduler.simulation.profiles import IntArray

# What all of them run, as calibration knows it.
CHECKPOINT = "simulated"


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Drafts that a verifier asks of one drafter after one step. slots: for which; lengths: of
    their blocks. round: of the group; what comes after it has gone on is dropped."""

    verifier: int
    group: int
    round: int
    drafter: int
    slots: IntArray
    lengths: IntArray
    asked_at: float

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class Drafter:
    """busy_s, tokens: worked and made since the simulation began."""

    def __init__(self, kind: Drafters, gamma: int) -> None:
        self.busy_s = 0.0
        self.tokens = 0
        self.capacity_tokens_per_s = _rate(kind, gamma)
        self._kind = kind
        self._line: deque[Ask] = deque()
        self._batch: list[Ask] = []
        self._told = 0, 0.0

    def put(self, ask: Ask) -> None:
        self._line.append(ask)

    def start(self) -> float | None:
        """Seconds of the pass that begins now; None if it is busy or nobody waits."""
        if self._batch or not self._line:
            return None
        requests = 0
        while self._line:
            more = len(self._line[0].slots)
            if self._batch and requests + more > self._kind.max_batch:
                break
            requests += more
            self._batch.append(self._line.popleft())
        tokens = sum(ask.tokens for ask in self._batch)
        passes = math.ceil(requests / self._kind.max_batch)
        seconds = passes * self._kind.pass_s + tokens / self._kind.tokens_per_s
        self.busy_s += seconds
        self.tokens += tokens
        return seconds

    def finish(self) -> list[Ask]:
        """What the pass that ends now was for."""
        batch, self._batch = self._batch, []
        return batch

    def load(self, sessions: int, now: float) -> DrafterLoad:
        """For a heartbeat."""
        tokens, at = self._told
        self._told = self.tokens, now
        rate = (self.tokens - tokens) / (now - at) if now > at else 0.0
        queue = sum(len(ask.slots) for ask in self._line)
        return DrafterLoad(sessions, queue, rate, self.capacity_tokens_per_s)


def _rate(kind: Drafters, gamma: int) -> float:
    """Draft tokens a second, never idle, all passes full."""
    tokens = kind.max_batch * gamma
    return tokens / (kind.pass_s + tokens / kind.tokens_per_s)


def drafter_card(gamma: int) -> DrafterCard:
    """All drafters are of one checkpoint, and fit every verifier."""
    return DrafterCard(CHECKPOINT, "simulated", gamma)
