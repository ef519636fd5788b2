"""Several answered prompts as flat rows: context once, and blocks of γ tokens after random anchors.

Token-level indices say what belongs to whom; nothing is padded but the ends of the last blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dspark.training.examples import Example, Target


@dataclass(frozen=True, slots=True)
class Pack:
    """S sequences, T tokens, A blocks of γ positions; blocks lie in the order of their sequences.

    token_ids int64 [T]; positions int64 [T], inside each sequence; features [T, m D]. token_start,
    block_start: first of each sequence, S + 1. anchors int64 [A], index into tokens. ids int64
    [A, γ + 1]: x_0 (the anchor) to x_γ, the text's own, 0 beyond its end. valid bool [A, γ]: x_k
    exists. target: the target's distribution of x_1..x_γ, row A·γ flat; of no mass beyond the end.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    features: torch.Tensor
    token_start: tuple[int, ...]
    block_start: tuple[int, ...]
    anchors: torch.Tensor
    ids: torch.Tensor
    valid: torch.Tensor
    target: Target

    @property
    def gamma(self) -> int:
        return self.ids.shape[1] - 1

    @property
    def block_tokens(self) -> int:
        return int(self.valid.sum())

    def to(self, device: torch.device) -> Pack:
        if device.type == "cpu":
            return self
        target = Target(
            self.target.top_ids.to(device),
            self.target.top_p.to(device),
            self.target.tail.to(device),
        )
        moved = {
            name: getattr(self, name).to(device)
            for name in ("token_ids", "positions", "features", "anchors", "ids", "valid")
        }
        return replace(self, target=target, **moved)


def choose_anchors(
    prompt_tokens: int, tokens: int, most: int, rng: np.random.Generator
) -> np.ndarray:
    """At most `most` different places of an anchor, growing: int64.

    An anchor is a token of the answer that another follows, as it is when serving: the first one
    comes from the prefill.
    """
    places = np.arange(prompt_tokens, tokens - 1)
    if len(places) > most:
        places = np.sort(rng.choice(places, most, replace=False))
    return places


def pack(examples: Sequence[Example], anchors: Sequence[np.ndarray], gamma: int) -> Pack:
    """Blocks at the given anchors, index of a token inside each example."""
    token_start = np.cumsum([0, *(len(e.token_ids) for e in examples)])
    block_start = np.cumsum([0, *map(len, anchors)])
    ids, valid, rows = [], [], []
    answer_start = 0
    for example, own in zip(examples, anchors, strict=True):
        n, P = len(example.token_ids), example.prompt_tokens
        at = torch.from_numpy(np.asarray(own, np.int64))[:, None] + torch.arange(gamma + 1)
        there = at < n
        ids.append(example.token_ids.long()[at.clamp(max=n - 1)] * there)
        valid.append(there[:, 1:])
        # Row of an answer's token in the target's distributions; any row beyond the end.
        rows.append((at[:, 1:].clamp(max=n - 1) - P + answer_start).flatten())
        answer_start += n - P
    chosen = torch.cat(rows)
    whole_valid = torch.cat(valid)
    mass = whole_valid.flatten().float()
    target = Target(
        torch.cat([e.target.top_ids for e in examples]).long()[chosen],
        torch.cat([e.target.top_p for e in examples]).float()[chosen] * mass[:, None],
        torch.cat([e.target.tail for e in examples])[chosen] * mass,
    )
    flat_anchors = [
        np.asarray(own, np.int64) + first for own, first in zip(anchors, token_start, strict=False)
    ]
    return Pack(
        token_ids=torch.cat([e.token_ids for e in examples]).long(),
        positions=torch.cat([torch.arange(len(e.token_ids)) for e in examples]),
        features=torch.cat([e.features for e in examples]),
        token_start=tuple(token_start.tolist()),
        block_start=tuple(block_start.tolist()),
        anchors=torch.from_numpy(np.concatenate(flat_anchors)),
        ids=torch.cat(ids),
        valid=whole_valid,
        target=target,
    )
