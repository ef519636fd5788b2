"""Tiny random drafters of every kind for tiny random targets, and texts to draft after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from dspark.core.drafts import Draft, DraftRequest, DraftSampling, NeedContext
from dspark.core.sampling import SamplingMode
from dspark.models.drafters.checkpoint import DrafterCheckpoint
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.native import NativeDraftOptions
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import TARGET_TENSORS, Trunk

Array = np.ndarray[Any, Any]

V, D, GAMMA, RANK = 160, 64, 5, 8
GREEDY = DraftSampling(SamplingMode.GREEDY)
# Ids that a reduced vocabulary leaves out are the odd ones above 40.
SOME_IDS = np.array([i for i in range(V) if i < 40 or i % 2 == 0])

# Every kind and head, by what a test calls it: changes to the configuration below.
KINDS: dict[str, dict[str, Any]] = {
    "markov": {},
    "gated": {"head": "gated"},
    "rnn": {"head": "rnn"},
    "headless": {"head": "none", "rank": 0, "confidence_reads_prev": False},
    "reduced": {"head": "gated", "draft_vocab_size": len(SOME_IDS)},
    "dflash": {"kind": "dflash", "head": "none", "rank": 0, "confidence": False},
    "eagle3": {
        "kind": "eagle3", "head": "none", "rank": 0, "confidence": False, "num_layers": 1,
        "target_layer_ids": (-1, 0, 1, 2), "mask_token_id": 0,
    },
    "mtp": {
        "kind": "mtp", "head": "none", "rank": 0, "confidence": False, "num_layers": 1, "gamma": 1,
        "draft_vocab_size": len(SOME_IDS),
    },
}  # fmt: skip


def config_of(name: str = "markov", **changes: Any) -> DrafterConfig:
    config = DrafterConfig(
        kind="dspark",
        gamma=GAMMA,
        vocab_size=V,
        hidden_size=D,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        target_layer_ids=(0, 2),
        target_layers=4,
        mask_token_id=V - 1,
        head="vanilla",
        rank=RANK,
        confidence=True,
    )
    return replace(config, **{**KINDS[name], **changes})


def tensors(seed: int = 0, *, layers: int = 4, **scales: Any) -> TargetTensors:
    """Of a target that is nothing but an embedding and a head."""
    noise = torch.Generator().manual_seed(seed)
    embedding, head = (0.3 * torch.randn(V, D, generator=noise) for _ in range(2))
    return TargetTensors(embedding, head, scales.get("embed_scale", 1.0), None, layers)


def tiny_drafter(
    name: str = "markov", target: TargetTensors | None = None, *, seed: int = 1, **changes: Any
) -> Trunk:
    """Random weights, large enough that context, positions and tokens before all show in logits."""
    target = target or tensors()
    config = config_of(
        name,
        embed_scale=target.embed_scale,
        logit_softcap=target.logit_softcap,
        target_layers=target.layers,
        **changes,
    )
    vocabulary = DraftVocabulary(SOME_IDS, V) if config.draft_vocab_size else None
    model = new_drafter(config, target, vocabulary)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name in TARGET_TENSORS:
                continue
            spread = torch.randn(parameter.shape, generator=noise)
            if parameter_name.endswith("norm.weight"):
                parameter += 0.2 * spread
            else:
                parameter.copy_((0.6 if "markov" in parameter_name else 0.2) * spread)
    return model.eval().requires_grad_(False)


# Kinds that the native kernels draft too, by what a test calls them there.
NATIVE = tuple(f"native-{name}" for name in KINDS if name not in ("eagle3", "mtp"))


def tiny(name: str = "markov", *, model: Trunk | None = None, **options: Any) -> ModelDrafter:
    """Of KINDS or NATIVE."""
    if name in NATIVE:
        name = name.removeprefix("native-")
        options.setdefault("native", NativeDraftOptions(threads=1))
    model = tiny_drafter(name) if model is None else model
    return ModelDrafter(DrafterCheckpoint(model, name), **{"candidates": 0, **options})


def target_tensors(model: PreTrainedModel) -> TargetTensors:
    return TargetTensors.of(model)


class Talk:
    """A request's committed ids and features as a verifier has them; any position can be asked."""

    def __init__(self, name: str, length: int, seed: int = 0, *, width: int = D) -> None:
        rng = np.random.default_rng(seed)
        self.session = name
        self.ids = tuple(rng.integers(0, V, length).tolist())
        self.features = rng.standard_normal((length, width)).astype(np.float32)

    def ask(self, start: int, anchor: int, round_: int = 0, **changes: Any) -> DraftRequest:
        request = DraftRequest(
            session=self.session,
            round=round_,
            start=start,
            tokens=self.ids[start : anchor + 1],
            features=self.features[start:anchor],
            output_position=anchor,
            sampling=GREEDY,
            gamma=GAMMA,
        )
        return replace(request, **changes)

    def changed(self, at: int) -> Talk:
        """The same up to position at - 1; another text from there on."""
        other = Talk(self.session, len(self.ids), seed=at + 1000)
        other.ids = self.ids[:at] + other.ids[at:]
        other.features[:at] = self.features[:at]
        return other


def only(replies: Sequence[Draft | NeedContext]) -> Draft:
    (reply,) = replies
    assert isinstance(reply, Draft)
    return reply
