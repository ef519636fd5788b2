"""Texts run through a native backend, one token at a time or in any ragged steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.features import FeatureProjection
from dspark.models.targets.native import NativeBackend

from ..tiny import Ids


@dataclass
class Lane:
    """A text, of which `done` tokens are in the cache."""

    ids: Ids
    blocks: list[int] = field(default_factory=list)
    done: int = 0


def step(
    backend: NativeBackend, parts: Sequence[tuple[Lane, Ids]], free: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run ids behind each lane's cache; of each lane its logits and its features. Lanes do not move
    on."""
    for lane, run in parts:
        while len(lane.blocks) * backend.block_size < lane.done + len(run):
            lane.blocks.append(free.pop())
    ends = np.cumsum([0, *(len(run) for _, run in parts)], dtype=np.int32)
    table = np.zeros((len(parts), max(len(lane.blocks) for lane, _ in parts)), np.int32)
    for row, (lane, _) in zip(table, parts, strict=True):
        row[: len(lane.blocks)] = lane.blocks
    every = np.arange(ends[-1], dtype=np.int32)
    out = backend.forward(
        RaggedBatch(
            token_ids=np.array([token for _, run in parts for token in run], np.int32),
            positions=np.concatenate(
                [np.arange(lane.done, lane.done + len(run)) for lane, run in parts]
            ).astype(np.int32),
            query_start=ends,
            context_len=np.array([lane.done for lane, _ in parts], np.int32),
            block_table=table,
            logit_rows=every,
            feature_rows=every,
        )
    )
    [features] = out.features.values()
    return [(out.logits[a:b].clone(), features[a:b].clone()) for a, b in pairwise(ends.tolist())]


def one_by_one(backend: NativeBackend, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of every row of a text that is alone and decoded."""
    backend.allocate(-(-len(ids) // backend.block_size))
    free = list(range(-(-len(ids) // backend.block_size)))
    lane, logits, features = Lane(ids), [], []
    for token in ids:
        [(row, feature)] = step(backend, [(lane, (token,))], free)
        logits.append(row)
        features.append(feature)
        lane.done += 1
    return torch.cat(logits), torch.cat(features)


def projection(width: int) -> FeatureProjection:
    noise = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 2 * width, generator=noise) / width**0.5
    return FeatureProjection((-1, 2), weight, torch.rand(24, generator=noise) + 0.5, eps=1e-5)
