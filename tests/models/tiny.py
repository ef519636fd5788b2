"""Tiny random models of every family that is served, and what transformers itself says of them.

Weights are large on purpose: attention scores and logits spread over several units, so that a
window or a cap that is not applied shows (the conformance suite proves that it would).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from dspark.models.targets.features import FeatureProjection

Ids = tuple[int, ...]

VOCABULARY = 160
WINDOW = 12

# Two float32 computations of one sum in different orders. On these models, with hidden states of
# up to 16, they were measured to differ by at most 4e-5 in 20,000 comparisons of the conformance
# suite; a window or a cap left out moves nine rows in ten by more than 0.5.
TOLERANCE = 1e-4

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,  # no id is special: any may be drawn, none ends a text
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
_ALTERNATE = ["sliding_attention", "full_attention"]

FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    # Windows in the upper half of the layers; biases in q, k and v.
    "qwen2": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW, "num_key_value_heads": 1}),
    "gemma2": (
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": [*_ALTERNATE, *_ALTERNATE],
        },
    ),
    # As the small ones: the upper layers read the keys of lower ones, and every layer has an
    # embedding of its own. Full layers have larger heads.
    "gemma4": (
        Gemma4TextConfig,
        {
            "num_hidden_layers": 6,
            "layer_types": [*_ALTERNATE, *_ALTERNATE, *_ALTERNATE],
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    # As the large ones: experts, and full layers whose keys are their values, in fewer heads.
    "gemma4-experts": (
        Gemma4TextConfig,
        {
            "layer_types": [*_ALTERNATE, *_ALTERNATE],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 3.0,
        },
    ),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of a family, always with the same weights; `changes` are of its configuration.

    Its attention is transformers' plain `eager` one, which knows every family's window and cap.
    """
    kind, own = FAMILIES[family]
    config = kind(**{**_SHAPE, **own, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    noise = torch.Generator().manual_seed(zlib.crc32(family.encode()))
    for name, parameter in model.named_parameters():
        spread = torch.randn(parameter.shape, generator=noise)
        if parameter.dim() > 1:
            parameter.data = 0.15 * spread.to(dtype)
        else:  # norms and biases, which start out as ones and zeros that hide their absence
            parameter.data += 0.2 * spread.to(dtype)
        if family.startswith("gemma4") and ("q_norm" in name or "k_norm" in name):
            parameter.data *= 0.5  # its scores are not divided by √head_dim: trained norms do that
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Truth:
    """What transformers says of one text, run as a whole without a cache: logits [T, V], hidden
    [layers + 1, T, D]."""

    logits: torch.Tensor
    hidden: torch.Tensor

    def features(self, projection: FeatureProjection) -> torch.Tensor:
        """float64 [T, d]: eq. 2 spelled out, RMSNorm(W_c [H^(l1); ...; H^(lm)])."""
        rows = torch.cat([self.hidden[layer + 1] for layer in projection.layer_ids], -1).double()
        if projection.weight is not None:
            rows = rows @ projection.weight.double().T
        if projection.norm_weight is not None:
            mean_square = (rows**2).mean(-1, keepdim=True)
            rows = rows / (mean_square + projection.eps).sqrt() * projection.norm_weight.double()
        return rows


def truths(model: PreTrainedModel, texts: Sequence[Ids]) -> list[Truth]:
    """One pass over all texts. They are padded on the right, after every row that is looked at."""
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, ids in zip(padded, texts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    with torch.inference_mode():
        out = model(padded, use_cache=False, output_hidden_states=True)
    hidden = torch.stack(out.hidden_states)
    return [
        Truth(out.logits[row, : len(ids)], hidden[:, row, : len(ids)])
        for row, ids in enumerate(texts)
    ]


@cache
def greedy(model: PreTrainedModel, prompt: Ids, tokens: int) -> Ids:
    """The answer of transformers' own `generate`; every choice of it is clear of rounding."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=tokens,
        )
    whole = tuple(out[0].tolist())
    logits = truths(model, [whole])[0].logits[len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > 2 * TOLERANCE, "a near-tie: take another prompt"
    return whole[len(prompt) :]


def text(length: int, seed: int = 0) -> Ids:
    """Any ids of the vocabulary, always the same."""
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=length))
