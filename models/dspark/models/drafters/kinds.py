"""A configuration becomes a torch module of its kind."""

from __future__ import annotations

import torch
from torch import nn

from dspark.core.errors import ConfigError
from dspark.models.drafters.autoregressive import Eagle3Drafter, MtpDrafter
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.layers import RMSNorm
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import TARGET_TENSORS, Trunk

_MODULES: dict[str, type[Trunk]] = {
    "dspark": ParallelDrafter,
    "dflash": ParallelDrafter,
    "eagle3": Eagle3Drafter,
    "mtp": MtpDrafter,
}

# Of new weights, as Qwen3's.
INITIAL_STD = 0.02


def empty_drafter(config: DrafterConfig, vocabulary: DraftVocabulary | None = None) -> Trunk:
    """The module without memory for its tensors (on the meta device).

    vocabulary: None for the whole. Raises ConfigError if it is not the configuration's.
    """
    vocabulary = vocabulary or DraftVocabulary.whole(config.vocab_size)
    if (len(vocabulary), vocabulary.vocab_size) != (config.draft_vocab, config.vocab_size):
        raise ConfigError(
            f"draft vocabulary: {len(vocabulary)} of {vocabulary.vocab_size} ids, the "
            f"configuration says {config.draft_vocab} of {config.vocab_size}"
        )
    with torch.device("meta"):
        return _MODULES[config.kind](config, vocabulary)


def new_drafter(
    config: DrafterConfig,
    target: TargetTensors,
    vocabulary: DraftVocabulary | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Trunk:
    """An untrained float32 drafter around its target's frozen embedding and LM head.

    Raises ConfigError if configuration and target do not fit.
    """
    check_target(config, target)
    model = empty_drafter(config, vocabulary)
    tensors = take_target_tensors(model, target)
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{owner}.{name}".removeprefix(".")
            if full in tensors:
                continue
            value = torch.zeros(parameter.shape)
            if isinstance(module, RMSNorm):
                value += 1.0
            elif isinstance(module, nn.Linear | nn.Embedding) and name == "weight":
                value.normal_(std=INITIAL_STD, generator=generator)
            tensors[full] = value
    model.load_state_dict(tensors, assign=True)
    for name in TARGET_TENSORS:
        model.get_parameter(name).requires_grad_(False)
    return model


def take_target_tensors(model: Trunk, target: TargetTensors) -> dict[str, torch.Tensor]:
    """float32 `TARGET_TENSORS` of a drafter: shared with the target where nothing is left out."""
    head, vocabulary = target.head, model.vocabulary
    if not vocabulary.is_whole:
        head = head[torch.from_numpy(vocabulary.ids).to(head.device)]
    return {"embed_tokens.weight": target.embedding.float(), "lm_head.weight": head.float()}


def check_target(config: DrafterConfig, target: TargetTensors) -> None:
    """Raises ConfigError with both values where a drafter cannot read this target."""
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("target_layers", config.target_layers, target.layers),
        ("embed_scale", config.embed_scale, target.embed_scale),
        ("logit_softcap", config.logit_softcap, target.logit_softcap),
    ):
        if ours != theirs:
            raise ConfigError(f"{name}: the drafter was made for {ours}, the target has {theirs}")
