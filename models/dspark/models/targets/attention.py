"""Ragged paged attention behind transformers' attention interface.

`attend` is the one function that every model's attention modules call. It writes the step's keys
and values into the paged cache and asks the step's kernel for the result. Two kernels:
`PaddedAttention` (torch only, any device; the reference) and
`dspark.models.targets.attention_cuda` (FlashInfer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.kv import PagedKV

# Sequences with more new tokens than this are attended to one by one: padding their
# mates to a prefill chunk would multiply the work.
LONG_QUERY = 32
# Tokens of padding worth one more group of calls, measured on 2 cores: a group costs
# about 50 µs a layer, reading a padded token about 0.2 µs.
PADDING_WORTH_A_GROUP = 256
# Up to so many query rows a KV head, plain matrix products beat torch's fused kernel on a CPU (at
# 16 sequences of 320 tokens 0.18 against 0.48 ms a layer, 2 cores).
FEW_ROWS = 8


class StepAttention(Protocol):
    """Attention of one step: where its tokens go and what each of them may read."""

    kv: PagedKV
    slots: torch.Tensor
    unused: torch.Tensor

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [heads, B, head_dim] -> [B, heads, head_dim]."""
        ...


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    dspark_step: StepAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: [1, heads, B, hd] in, [1, B, heads, hd] out.

    Layers that share another layer's cache (Gemma 4) read the donor's and must not write. Rows
    beyond the step's tokens are padding (`PackedLinear`) and come back as zeros.
    """
    layer = module.layer_idx
    rows, B = query.shape[2], len(dspark_step.slots)
    if rows > B:
        query, key, value = query[:, :, :B], key[:, :, :B], value[:, :, :B]
    if getattr(module, "is_kv_shared_layer", False):
        layer = donor_layer(module.config, layer)
    else:
        dspark_step.kv.write(layer, key[0], value[0], dspark_step.slots, dspark_step.unused)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = dspark_step(layer, query[0], scaling, sliding_window, softcap)
    if rows > B:
        out = functional.pad(out, (0, 0, 0, 0, 0, rows - B))
    return out.unsqueeze(0), None


def donor_layer(config: Any, layer: int) -> int:
    """The last layer of the same type that stores its own keys and values."""
    kind = config.layer_types[layer]
    for candidate in range(layer - 1, -1, -1):
        if config.kv_sharing_modes[candidate] == "store" and config.layer_types[candidate] == kind:
            return candidate
    raise ValueError(f"layer {layer} shares a cache that no earlier {kind} layer stores")


def token_slots(batch: RaggedBatch, block_size: int) -> np.ndarray:
    """int64 [B]: the cache slot of each new token."""
    lengths = np.diff(batch.query_start)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    index = batch.context_len[sequence] + np.arange(len(sequence)) - batch.query_start[sequence]
    blocks = batch.block_table[sequence, index // block_size].astype(np.int64)
    return np.asarray(blocks * block_size + index % block_size)


def unused_slots(batch: RaggedBatch, block_size: int) -> np.ndarray:
    """int64: the slots behind each sequence's end in its last block. A rejected draft or an earlier
    owner may have left NaN there, and no mask undoes that: NaN * 0 is NaN."""
    totals = batch.context_len + np.diff(batch.query_start)
    last = batch.block_table[np.arange(len(totals)), (totals - 1) // block_size].astype(np.int64)
    used = (totals - 1) % block_size + 1
    slots = last[:, None] * block_size + np.arange(block_size)
    return np.asarray(slots[np.arange(block_size) >= used[:, None]])


@dataclass(frozen=True)
class _Group:
    """Sequences attended to together, padded to one shape.

    rows: int64 [n, q], rows of the step (padding repeats a valid row), None if they are 0..B-1 and
    all real. valid: the flat positions in [n, q] that are real, None if all are. out_rows: rows
    they go to, None if they are 0..B-1. block_ids: int64 [n, N], padded with each sequence's own
    last block: nothing of another is ever read. query_index: [n, q, 1], positions in the sequence.
    masks: by window, filled when first asked for.
    """

    rows: torch.Tensor | None
    shape: tuple[int, int]
    valid: torch.Tensor | None
    out_rows: torch.Tensor | None
    block_ids: torch.Tensor
    query_index: torch.Tensor
    masks: dict[int | None, torch.Tensor]

    def mask(
        self, keys: int, heads_per_kv: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Additive [n, 1, heads_per_kv * q, S]: 0 where a query may look, -inf elsewhere."""
        if window not in self.masks:
            key_index = torch.arange(keys, device=self.query_index.device)
            seen = key_index <= self.query_index
            if window is not None:
                seen &= key_index > self.query_index - window
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            bias.masked_fill_(~seen, float("-inf"))
            n, q = self.shape
            self.masks[window] = (
                bias[:, None].expand(n, heads_per_kv, q, keys).reshape(n, 1, heads_per_kv * q, keys)
            )
        return self.masks[window]


class PaddedAttention:
    """Attention of one step by gathered, padded blocks and torch's own SDPA.

    Grouped-query heads are folded into the query length, so keys and values are read once a KV
    head.
    """

    def __init__(self, batch: RaggedBatch, kv: PagedKV, device: torch.device) -> None:
        self.kv = kv
        self.slots = torch.from_numpy(token_slots(batch, kv.block_size)).to(device)
        self.unused = torch.from_numpy(unused_slots(batch, kv.block_size)).to(device)
        self._tokens = len(batch.token_ids)
        self._groups = [
            _group(batch, members, kv.block_size, device) for members in group_sequences(batch)
        ]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        heads, _, head_dim = query.shape
        if len(self._groups) == 1 and self._groups[0].out_rows is None:
            return self._attend_group(
                self._groups[0], layer, query, scaling, sliding_window, softcap
            )
        out = query.new_empty(self._tokens, heads, head_dim)
        for group in self._groups:
            rows = self._attend_group(group, layer, query, scaling, sliding_window, softcap)
            out[group.out_rows] = rows
        return out

    def _attend_group(
        self,
        group: _Group,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        heads, _, head_dim = query.shape
        n, q_len = group.shape
        key, value = self.kv.gather(layer, group.block_ids)
        kv_heads, keys = key.shape[1], key.shape[2]
        per_kv = heads // kv_heads
        if group.rows is not None:
            query = query[:, group.rows.flatten()]
        folded = query.view(kv_heads, per_kv, n, q_len, head_dim).permute(2, 0, 1, 3, 4)
        folded = folded.reshape(n, kv_heads, per_kv * q_len, head_dim)
        mask = group.mask(keys, per_kv, window, query.dtype)
        if softcap is None and folded.shape[2] > FEW_ROWS:
            out = functional.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
        else:
            scores = folded @ key.transpose(2, 3) * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out = torch.softmax((scores + mask).float(), -1).to(value.dtype) @ value
        out = out.view(n, kv_heads, per_kv, q_len, value.shape[3]).permute(0, 3, 1, 2, 4)
        rows = out.reshape(n * q_len, heads, value.shape[3])
        return rows if group.valid is None else rows[group.valid]


def group_sequences(batch: RaggedBatch) -> list[np.ndarray]:
    """Split R sequences so that little is padded: long queries alone, the rest by length."""
    queries = np.diff(batch.query_start)
    totals = batch.context_len + queries
    groups = [np.array([r]) for r in np.flatnonzero(queries > LONG_QUERY)]
    short = np.flatnonzero(queries <= LONG_QUERY)
    start, waste = 0, 0
    order = short[np.argsort(-totals[short], kind="stable")]
    for i, r in enumerate(order):
        waste += int(totals[order[start]] - totals[r])
        if waste > PADDING_WORTH_A_GROUP:
            groups.append(np.sort(order[start:i]))
            start, waste = i, 0
    if start < len(order):
        groups.append(np.sort(order[start:]))
    return groups


def _group(
    batch: RaggedBatch, members: np.ndarray, block_size: int, device: torch.device
) -> _Group:
    starts = batch.query_start[members].astype(np.int64)
    queries = np.diff(batch.query_start)[members]
    contexts = batch.context_len[members].astype(np.int64)
    n, q_len = len(members), int(queries.max())
    offsets = np.minimum(np.arange(q_len), queries[:, None] - 1)
    rows = starts[:, None] + offsets
    valid = (np.arange(q_len) < queries[:, None]).ravel()
    totals = contexts + queries
    blocks = -(-int(totals.max()) // block_size)
    block_index = np.minimum(np.arange(blocks), (totals[:, None] - 1) // block_size)
    out_rows = rows.ravel()[valid]
    in_order = len(out_rows) == len(batch.token_ids) and bool(np.all(np.diff(out_rows) == 1))
    query_index = contexts[:, None] + offsets

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return _Group(
        rows=None if in_order and valid.all() else put(rows),
        shape=(n, q_len),
        valid=None if valid.all() else put(np.flatnonzero(valid)),
        out_rows=None if in_order else put(out_rows),
        block_ids=put(batch.block_table[members[:, None], block_index].astype(np.int64)),
        query_index=put(query_index[:, :, None]),
        masks={},
    )
