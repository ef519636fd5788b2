"""Drafting as anyone would write it from the paper: one request, all of its context again each
round, the whole vocabulary, no cache, no ring, no batch. What the real thing is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dspark.models.drafters.autoregressive import AutoregressiveDrafter
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.trunk import Trunk

Array = np.ndarray[Any, Any]
KeysValues = tuple[torch.Tensor, torch.Tensor]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention of [N, heads, hd] over [S, kv_heads, hd], every row sees all."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    return (torch.softmax(scores, -1) @ value).transpose(0, 1)


@torch.inference_mode()
def plain_draft(
    model: Trunk, features: Array, ids: Sequence[int], *, window: int = 10**6
) -> tuple[list[int], list[float]]:
    """Greedy block and confidence logits after committed ids (the anchor last).

    features: float32 [T, d], of the positions before the anchor at least.
    """
    anchor = len(ids) - 1
    low = max(0, anchor - window)
    context = torch.from_numpy(features[low:anchor])
    positions = torch.arange(low, anchor)
    if isinstance(model, ParallelDrafter):
        return _block(model, context, positions, ids)
    assert isinstance(model, AutoregressiveDrafter)
    return _steps(model, context, positions, ids)


def packed_hidden(
    model: ParallelDrafter,
    context: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """h [Q, d] of many blocks of one text in one pass. context: target states [T, m·d]. ids,
    positions: [Q]. mask: bool [Q, T + Q], where a block position may look."""
    kept = model.context_keys_values(model.project(context), torch.arange(len(context)))

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        old_key, old_value = kept[layer]
        keys = torch.cat((old_key, key)).transpose(0, 1)
        values = torch.cat((old_value, value)).transpose(0, 1)
        seen = functional.scaled_dot_product_attention(
            query.transpose(0, 1), keys, values, mask, enable_gqa=True
        )
        return seen.transpose(0, 1)

    return model.block_hidden(ids, positions, attend)


def plain_hidden(
    model: ParallelDrafter, context: torch.Tensor, positions: torch.Tensor, ids: Sequence[int]
) -> torch.Tensor:
    """h of the block, [γ, d]."""
    kept = model.context_keys_values(context, positions)

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        old_key, old_value = kept[layer]
        return dense(query, torch.cat((old_key, key)), torch.cat((old_value, value)))

    block = torch.tensor([ids[-1]] + [model.config.mask_token_id] * (model.config.gamma - 1))
    at = len(ids) - 1 + torch.arange(model.config.gamma)
    return model.block_hidden(block, at, attend)


def plain_logits(
    model: ParallelDrafter, hidden: torch.Tensor, base: torch.Tensor, k: int, before: list[int]
) -> torch.Tensor:
    """Eq. 4 at position k (from 0): base logits and the bias after `before`, x_0..x_{k-1}."""
    if model.markov_head is None:
        return base[k]
    rows = torch.from_numpy(model.vocabulary.index[before])
    latent = model.markov_head.latents(rows[None], hidden[None, : k + 1])[0, k]
    return base[k] + model.markov_head.markov_w2(latent)


def _block(
    model: ParallelDrafter, context: torch.Tensor, positions: torch.Tensor, ids: Sequence[int]
) -> tuple[list[int], list[float]]:
    hidden = plain_hidden(model, context, positions, ids)
    base = model.base_logits(hidden)
    drawn, confidence = [ids[-1]], []
    for k in range(model.config.gamma):
        logits = plain_logits(model, hidden, base, k, drawn)
        if model.confidence_head is None:
            confidence.append(_top_logit(logits))
        else:
            previous = None
            if model.config.confidence_reads_prev:
                assert model.markov_head is not None
                row = torch.from_numpy(model.vocabulary.index[drawn[-1:]])
                previous = model.markov_head.previous(row)[0]
            confidence.append(float(model.confidence_head(hidden[k], previous)))
        drawn.append(int(model.vocabulary.ids[int(logits.argmax())]))
    return drawn[1:], confidence


def _steps(
    model: AutoregressiveDrafter,
    context: torch.Tensor,
    positions: torch.Tensor,
    ids: Sequence[int],
) -> tuple[list[int], list[float]]:
    low, anchor = int(positions[0]), len(ids) - 1
    after = torch.tensor(list(ids[low + 1 :]))
    keys, values = model.context_keys_values(context, positions, after)[0]

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        nonlocal keys, values
        if drawn:  # the first query is in the context already
            keys, values = torch.cat((keys, key)), torch.cat((values, value))
        return dense(query, keys, values)

    drawn: list[int] = []
    confidence = []
    state = context[-1:]
    for k in range(model.config.gamma):
        token = drawn[-1] if drawn else ids[-1]
        at = torch.tensor([anchor - 1 + k])
        state = model.step(state, torch.tensor([token]), at, attend)
        logits = model.step_logits(state)[0]
        confidence.append(_top_logit(logits))
        drawn.append(int(model.vocabulary.ids[int(logits.argmax())]))
    return drawn, confidence


def _top_logit(logits: torch.Tensor) -> float:
    p = torch.softmax(logits.double(), -1).max()
    return float(p.log() - (1 - p).log())
