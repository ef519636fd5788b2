"""Context features of computed tokens, kept beside their KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class FeatureCache:
    """float32 [blocks * block_size, d] by feature_id; a row lives exactly as long as its KV slot.

    Memory is taken on first touch only (the pool is mapped zeroed), so an idle drafter version
    costs nothing.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._slots = blocks * block_size
        self._block_size = block_size
        self._rows: dict[str, NDArray[np.float32]] = {}

    def open(self, feature_id: str, width: int) -> None:
        """Make room for features of one drafter version, [.., width]."""
        self._rows.setdefault(feature_id, np.zeros((self._slots, width), np.float32))

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
        self._rows[feature_id][self._slots_of(blocks, start, start + len(rows))] = rows

    def read(
        self, feature_id: str, blocks: Sequence[int], start: int, stop: int
    ) -> NDArray[np.float32]:
        """A copy of the rows of positions start..stop-1, [stop - start, d]."""
        return self._rows[feature_id][self._slots_of(blocks, start, stop)]

    def copy(self, src_block: int, dst_block: int) -> None:
        size = self._block_size
        for rows in self._rows.values():
            rows[dst_block * size : (dst_block + 1) * size] = rows[
                src_block * size : (src_block + 1) * size
            ]

    def _slots_of(self, blocks: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        first = start // self._block_size
        touched = np.asarray(blocks[first : -(-stop // self._block_size)], dtype=np.int64)
        block = touched[positions // self._block_size - first]
        return block * self._block_size + positions % self._block_size
