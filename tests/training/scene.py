"""Answers made up at random, for drafters whose target is nothing but an embedding and a head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dspark.training.examples import Example, Layout, Origin, Target

from ..models.drafters.scene import D, V

LAYERS = (0, 2)


def layout(layer_ids: tuple[int, ...] = LAYERS, top_k: int = 12) -> Layout:
    return Layout(layer_ids, D, top_k, "float16")


def example(
    prompt: int = 7,
    answer: int = 20,
    *,
    seed: int = 0,
    like: Layout | None = None,
    domain: str = "",
    line: int | None = None,
) -> Example:
    """Random ids and features; a sharp distribution at each answer token, mostly on that token."""
    like = like or layout()
    noise = torch.Generator().manual_seed(seed)
    n = prompt + answer
    ids = torch.randint(0, V, (n,), generator=noise, dtype=torch.int32)
    logits = 2.0 * torch.randn(answer, V, generator=noise)
    logits[torch.arange(answer), ids[prompt:].long()] += 7.0
    p = logits.softmax(-1)
    top = p.topk(like.top_k, -1)
    features = torch.randn(n, like.feature_width, generator=noise).half()
    features[-1] = 0.0
    return Example(
        Origin(seed + 1 if line is None else line, 0, domain),
        ids,
        prompt,
        features,
        Target(top.indices.int(), top.values.half(), (1.0 - top.values.sum(-1)).clamp(0.0).float()),
    )


class Examples:
    """A `Source` of examples that are at hand."""

    def __init__(self, examples: Sequence[Example], like: Layout | None = None) -> None:
        self.layout = like or layout()
        self.origins = [one.origin for one in examples]
        self.lengths = [(one.prompt_tokens, one.answer_tokens) for one in examples]
        self._examples = list(examples)

    def examples(self, indices: Sequence[int], *, features: bool = True) -> list[Example]:
        return [self._examples[i] for i in indices]


def some(count: int = 6, like: Layout | None = None, **rest: str) -> Examples:
    """Of different lengths, the shortest with answers below a block."""
    sizes = np.random.default_rng(3).integers(2, 25, (count, 2)).tolist()
    made = [
        example(1 + prompt, answer, seed=i, like=like, **rest)
        for i, (prompt, answer) in enumerate(sizes)
    ]
    return Examples(made, like)
