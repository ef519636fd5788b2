"""Which sequences run in the next step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dspark.core.config import EngineConfig
from dspark.scheduler.fair_queue import FairQueue, Waiting
from dspark.verifier.blocks import digest
from dspark.verifier.kv_cache import KVCache
from dspark.verifier.sequence import Sequence

# Waiting sequences that one step looks past because a running one computes what they need.
HELD_BACK = 16


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence's part in a step: `tokens` of its uncomputed ids, then at most `draft_cap`
    draft tokens. The cap is settled before any survival is looked at, so it says nothing of a
    draft's tokens (L2).

    decoding: only the anchor is uncomputed. reaches_end: the step computes the sequence's last
    token, and so yields a next one.
    """

    sequence: Sequence
    tokens: int
    decoding: bool
    reaches_end: bool
    draft_cap: int = 0


def rank(sequence: Sequence) -> tuple[int, int]:
    """Who keeps its place first: higher priority, then earlier arrival."""
    return -sequence.state.request.priority, sequence.state.arrival


def _beyond(most: int | None, in_turn: list[Sequence]) -> set[Sequence]:
    """Those whose draft from elsewhere has to wait for the next step: the last ones to come."""
    if most is None:
        return set()
    ready = [s for s in in_turn if s.draft is not None and s.draft.linked]
    return set(sorted(ready, key=_number)[most:])


def _number(sequence: Sequence) -> int:
    assert sequence.draft is not None
    return sequence.draft.number


class Batcher:
    """Waiting and running sequences. Running ones keep their blocks between steps.

    Those that wait come in by tenants' shares, counted in tokens. A paused one is in no step and
    takes no room in one, so readers that stand still keep nobody out: it does not count to
    `max_sequences`, and its blocks are the first to be taken. forget_draft: called for one that
    loses its blocks.
    """

    def __init__(
        self, cache: KVCache, config: EngineConfig, forget_draft: Callable[[Sequence], None]
    ) -> None:
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._cache = cache
        self._config = config
        self._forget_draft = forget_draft
        self._queue: FairQueue[Sequence] = FairQueue()
        self._paused: dict[Sequence, None] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue) + len(self._paused)

    @property
    def waiting(self) -> list[Sequence]:
        """In no order; paused ones, which nothing is done for, among them."""
        return [*self._queue, *self._paused]

    def add(self, sequence: Sequence) -> None:
        """It waits from now on. What it costs is what it has to compute, once: later it waits only
        because its blocks were taken. What it commits is charged as it comes."""
        request, came_in = sequence.state.request, sequence.state.cached is not None
        cost = 0 if came_in else sequence.state.uncomputed
        self._queue.push(
            request.tenant, cost, sequence, request.priority, arrival=sequence.state.arrival
        )

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is; its blocks go back."""
        if sequence in self._paused:
            del self._paused[sequence]
        elif not self._queue.remove(sequence):
            self.running.remove(sequence)
        self._cache.release(sequence)

    def pause(self, sequence: Sequence) -> None:
        """It keeps its place, be it in a step or in the queue, and is not served."""
        if self._queue.remove(sequence):
            self._paused[sequence] = None

    def go_on(self, sequence: Sequence) -> None:
        if sequence in self._paused:
            del self._paused[sequence]
            self.add(sequence)

    def charge(self, tenant: str, tokens: int) -> None:
        """A tenant was served so many tokens of answers."""
        self._queue.charge(tenant, tokens)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Of the tokens admitted while more wait than can run; a tenant left out has share 1."""
        self._queue.set_shares(shares)

    def compose(self, most_linked: int | None = None) -> list[Item]:
        """The next step: every decoding sequence that does not wait for its draft, then prefill
        chunks, then draft room. most_linked: of those whose draft came from elsewhere, None for all
        of them; the longest ready go first."""
        self._admit()
        budget = self._config.max_step_tokens
        # More than a step holds may run once paused ones have gone on: the last ones sit out.
        in_turn = sorted(self._going(), key=rank)[: self._config.max_sequences]
        left_out = _beyond(most_linked, in_turn)
        items = []
        for sequence in in_turn:
            preempted = not sequence.blocks  # by an earlier one's growth
            if preempted or sequence.asked is not None or sequence in left_out:
                continue
            if sequence.state.uncomputed == 1 and self._grow(sequence):
                items.append(Item(sequence, 1, decoding=True, reaches_end=True))
                budget -= 1
        budget = min(budget, self._config.prefill_chunk)
        for sequence in in_turn:
            if sequence.blocks and sequence.state.uncomputed > 1 and budget > 0:
                tokens = min(sequence.state.uncomputed, budget)
                ends = tokens == sequence.state.uncomputed
                items.append(Item(sequence, tokens, decoding=False, reaches_end=ends))
                budget -= tokens
        # A later sequence may have been preempted to make an earlier one grow.
        items = [item for item in items if item.sequence.blocks]
        return self._with_draft_room(items)

    def _admit(self) -> None:
        """Start waiting sequences while they fit. One whose next block is being computed by a
        running sequence is held back: in a step or two it will find that block cached."""
        going = self._going()
        room = self._config.max_sequences - len(going)
        if room <= 0:
            return
        being_computed = {self._next_block(s) for s in going if s.state.uncomputed > 1}
        held_back: list[Waiting[Sequence]] = []
        try:
            while room and self._queue and len(held_back) < HELD_BACK:
                held_back.append(self._queue.pop())
                sequence = held_back[-1].item
                if self._shares_next_block(sequence, being_computed):
                    continue
                if not self._attach(sequence):
                    break
                held_back.pop()
                self.running.append(sequence)
                being_computed.add(self._next_block(sequence))
                room -= 1
        finally:
            for waiting in reversed(held_back):
                self._queue.put_back(waiting)

    def _going(self) -> list[Sequence]:
        return [sequence for sequence in self.running if not sequence.paused]

    def _attach(self, sequence: Sequence) -> bool:
        """Blocks for a sequence that starts, those of paused ones if that helps."""
        if self._cache.attach(sequence):
            return True
        paused = sorted((other for other in self.running if other.paused), key=rank)
        if not paused or not self._cache.fits_without(paused, sequence):
            return False
        while paused:
            self._preempt(paused.pop())
            if self._cache.attach(sequence):
                return True
        return False

    def _next_block(self, sequence: Sequence) -> bytes | None:
        """Name of the first block that the sequence has still to compute, if it fills one."""
        size = self._cache.pool.block_size
        index = len(sequence.names)
        tokens = sequence.state.ids[index * size : (index + 1) * size]
        if len(tokens) < size:
            return None
        return digest(sequence.names[-1] if sequence.names else b"", tokens)

    def _shares_next_block(self, sequence: Sequence, being_computed: set[bytes | None]) -> bool:
        if not being_computed - {None}:  # a part-filled block has no name and is not waited for
            return False
        match = self._cache.pool.match(sequence.state.ids[:-1], sequence.feature_id)
        sequence.names = list(match.names)
        name = self._next_block(sequence)
        return name is not None and name in being_computed

    def _grow(self, sequence: Sequence) -> bool:
        """Room for the sequence's anchor, taken from the least important if need be: a paused one
        before any other."""
        while not self._cache.extend(sequence, len(sequence.state.ids)):
            victim = max(self.running, key=lambda other: (other.paused, rank(other)))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its tokens are run again later (or found cached)."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._cache.release(sequence)
        self._forget_draft(sequence)
        if sequence.paused:
            self._paused[sequence] = None
        else:
            self.add(sequence)

    def _with_draft_room(self, items: list[Item]) -> list[Item]:
        """Give each draft in hand room in tokens and blocks, first come first served."""
        budget = self._config.max_step_tokens - sum(item.tokens for item in items)
        roomy = []
        for item in items:
            sequence = item.sequence
            draft = sequence.draft
            if draft is None or not item.decoding:
                roomy.append(item)
                continue
            # The block's length, not that of its believable part: how far a block is valid may
            # not move the room of its mates.
            cap = max(min(len(draft.draft.ids), sequence.state.draft_room, budget), 0)
            if not self._cache.extend(sequence, len(sequence.state.ids) + cap):
                cap = min(cap, self._cache.spare_tokens(sequence))
            budget -= cap
            roomy.append(replace(item, draft_cap=cap))
        return roomy
