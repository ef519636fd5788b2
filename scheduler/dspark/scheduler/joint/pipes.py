"""Draft tokens a second, flowing from drafters to the verifiers that draw on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from dspark.scheduler.joint.steps import FloatArray, IntArray, summed

# Draft tokens a second that are nothing.
NOTHING = 1e-9
# A drafter with so little of its capacity left is full: shreds are not worth a detour.
SHRED = 1e-3
# Drafters that may run full one after another while all are given the same part; what is left then
# is given to one verifier at a time.
EVEN_ROUNDS = 16
# Detours in one plan, a bound on its time (20 to 60 µs each). Up to some hundred verifiers that
# draw on several full drafters each they are enough; a thousand lose 0.03 % of the objective.
MAX_DETOURS = 150


class Pipes:
    """Draft tokens a second from drafters to verifiers: what has been given, and what still can be.

    capacity: [D]. of, to, most: [A] arcs: verifier, drafter, and the most that the verifier's
    requests there can use. Giving one verifier more may move another to a second drafter, never
    take from it.
    """

    def __init__(
        self, capacity: FloatArray, V: int, of: IntArray, to: IntArray, most: FloatArray
    ) -> None:
        self._capacity, self._of, self._to = capacity, of, to
        self._most = summed(of, most, V)
        self._part = np.divide(most, self._most[of], out=np.zeros_like(most), where=most > 0)
        self._left: list[float] = capacity.tolist()
        self._shred: list[float] = (SHRED * capacity).tolist()
        self._spare = set(range(len(capacity)))  # those with more than a shred left
        self._full: set[int] = set()  # nothing can be had of these by any detour
        self._detours = 0
        self._users: list[set[int]] = [set() for _ in self._left]
        self._arcs: list[dict[int, float]] = [{} for _ in range(V)]
        for v, d, tokens in zip(of.tolist(), to.tolist(), most.tolist(), strict=True):
            self._arcs[v][d] = tokens
        self._given: list[dict[int, float]] = [dict.fromkeys(own, 0.0) for own in self._arcs]

    @property
    def dry(self) -> bool:
        """Whether all drafters are full."""
        return not self._spare

    def fits(self, tokens: FloatArray) -> bool:
        """Whether verifiers can have so much [V] if each draws on its drafters evenly."""
        load = summed(self._to, self._part * tokens[self._of], len(self._capacity))
        return bool((load <= self._capacity).all() and (tokens <= self._most + NOTHING).all())

    def begin(self, tokens: FloatArray) -> None:
        """Give verifiers so much [V], which fits, before anything else is given."""
        parts = self._part * tokens[self._of]
        left = self._capacity - summed(self._to, parts, len(self._capacity))
        self._left = left.tolist()
        self._spare = set(np.flatnonzero(left > SHRED * self._capacity).tolist())
        for v, d, part in zip(self._of.tolist(), self._to.tolist(), parts.tolist(), strict=True):
            self._given[v][d] = part
            if part > NOTHING:
                self._users[d].add(v)

    def begin_evenly(self, tokens: FloatArray) -> FloatArray:
        """Give verifiers the same part of `tokens` [V] before anything else is given, each of them
        until a drafter of its own runs full; what they got."""
        tokens = np.minimum(tokens, self._most)
        part, room = np.zeros(len(tokens)), self._capacity.copy()
        going = tokens > NOTHING
        for _ in range(EVEN_ROUNDS):
            each = self._part * np.where(going, tokens, 0.0)[self._of]
            load = summed(self._to, each, len(room))
            step = np.divide(room, load, out=np.full_like(room, np.inf), where=load > 0)
            more = min(float(step.min(initial=np.inf)), 1.0 - float(part.max(initial=0.0)))
            part[going] += more
            room = np.maximum(room - more * load, 0.0)
            full = room <= SHRED * self._capacity
            going = going & (part < 1.0)
            going &= summed(self._of, (full[self._to] & (each > 0)).astype(float), len(part)) == 0
            if not going.any():
                break
        got = part * tokens
        self.begin(got)
        return got

    def given(self, v: int) -> Mapping[int, float]:
        """By drafter."""
        return self._given[v]

    def give(self, v: int, tokens: float) -> float:
        """Give verifier v up to so much more; what it got."""
        given = self._given[v]
        rooms = [
            (d, min(self._left[d], most - given[d]))
            for d, most in self._arcs[v].items()
            if d not in self._full
        ]
        room = sum(r for _, r in rooms)
        if room > NOTHING:
            # Evenly, so that drafters run full together and few detours are left to make.
            part = min(tokens / room, 1.0)
            for d, r in rooms:
                self._move(v, d, r * part)
            if part < 1.0:
                return tokens
        got = room
        while tokens - got > NOTHING:
            moved = self._detour(v, tokens - got)
            if moved <= 0.0:
                break
            got += moved
        return got

    def top_up(self, v: int, d: int, tokens: float) -> None:
        """Give verifier v up to so much more of drafter d, beside its capacity, after all else."""
        self._given[v][d] += min(tokens, self._arcs[v][d] - self._given[v][d])

    def take_back(self, v: int, tokens: float) -> None:
        if tokens <= 0.0:
            return
        for d, given in self._given[v].items():
            part = min(tokens, given)
            self._move(v, d, -part)
            tokens -= part
        self._full.clear()

    def _move(self, v: int, d: int, tokens: float) -> None:
        self._left[d] -= tokens
        if self._left[d] > self._shred[d]:
            self._spare.add(d)
        else:
            self._spare.discard(d)
        given = self._given[v]
        given[d] += tokens
        if given[d] > NOTHING:
            self._users[d].add(v)
        else:
            self._users[d].discard(v)

    def _detour(self, v: int, tokens: float) -> float:
        """Along the shortest chain: v takes of d₀, its user goes to d₁, … until d_n has room."""
        if not self._spare or self._detours == MAX_DETOURS:
            return 0.0
        self._detours += 1
        came = dict.fromkeys(self._open(v), (v, -1))  # drafter: (who would draw on it, instead of)
        queue = deque(came)
        seen = {v}
        while queue:
            d = queue.popleft()
            for user in self._users[d] - seen:
                seen.add(user)
                for other in self._open(user):
                    if other not in came:
                        came[other] = (user, d)
                        if other in self._spare:
                            return self._shift(came, other, tokens)
                        queue.append(other)
        self._full.update(came)
        return 0.0

    def _open(self, v: int) -> list[int]:
        given = self._given[v]
        full = self._full
        return [
            d for d, most in self._arcs[v].items() if d not in full and most - given[d] > NOTHING
        ]

    def _shift(self, came: Mapping[int, tuple[int, int]], d: int, tokens: float) -> float:
        chain: list[tuple[int, int, int]] = []  # (verifier, draws on, instead of)
        tokens = min(tokens, self._left[d])
        while d >= 0:
            v, instead = came[d]
            chain.append((v, d, instead))
            tokens = min(tokens, self._arcs[v][d] - self._given[v][d])
            if instead >= 0:
                tokens = min(tokens, self._given[v][instead])
            d = instead
        for v, d, instead in chain:
            self._move(v, d, tokens)
            if instead >= 0:
                self._move(v, instead, -tokens)
        return tokens
