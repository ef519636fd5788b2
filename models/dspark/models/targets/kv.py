"""Paged keys and values of every layer, as the transformers backend keeps them."""

from __future__ import annotations

import torch


class PagedKV:
    """Keys and values by layer: [kv heads, blocks, block_size, head_dim] each.

    Heads come first so that gathering a sequence's blocks by one `index_select` leaves every head
    with its tokens in a row, which is what attention reads. A layer's tensors are made when it
    first writes, since head counts and sizes may differ from layer to layer (Gemma 4).
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        unused: torch.Tensor,
    ) -> None:
        """Store keys and values [kv heads, B, head_dim] at token slots int64 [B], and zeros at the
        slots `unused`."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        for pool, rows in zip(self._layers[layer], (key, value), strict=True):
            pool.flatten(1, 2).index_copy_(1, slots, rows)
            pool.flatten(1, 2).index_fill_(1, unused, 0.0)

    def _empty(self, rows: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a kernel may read a padded slot before it masks it.
        return rows.new_zeros(rows.shape[0], self.blocks, self.block_size, rows.shape[2])

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[layer]

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks int64 [R, N] -> keys and values [R, kv heads, N * block_size, head_dim]."""
        rows, per_row = block_ids.shape
        flat = block_ids.flatten()

        def take(pool: torch.Tensor) -> torch.Tensor:
            return (
                pool.index_select(1, flat)
                .view(pool.shape[0], rows, per_row * self.block_size, pool.shape[3])
                .transpose(0, 1)
            )

        key, value = self._layers[layer]
        return take(key), take(value)

    def copy(self, src_block: int, dst_block: int) -> None:
        for pools in self._layers.values():
            for pool in pools:
                pool[:, dst_block] = pool[:, src_block]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pools in self._layers.values() for pool in pools)
