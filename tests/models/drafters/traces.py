"""The golden vectors, and the tiny target that they were made with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark.models.targets.features import FeatureProjection

from ..tiny import Truth, truths

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("dspark_markov", "dspark_gated", "dspark_rnn", "dflash", "eagle3")
GAMMA, TOKENS, V = 7, 40, 160
# What float32 sums in another order may differ by (golden/README.md asks for this).
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Round:
    start: int
    anchor: int
    draft: list[int]
    accepted: int
    confidence_logits: list[float] | None = None


@dataclass(frozen=True)
class Trace:
    """One prompt. text: its output and, since last rounds are not clipped, some more greedy ids."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    rounds: tuple[Round, ...]
    text: tuple[int, ...]
    truth: Truth

    @property
    def judged(self) -> list[Round]:
        """Rounds that end within the output."""
        end = len(self.prompt) + TOKENS - 1
        return [r for r in self.rounds if r.start + r.accepted < end]

    def features(self, projection: FeatureProjection) -> np.ndarray[Any, Any]:
        """float32 [T, d] of the text."""
        return self.truth.features(projection).float().numpy()

    def raw(self, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """[T, m * D], not projected."""
        return torch.cat([self.truth.hidden[layer + 1] for layer in layer_ids], -1)


def load_target() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target_qwen3_tiny", dtype=torch.float32)
    return model.eval().requires_grad_(False)


@cache
def traces(name: str) -> tuple[Trace, ...]:
    facts = json.loads((GOLDEN / name / "golden_trace.json").read_text())
    target, texts = load_target(), []
    for fact in facts:
        ids = list(fact["output"])
        last = fact["rounds"][-1]
        while len(ids) <= last["start"] + last["accepted"] + 1:
            with torch.inference_mode():
                ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        texts.append(tuple(ids))
    return tuple(
        Trace(
            tuple(fact["prompt"]),
            tuple(fact["output"]),
            tuple(Round(**r) for r in fact["rounds"]),
            text,
            truth,
        )
        for fact, text, truth in zip(facts, texts, truths(target, texts), strict=True)
    )


def block_hidden(name: str) -> dict[tuple[int, int], torch.Tensor]:
    """(prompt, round) -> h [γ, d]."""
    held = load_file(GOLDEN / name / "golden_block_hidden.safetensors")
    found = {}
    for key, hidden in held.items():
        prompt, round_, _ = key.split(".")
        found[int(prompt[1:]), int(round_[1:])] = hidden
    return found
