"""What a drafter remembers of its requests: a cache, bounded, rebuilt from the verifier at need.

Of each session it keeps the committed ids and, for the last W positions before the anchor, the
drafter's own keys and values of the context. Keys are rotated by their own positions, so where they
lie does not matter: they lie in a ring, with room behind it for the block being drafted. At a draft
the ring is full or filled from its start, so attention reads one slice, and nothing is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dspark.core.drafts import Draft, DraftRequest, NeedContext
from dspark.models.drafters.config import DrafterConfig

# Ring slots taken at first; doubled as a session grows.
FIRST_SLOTS = 256


@dataclass(slots=True)
class Session:
    """ids: committed, at positions base.. and the last of them the anchor. end: positions below it
    have keys and values; low: from there on they are still in the ring. slots: of the ring, without
    those of the block. draft: the last reply."""

    base: int
    low: int
    end: int
    ids: list[int] = field(default_factory=list)
    slots: int = 0
    ring: torch.Tensor | None = None
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that can be drafted once positions first..anchor-1 have been injected."""

    request: DraftRequest
    session: Session
    first: int

    @property
    def ring(self) -> torch.Tensor:
        """Of its session, which has one once something was injected."""
        assert self.session.ring is not None
        return self.session.ring


class RingLayout(Protocol):
    """How a ring lies in memory. axis: of the tensor, along which it grows."""

    @property
    def axis(self) -> int: ...

    def empty(self, slots: int) -> torch.Tensor:
        """A ring of so many slots and room for a block behind them."""
        ...


class Sessions:
    """Least recently used out first. window: W. lag: 1 if keys at position i depend on id i + 1.

    max_sessions, max_bytes: bounds on what is kept beyond the call being served.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        window: int,
        max_sessions: int,
        max_bytes: int,
        layout: RingLayout,
    ) -> None:
        self._window = window
        self._lag = 0 if config.parallel else 1
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._layout = layout
        self._held: OrderedDict[str, Session] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, session: str) -> bool:
        return session in self._held

    @property
    def window(self) -> int:
        return self._window

    @property
    def nbytes(self) -> int:
        """Of all rings."""
        return self._bytes

    def place(self, request: DraftRequest) -> Ready | NeedContext | Draft:
        """Bring a request's ids into its session: ready to draft, or answered already.

        NeedContext names the first position that is wanted and not known.
        """
        anchor, start = request.anchor_position, request.start
        needed = max(0, anchor - self._window)  # what the drafter reads begins here
        session = self._held.get(request.session)
        if session is None:
            return self._open(request) if start <= needed else NeedContext(request.session, needed)
        same = self._first_difference(session, request)
        last = session.draft
        here = session.end == anchor and same == anchor + 1
        if here and last is not None and last.round == request.round:
            self._held.move_to_end(request.session)
            return last
        keep = min(session.end, same - self._lag, anchor - self._lag)
        if session.low > needed or (start > keep and start <= needed):
            # Its ring has moved past what this anchor reads, or ends before it.
            return self._open(request) if start <= needed else NeedContext(request.session, needed)
        if start > keep:
            return NeedContext(request.session, max(keep, needed))
        del session.ids[same - session.base :]
        session.ids.extend(request.tokens[same - start :])
        return self._ready(request, session, keep)

    def _first_difference(self, session: Session, request: DraftRequest) -> int:
        """The first position, at or after the request's start, where what it says is not what is
        known; one past the last that both speak of if there is none."""
        begin = max(request.start, session.base)
        known = session.ids[begin - session.base :]
        said = request.tokens[begin - request.start :]
        for offset, (old, new) in enumerate(zip(known, said, strict=False)):
            if old != new:
                return begin + offset
        return begin + min(len(known), len(said))

    def _open(self, request: DraftRequest) -> Ready:
        self.close(request.session)
        base = max(0, request.anchor_position - self._window)
        session = Session(base, base, base, list(request.tokens[base - request.start :]))
        self._held[request.session] = session
        return self._ready(request, session, base)

    def _ready(self, request: DraftRequest, session: Session, keep: int) -> Ready:
        self._held.move_to_end(request.session)
        session.draft = None
        anchor = request.anchor_position
        session.low = max(session.low, anchor - self._window)
        session.end = anchor
        return Ready(request, session, max(keep, session.low))

    def first_slot(self, ready: Ready) -> int:
        """Where the first of a request's new positions goes; after slot W - 1 comes slot 0."""
        return (ready.first - ready.session.base) % self._window

    def inject(
        self,
        ready: Ready,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Put keys and values of positions first..anchor-1, [n, kv_heads, hd] a layer, in place."""
        ring, count = ready.ring, ready.session.end - ready.first
        start = self.first_slot(ready)
        before_end = min(count, self._window - start)
        for layer, pair in enumerate(layers):
            for which, rows in enumerate(pair):
                kept, rows = ring[layer, which], rows.transpose(0, 1)
                kept[:, start : start + before_end] = rows[:, :before_end]
                if before_end < count:
                    kept[:, : count - before_end] = rows[:, before_end:]

    def held(self, session: Session) -> int:
        """Positions of context in its ring, which fill it from the start."""
        return min(session.end, self._window)

    def make_slots(self, session: Session) -> None:
        """Room in its ring for all that it is to hold."""
        needed, room = self.held(session), session.slots
        if room >= needed and session.ring is not None:
            return
        slots = max(room, min(FIRST_SLOTS, self._window))
        while slots < needed:
            slots = min(2 * slots, self._window)
        ring, old = self._layout.empty(slots), session.ring
        if old is not None:  # it has never wrapped: it was below the window
            axis = self._layout.axis
            ring.narrow(axis, 0, old.shape[axis]).copy_(old)
            self._bytes -= old.nbytes
        session.ring, session.slots = ring, slots
        self._bytes += ring.nbytes

    def close(self, session: str) -> None:
        """Forget a session; an unknown one is fine."""
        gone = self._held.pop(session, None)
        if gone is not None and gone.ring is not None:
            self._bytes -= gone.ring.nbytes

    def make_room(self, keep: int) -> None:
        """Forget the oldest beyond the bounds, but none of the `keep` used last."""
        while len(self._held) > max(keep, 1) and (
            len(self._held) > self._max_sessions or self._bytes > self._max_bytes
        ):
            self.close(next(iter(self._held)))
