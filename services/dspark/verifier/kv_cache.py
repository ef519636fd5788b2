"""KV blocks of running sequences: attach a cached prefix, grow, remember, let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from dspark.models.targets.backend import Backend
from dspark.verifier.blocks import ROOT, BlockPool
from dspark.verifier.features import FeatureCache
from dspark.verifier.sequence import Sequence


class KVCache:
    """Joins block numbers (`BlockPool`), their contents (the backend) and their features."""

    def __init__(self, backend: Backend, blocks: int) -> None:
        self.pool = BlockPool(blocks, backend.block_size)
        self.features = FeatureCache(blocks, backend.block_size)
        self._backend = backend
        backend.allocate(blocks)

    def attach(self, sequence: Sequence) -> bool:
        """Give a sequence its cached prefix and blocks for all its tokens; False = no room now.

        At least the last token stays uncomputed: its logits are what the sequence waits for.
        """
        state, pool = sequence.state, self.pool
        match = pool.match(state.ids[:-1], sequence.feature_id)
        for block in match.blocks:
            pool.share(block)
        needed = self._blocks_for(len(state.ids)) - len(match.blocks)
        donor = match.donor
        sequence.donor = None
        if donor is not None:
            pool.share(donor)
            if needed > pool.available:  # holding it for the copy may take the last room
                pool.release(donor)
                donor = None
        if needed > pool.available:
            for block in reversed(match.blocks):
                pool.release(block)
            return False
        sequence.blocks = [*match.blocks, *(pool.take() for _ in range(needed))]
        sequence.names = list(match.names)
        state.computed = len(match.blocks) * pool.block_size
        if donor is not None:
            own = sequence.blocks[len(match.blocks)]
            try:
                self._backend.copy(donor, own)
                self.features.copy(donor, own)
            finally:
                pool.release(donor)
            sequence.donor = donor
            state.computed += match.tokens
        if state.cached is None:
            state.cached = state.computed
        return True

    def fits_without(self, others: Iterable[Sequence], sequence: Sequence) -> bool:
        """Whether a sequence could be attached if others let all their blocks go."""
        pool, theirs = self.pool, Counter(block for other in others for block in other.blocks)
        freed = sum(pool.references(block) == count for block, count in theirs.items())
        match = pool.match(sequence.state.ids[:-1], sequence.feature_id)
        kept = sum(pool.references(block) > theirs[block] for block in match.blocks)
        return self._blocks_for(len(sequence.state.ids)) - kept <= pool.available + freed

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for `tokens` tokens in all; False, and nothing changed, if there is none."""
        missing = self._blocks_for(tokens) - len(sequence.blocks)
        if missing > self.pool.available:
            return False
        sequence.blocks.extend(self.pool.take() for _ in range(missing))
        return True

    def forget_features(self, feature_id: str) -> None:
        """Nobody reads them any more: tokens stay cached, for others and for another version to be
        made from again."""
        self.pool.forget_features(feature_id)
        self.features.close(feature_id)

    def spare_tokens(self, sequence: Sequence) -> int:
        """Tokens that still fit into the sequence's own blocks."""
        return len(sequence.blocks) * self.pool.block_size - len(sequence.state.ids)

    def remember(self, sequence: Sequence) -> None:
        """Name the blocks that the sequence has filled since the last call."""
        size = self.pool.block_size
        while (len(sequence.names) + 1) * size <= sequence.state.computed:
            self._register(sequence, size)

    def remember_tail(self, sequence: Sequence) -> None:
        """Name the last, part-filled block too, so that a sibling or successor may copy it."""
        tail = sequence.state.computed - len(sequence.names) * self.pool.block_size
        if tail > 0:
            self._register(sequence, tail)

    def _register(self, sequence: Sequence, tokens: int) -> None:
        index = len(sequence.names)
        start = index * self.pool.block_size
        parent = sequence.names[-1] if sequence.names else ROOT
        name = self.pool.register(
            sequence.blocks[index],
            parent,
            sequence.state.ids[start : start + tokens],
            sequence.feature_id,
        )
        if name is not None:
            sequence.names.append(name)

    def release(self, sequence: Sequence) -> None:
        """Let all blocks go; what they hold stays cached while there is room."""
        self.remember(sequence)
        self.remember_tail(sequence)
        # Last block first: the tail of a prefix is evicted before its beginning.
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        sequence.blocks = []
        sequence.names = []
        sequence.state.forget_computed()

    def discard(self, sequence: Sequence) -> None:
        """Let all blocks go, and trust nothing of what they hold: the target's rows were broken.
        That counts for the cached blocks that it began with as well, which the next one with this
        prefix would break on again."""
        for block in sequence.blocks:
            self.pool.forget(block)
        if sequence.donor is not None:
            self.pool.forget(sequence.donor)
        sequence.state.forget_computed()
        self.release(sequence)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def table(self, sequences: list[Sequence]) -> np.ndarray:
        """int32 [R, N] block table, padded with block 0."""
        table = np.zeros((len(sequences), max(len(s.blocks) for s in sequences)), np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        return table
