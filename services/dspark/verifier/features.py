"""Context features of computed tokens, kept beside their KV blocks."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


class FeatureCache:
    """float32 [blocks * block_size, d] by feature_id; a row lives exactly as long as its KV slot.

    Memory is taken page by page as it is first written, or at once (`open`).
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._slots = blocks * block_size
        self._block_size = block_size
        self._rows: dict[str, NDArray[np.float32]] = {}

    def open(self, feature_id: str, width: int, *, at_once: bool = False) -> None:
        """Make room for features of one drafter version, [.., width].

        at_once: take its memory now, before anything is served. Else no time is taken here, and
        steps write to new pages, 0.05 ms a step at sixteen users; not to huge ones, which numpy
        would ask for: a step waits up to 5 ms for one where memory is full of files.
        """
        if feature_id in self._rows:
            return
        memory = mmap.mmap(-1, self._slots * width * np.dtype(np.float32).itemsize)
        self._rows[feature_id] = np.frombuffer(memory, np.float32).reshape(-1, width)
        if at_once:
            self._rows[feature_id].fill(0)

    def widths(self) -> dict[str, int]:
        """d of each version that there is room for."""
        return {feature_id: rows.shape[1] for feature_id, rows in self._rows.items()}

    def close(self, feature_id: str) -> None:
        """Forget a version that nobody reads any more."""
        self._rows.pop(feature_id, None)

    def store(
        self, feature_id: str, blocks: Sequence[int], start: int, rows: NDArray[np.float32]
    ) -> None:
        """Keep rows [n, d] of the sequence's positions start..start+n-1."""
        table, at = self._rows[feature_id], 0
        if len(rows) == 1:  # nearly always
            block, within = divmod(start, self._block_size)
            table[blocks[block] * self._block_size + within] = rows[0]
            return
        for slots in self._slots_of(blocks, start, start + len(rows)):
            count = slots.stop - slots.start
            table[slots] = rows[at : at + count]
            at += count

    def read(
        self, feature_id: str, blocks: Sequence[int], start: int, stop: int
    ) -> NDArray[np.float32]:
        """A copy of the rows of positions start..stop-1, [stop - start, d]."""
        table = self._rows[feature_id]
        parts = [table[slots] for slots in self._slots_of(blocks, start, stop)]
        return np.concatenate(parts) if parts else table[:0].copy()

    def copy(self, src_block: int, dst_block: int) -> None:
        size = self._block_size
        for rows in self._rows.values():
            rows[dst_block * size : (dst_block + 1) * size] = rows[
                src_block * size : (src_block + 1) * size
            ]

    def _slots_of(self, blocks: Sequence[int], start: int, stop: int) -> Iterator[slice]:
        """Of positions start..stop-1, one run a block. Nearly always a few tokens of one block:
        indices of every slot took five times as long."""
        size = self._block_size
        for index in range(start // size, -(-stop // size)):
            first = blocks[index] * size
            begin, end = max(start - index * size, 0), min(stop - index * size, size)
            if begin < end:
                yield slice(first + begin, first + end)
