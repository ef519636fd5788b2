"""Attention of a batch of blocks, each over its own session's ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


class RingAttention:
    """An `Attend` for R sessions with `rows` rows each, in order.

    rings: float32 [layers, 2, kv_heads, slots, hd] of each session, filled up to held[r]. Behind
    that the block's own keys and values are written; `written` counts those of earlier calls, and
    is the caller's to move on. writes: False where the rows are in the ring already.

    Sessions are attended to one by one: no padding, no mask, no copy of a context, and a row does
    not depend on the lengths of its mates. Query heads that share a KV head are folded into rows.
    """

    def __init__(
        self, rings: Sequence[torch.Tensor], held: Sequence[int], rows: int, *, writes: bool = True
    ) -> None:
        self.written = 0
        self.writes = writes
        self._rings = rings
        self._held = held
        self._rows = rows

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        R, rows = len(self._rings), self._rows
        _, heads, hd = query.shape
        kv_heads = key.shape[1]
        shape = (R, rows, kv_heads, heads // kv_heads, hd)
        folded = query.view(shape).permute(0, 2, 3, 1, 4).reshape(R, kv_heads, -1, hd)
        new = torch.stack((key, value)).view(2, R, rows, kv_heads, hd).transpose(2, 3)
        seen = torch.empty_like(folded)
        for r, ring in enumerate(self._rings):
            end = self._held[r] + self.written
            if self.writes:
                ring[layer, :, :, end : end + rows] = new[:, r]
                end += rows
            keys, values = ring[layer, :, None, :, :end].unbind(0)
            seen[r] = functional.scaled_dot_product_attention(folded[r : r + 1], keys, values)[0]
        unfolded = seen.view(R, kv_heads, heads // kv_heads, rows, hd).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(R * rows, heads, hd)
