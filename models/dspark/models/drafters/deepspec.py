"""The public DeepSpec format: config.json as transformers writes it, all tensors in one file.

Conventions: a dflash drafter is a DSpark model without heads; block_size is γ; embedding and LM
head are always in the file and over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dspark.core.errors import ConfigError
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary

PARALLEL, EAGLE3 = "Qwen3DSparkModel", "Qwen3Eagle3Model"
ARCHITECTURES = (PARALLEL, EAGLE3)

# What the format leaves open for inference but its trainer's loader asks for.
NUM_ANCHORS = 512
STEP_LOSS_DECAY = 0.8


def read_config(facts: Mapping[str, Any]) -> DrafterConfig:
    """Raises ConfigError for a value that is missing, or that we do not serve."""
    architecture = (facts.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"architectures: {architecture!r} is not one of: {', '.join(ARCHITECTURES)}"
        )
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"rope_type: {kind!r} is not served, only 'default'")
    if (act := facts.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"hidden_act: {act!r} is not served, only 'silu'")
    others = {kind for kind in facts.get("layer_types") or () if kind != "full_attention"}
    if others:
        raise ConfigError(f"layer_types: {min(others)!r} is not served, only 'full_attention'")
    take = _taker(facts)
    shared = {
        "vocab_size": take("vocab_size", int),
        "hidden_size": take("hidden_size", int),
        "intermediate_size": take("intermediate_size", int),
        "num_layers": take("num_hidden_layers", int),
        "num_heads": take("num_attention_heads", int),
        "num_kv_heads": take("num_key_value_heads", int),
        "head_dim": take("head_dim", int),
        "target_layer_ids": tuple(take("target_layer_ids", list)),
        "target_layers": take("num_target_layers", int),
        "rope_theta": float(rope.get("rope_theta") or take("rope_theta", float)),
        "rms_norm_eps": take("rms_norm_eps", float),
        "attention_bias": bool(facts.get("attention_bias", False)),
        "max_positions": take("max_position_embeddings", int),
    }
    if architecture == EAGLE3:
        return DrafterConfig(kind="eagle3", gamma=take("ttt_length", int), **shared)
    rank, confidence = take("markov_rank", int), take("enable_confidence_head", bool)
    return DrafterConfig(
        kind="dspark" if rank or confidence else "dflash",
        gamma=take("block_size", int),
        mask_token_id=take("mask_token_id", int),
        head=take("markov_head_type", str) if rank else "none",
        rank=rank,
        confidence=confidence,
        confidence_reads_prev=not confidence or take("confidence_head_with_markov", bool),
        **shared,
    )


def _taker(facts: Mapping[str, Any]) -> Callable[[str, type], Any]:
    def take(name: str, kind: type) -> Any:
        if name not in facts:
            raise ConfigError(f"{name}: is missing")
        value = facts[name]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{name}: {value!r} is not of type {kind.__name__}")
        return value

    return take


def write_config(config: DrafterConfig, *, num_anchors: int = NUM_ANCHORS) -> dict[str, Any]:
    """config.json of a drafter whose tensors `write_tensors` gives.

    Raises ConfigError for what the format cannot say.
    """
    if config.kind == "mtp":
        raise ConfigError("kind: 'mtp' has no DeepSpec format")
    if config.embed_scale != 1.0 or config.logit_softcap is not None:
        raise ConfigError(
            f"embed_scale: {config.embed_scale:g} and logit_softcap: {config.logit_softcap} "
            "cannot be said in the DeepSpec format of Qwen3-type drafters"
        )
    parallel = config.parallel
    facts: dict[str, Any] = {
        "architectures": [PARALLEL if parallel else EAGLE3],
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    if not parallel:
        return facts | {
            "draft_num_hidden_layers": config.num_layers,
            "ttt_length": config.gamma,
            "step_loss_decay": STEP_LOSS_DECAY,
        }
    facts |= {
        "block_size": config.gamma,
        "mask_token_id": config.mask_token_id,
        "num_anchors": num_anchors,
        "markov_rank": config.rank,
        "enable_confidence_head": config.confidence,
    }
    if config.rank:
        facts["markov_head_type"] = config.head
    if config.confidence:
        facts["confidence_head_with_markov"] = config.confidence_reads_prev
    return facts


def write_tensors(
    tensors: Mapping[str, torch.Tensor], vocabulary: DraftVocabulary, head: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A drafter's own tensors (no embedding, no LM head) spread over the whole vocabulary.

    head: [V, d] of the target. The format knows no draft vocabulary: ids that were left out are
    then proposed by their base logits, and come before as the row of all that are left out.
    """
    spread = dict(tensors)
    spread["lm_head.weight"] = head
    if vocabulary.is_whole or "markov_head.markov_w1.weight" not in tensors:
        return spread
    after = tensors["markov_head.markov_w2.weight"]
    index = torch.from_numpy(vocabulary.index)
    spread["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w1.weight"][index]
    nothing = after.new_zeros(1, after.shape[1])
    spread["markov_head.markov_w2.weight"] = torch.cat((after, nothing))[index]
    return spread
