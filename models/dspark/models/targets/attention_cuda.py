"""Paged variable-length attention on CUDA by FlashInfer, behind the same function as the CPU's.

Never run yet: no CUDA machine was at hand when this was written. `make check-gpu` is the check.
Float32 models take `PaddedAttention` on CUDA too, since FlashInfer has half-precision kernels only.
"""

from __future__ import annotations

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from dspark.models.targets.attention import token_slots
from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.kv import PagedKV

# FlashInfer's own recommendation; split-KV partial results live in it.
WORKSPACE_BYTES = 128 * 1024 * 1024


class FlashInferStep:
    """Attention of one step. Wrappers are planned once for each (heads, window, softcap) that the
    model's layers turn out to use, and then run layer by layer."""

    def __init__(
        self, batch: RaggedBatch, kv: PagedKV, device: torch.device, workspace: torch.Tensor
    ) -> None:
        self.kv = kv
        self.slots = torch.from_numpy(token_slots(batch, kv.block_size)).to(device)
        self.unused = torch.empty(0, dtype=torch.int64, device=device)  # its kernels stop in time
        self._workspace = workspace
        totals = batch.context_len + np.diff(batch.query_start)
        pages = -(-totals // kv.block_size)
        table = np.concatenate(
            [row[:n] for row, n in zip(batch.block_table, pages, strict=True)]
        ).astype(np.int32)
        indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        last = (totals - 1) % kv.block_size + 1
        self._query_indptr = torch.from_numpy(batch.query_start).to(device)
        self._page_indptr = torch.from_numpy(indptr).to(device)
        self._pages = torch.from_numpy(table).to(device)
        self._last_page = torch.from_numpy(last.astype(np.int32)).to(device)
        self._planned: dict[tuple[object, ...], BatchPrefillWithPagedKVCacheWrapper] = {}

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        key, value = self.kv.layer(layer)
        wrapper = self._plan(query, key, scaling, sliding_window, softcap)
        # The pool is [kv heads, blocks, block_size, head_dim]; FlashInfer's HND page layout has
        # the blocks first. Its kernels take strides, so a view is enough.
        out: torch.Tensor = wrapper.run(
            query.transpose(0, 1).contiguous(), (key.transpose(0, 1), value.transpose(0, 1))
        )
        return out

    def _plan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        shape = (query.shape[0], key.shape[0], query.shape[2], scaling, window, softcap)
        if shape not in self._planned:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            wrapper.plan(
                self._query_indptr,
                self._page_indptr,
                self._pages,
                self._last_page,
                query.shape[0],
                key.shape[0],
                query.shape[2],
                self.kv.block_size,
                causal=True,
                sm_scale=scaling,
                # A token sees itself and window - 1 before it.
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=softcap,
                q_data_type=query.dtype,
                kv_data_type=key.dtype,
            )
            self._planned[shape] = wrapper
        return self._planned[shape]
