"""What the native kernels take of a block drafter: layer by layer and for its head, float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.heads import GatedHead, RnnHead
from dspark.models.drafters.layers import wavelengths
from dspark.models.drafters.trunk import Trunk
from dspark.models.targets.native import NativeUnavailable
from dspark.models.targets.native.decoder import finite

Tensors = Mapping[str, torch.Tensor | None]


def takes(model: Trunk) -> ParallelDrafter:
    """The model, if the kernels take it. Raises NativeUnavailable."""
    config, weight = model.config, model.norm.weight
    if not isinstance(model, ParallelDrafter):
        raise NativeUnavailable(f"a drafter of kind {config.kind!r} drafts token by token")
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise NativeUnavailable(
            f"a {weight.dtype} drafter on {weight.device}: float32 on cpu it is"
        )
    if config.head_dim % 16 or config.head_dim > 512:
        raise NativeUnavailable(f"head_dim {config.head_dim} is no multiple of 16 up to 512")
    return model


def layer_tensors(model: ParallelDrafter) -> Iterator[Tensors]:
    """Of each layer, by the names of `native_library.LAYER_TENSORS`. Raises ModelError naming a
    tensor that holds a number which is not finite."""
    layers: Any = model.layers
    for index, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        kv = (attention.k_proj, attention.v_proj)
        tensors = {
            "query": attention.q_proj.weight,
            "query_bias": attention.q_proj.bias,
            "kv": torch.cat([one.weight for one in kv]),
            "kv_bias": None if kv[0].bias is None else torch.cat([one.bias for one in kv]),
            "out": attention.o_proj.weight,
            "out_bias": attention.o_proj.bias,
            "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "down": mlp.down_proj.weight,
            "attention_norm": layer.input_layernorm.weight,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "q_norm": attention.q_norm.weight,
            "k_norm": attention.k_norm.weight,
        }
        yield {name: finite(f"layer {index}, {name}", one) for name, one in tensors.items()}


@dataclass(frozen=True)
class HeadTensors:
    """tensors: by the names of `native_library.HEAD_TENSORS`. index: int32 [V], rows of W1."""

    tensors: Tensors
    confidence_bias: float
    index: np.ndarray[Any, np.dtype[np.int32]]


def head_tensors(model: ParallelDrafter) -> HeadTensors:
    """Final norm, LM head, sequential and confidence head. Raises ModelError as above."""
    tensors: dict[str, torch.Tensor | None] = {
        "norm": model.norm.weight,
        "lm_head": model.lm_head.weight,
        "wavelengths": wavelengths(model.config),
    }
    head, confidence = model.markov_head, model.confidence_head
    d = model.config.hidden_size
    if head is not None:
        tensors |= {"w1": head.markov_w1.weight, "w2": head.markov_w2.weight}
    joint = None
    if isinstance(head, GatedHead):  # reads [h; W1[previous]]
        joint, of_hidden = head.gate_proj, slice(0, d)
        rest = slice(d, None)
    elif isinstance(head, RnnHead):  # reads [state; W1[previous]; h]
        joint, of_hidden = head.joint_proj, slice(2 * head.rank, None)
        rest = slice(0, 2 * head.rank)
    if joint is not None:
        tensors |= {
            "prepare": joint.weight[:, of_hidden],
            "prepare_bias": joint.bias,
            "step": joint.weight[:, rest],
        }
    bias = 0.0
    if confidence is not None:
        weight = confidence.proj.weight[0]
        bias = confidence.proj.bias.detach().item()
        tensors["confidence_hidden"] = weight[:d]
        if model.config.confidence_reads_prev:
            tensors["confidence_previous"] = weight[d:]
    return HeadTensors(
        {name: finite(name, one) for name, one in tensors.items()},
        bias,
        model.vocabulary.index.astype(np.int32),
    )
