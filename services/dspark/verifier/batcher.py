"""Which sequences run in the next step, and how many tokens of each."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

from dspark.core.config import EngineConfig
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
    """Who is served first: higher priority, then earlier arrival."""
    return -sequence.state.request.priority, sequence.state.arrival


class Batcher:
    """Waiting and running sequences. Running ones keep their blocks between steps.

    A paused one is in no step and takes no room in one, so readers that stand still keep nobody
    out: it does not count to `max_sequences`, and its blocks are the first to be taken.
    """

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._cache = cache
        self._config = config

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is; its blocks go back."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self._cache.release(sequence)

    def compose(self) -> list[Item]:
        """The next step: every decoding sequence, then prefill chunks, then draft room."""
        self._admit()
        budget = self._config.max_step_tokens
        # More than a step holds may run once paused ones have gone on: the last ones sit out.
        in_turn = sorted(self._going(), key=rank)[: self._config.max_sequences]
        items = []
        for sequence in in_turn:
            preempted = not sequence.blocks  # by an earlier one's growth
            if not preempted and sequence.state.uncomputed == 1 and self._grow(sequence):
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
        held_back = 0
        for sequence in [s for s in self.waiting if not s.paused]:
            if self._shares_next_block(sequence, being_computed):
                held_back += 1
            elif self._attach(sequence):
                self.waiting.remove(sequence)
                self.running.append(sequence)
                being_computed.add(self._next_block(sequence))
                room -= 1
            else:
                return
            if not room or held_back == HELD_BACK:
                return

    def _going(self) -> list[Sequence]:
        return [sequence for sequence in self.running if not sequence.paused]

    def _attach(self, sequence: Sequence) -> bool:
        """Blocks for a sequence that starts, those of paused ones if need be."""
        while not self._cache.attach(sequence):
            paused = [other for other in self.running if other.paused]
            if not paused:
                return False
            self._preempt(max(paused, key=rank))
        return True

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
        sequence.draft = None
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
