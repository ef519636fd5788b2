"""Attention of packed blocks: each sees its own sequence's context before its anchor, and itself.

No mask over all pairs is built: a sequence's blocks share one product with its context, and each
has a small one of its own, so work and memory are A·γ·(T + γ) of one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dspark.training.packing import Pack

KeysValues = tuple[torch.Tensor, torch.Tensor]


class PackedAttention:
    """The `Attend` of a drafter's layers for the blocks of a pack.

    context: of each layer, keys and values [T, kv_heads, hd] of the pack's tokens. limits int64
    [A]: how many tokens of its sequence's context each block sees. Q rows a block come with each
    call. chained: keys of earlier calls stay and are seen, as when a block grows token by token;
    else a call is one layer's whole block, seen in both directions.
    """

    def __init__(
        self,
        pack: Pack,
        context: Sequence[KeysValues],
        limits: torch.Tensor,
        *,
        chained: bool = False,
    ) -> None:
        self._context = context
        self._limits = limits
        self._blocks = np.diff(pack.block_start).tolist()
        self._tokens = np.diff(pack.token_start).tolist()
        self._chained = chained
        self._chain: KeysValues | None = None

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [A·Q, heads, hd], key and value [A·Q, kv_heads, hd] -> [A·Q, heads, hd]."""
        A = len(self._limits)
        query, key, value = (x.view(A, -1, *x.shape[1:]) for x in (query, key, value))
        if self._chained:
            if self._chain is not None:
                key = torch.cat((self._chain[0], key), 1)
                value = torch.cat((self._chain[1], value), 1)
            self._chain = key, value
        keys, values = self._context[layer]
        # Split, not cut: a cut's gradient is as large as the whole, once for each sequence.
        by_block = [torch.split(x, self._blocks) for x in (query, key, value, self._limits)]
        by_token = [torch.split(x, self._tokens) for x in (keys, values)]
        seen = [
            attend_blocks(q, (k, v), (ctx_k, ctx_v), limits)
            for q, k, v, limits, ctx_k, ctx_v in zip(*by_block, *by_token, strict=True)
            if len(limits)
        ]
        return torch.cat(seen).flatten(0, 1)


def attend_blocks(
    query: torch.Tensor, own: KeysValues, context: KeysValues, limits: torch.Tensor
) -> torch.Tensor:
    """Blocks of one sequence. query [A, Q, heads, hd]; own keys and values [A, J, kv, hd]; context
    [T, kv, hd], of which block a sees the first limits[a] -> [A, Q, heads, hd]."""
    (own_k, own_v), (keys, values) = own, context
    A, Q, heads, hd = query.shape
    kv, J = own_k.shape[2], own_k.shape[1]
    T = len(keys)
    # [kv, A, Q·g, hd]: the query heads of one key head are rows of one product.
    q = query.view(A, Q, kv, heads // kv, hd).permute(2, 0, 1, 3, 4).reshape(kv, A, -1, hd)
    q = q * hd**-0.5
    rows = q.shape[2]
    scores = torch.cat(
        (
            (q.reshape(kv, A * rows, hd) @ keys.permute(1, 2, 0)).view(kv, A, rows, T),
            q @ own_k.permute(2, 0, 3, 1),
        ),
        -1,
    )
    hidden = torch.arange(T + J, device=query.device) >= limits[:, None]
    hidden[:, T:] = False
    weights = scores.masked_fill(hidden[:, None, :], float("-inf")).softmax(-1)
    out = (weights[..., :T].reshape(kv, A * rows, T) @ values.transpose(0, 1)).view_as(q)
    out = out + weights[..., T:] @ own_v.permute(2, 0, 1, 3)
    return out.view(kv, A, Q, heads // kv, hd).permute(1, 2, 0, 3, 4).reshape(A, Q, heads, hd)
