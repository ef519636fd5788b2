"""The few ids that hold nearly all of a distribution."""

from __future__ import annotations

import torch

from dspark.training.examples import Target

# Columns of a row that are looked at as one. Of 49,152 columns the 64 largest values lie in the 64
# chunks with the largest maxima, so two small searches replace one over the whole row.
CHUNK = 64


def top_probabilities(logits: torch.Tensor, k: int) -> Target:
    """The k likeliest ids of each row at temperature 1, likeliest first, and the mass of the rest.

    logits: float [n, V] -> top_ids int32, top_p float32 [n, K], tail float32 [n] in [0, 1].
    """
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    total = (logits - top).exp_().sum(-1, keepdim=True)
    values, ids = top_k(logits, k)
    p = (values - top).exp() / total
    return Target(ids.int(), p, (1.0 - p.double().sum(-1)).clamp_(0.0).float())


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits.topk(k)` of [n, V] for a k far below V, several times as fast on a CPU."""
    n, V = logits.shape
    chunks = V // CHUNK
    if V % CHUNK or k >= chunks // 2:
        found = logits.topk(min(k, V), -1)
        return found.values, found.indices
    parts = logits.view(n, chunks, CHUNK)
    best = parts.amax(-1).topk(k, -1).indices  # [n, k] chunks
    candidates = parts.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).view(n, -1)
    values, at = candidates.topk(k, -1)
    return values, best.gather(1, at // CHUNK) * CHUNK + at % CHUNK
