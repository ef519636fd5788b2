"""What the kernels take of a transformers model: its shape and, layer by layer, its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from dspark.core.errors import ModelError
from dspark.models.targets.native.library import NativeUnavailable

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. windows: by layer, 0 for none."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    norm_eps: float
    query_scale: float
    windows: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def multiply_adds(self) -> int:
        """Of a row that wants logits, in matrix products: the number of weights in them."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.width * (self.layers * (heads + 3 * self.inner) + self.vocab)


def shape_of(model: PreTrainedModel) -> Shape:
    """Raises `NativeUnavailable` for a model that the kernels do not take."""
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        raise NativeUnavailable(
            f"model type {config.model_type!r} is not one of: {', '.join(MODEL_TYPES)}"
        )
    if config.hidden_act != "silu":
        raise NativeUnavailable(f"hidden_act {config.hidden_act!r}: the kernels have silu")
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise NativeUnavailable(f"a {model.dtype} model on {model.device}: float32 on cpu is taken")
    layers: Any = model.base_model.layers
    first = layers[0].self_attn
    head_dim = int(first.head_dim)
    if head_dim % 16 or head_dim > 512:
        raise NativeUnavailable(f"head_dim {head_dim} is no multiple of 16 up to 512")
    vocab, width = model.get_output_embeddings().weight.shape
    return Shape(
        width=width,
        heads=int(first.q_proj.out_features) // head_dim,
        kv_heads=int(first.k_proj.out_features) // head_dim,
        head_dim=head_dim,
        inner=int(layers[0].mlp.down_proj.in_features),
        vocab=vocab,
        norm_eps=float(config.rms_norm_eps),
        query_scale=float(first.scaling),
        windows=tuple(_window(config, layer.self_attn) for layer in layers),
    )


def _window(config: Any, attention: Any) -> int:
    if config.model_type == "llama":
        return 0
    own = config.sliding_window if config.model_type == "mistral" else attention.sliding_window
    return int(own or 0)


def layer_tensors(
    model: PreTrainedModel, *, matrices: bool = True
) -> Iterator[dict[str, torch.Tensor | None]]:
    """Of each layer, by the names of `library.LAYER_TENSORS`: float32, contiguous; matrices or only
    what lies beside them. Raises `ModelError` naming a tensor that holds a number which is not
    finite."""
    layers: Any = model.base_model.layers
    for index, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        tensors = {
            "qkv_bias": _bias(*qkv),
            "out_bias": _bias(attention.o_proj),
            "gate_up_bias": _bias(mlp.gate_proj, mlp.up_proj),
            "down_bias": _bias(mlp.down_proj),
            "attention_norm": layer.input_layernorm.weight,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "q_norm": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            "k_norm": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        }
        if matrices:
            tensors["qkv"] = torch.cat([one.weight for one in qkv])
            tensors["out"] = attention.o_proj.weight
            tensors["gate_up"] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            tensors["down"] = mlp.down_proj.weight
        yield {name: finite(f"layer {index}, {name}", one) for name, one in tensors.items()}


def _bias(*linears: Any) -> torch.Tensor | None:
    if all(one.bias is None for one in linears):
        return None
    return torch.cat(
        [
            torch.zeros(one.out_features) if one.bias is None else one.bias.detach()
            for one in linears
        ]
    )


def finite(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as the kernels read it. Raises `ModelError` for NaN and infinities."""
    if tensor is None:
        return None
    tensor = tensor.detach().contiguous()
    # A sum of finite float32 weights stays finite, and shows any that is not.
    if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
        raise ModelError(f"{name}: the weights hold a number that is not finite")
    return tensor
