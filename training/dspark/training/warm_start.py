"""A drafter that begins as its target's own last layers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from dspark.core.errors import ConfigError, ModelError
from dspark.models.drafters.layers import Attention
from dspark.models.drafters.trunk import Trunk
from dspark.training.examples import Example

_LAYER = "model.layers.{}.{}"
# Of a layer, what target and drafter call by the same name.
_SHARED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
# Absent in targets of Llama's type: the norms then keep the size that queries and keys have there.
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


@torch.no_grad()
def warm_start(drafter: Trunk, target: Path, examples: Iterable[Example]) -> None:
    """Copy the last n layers and the final norm of the checkpoint `target` into an n-layer drafter.

    W_c begins as the last of the layers that are read, so context looks to the first of the copied
    layers as it does in the target. examples: a few, whose features say how large queries and keys
    are, for targets without norms there. Raises ConfigError if the shapes differ.
    """
    config = drafter.config
    held = _read(target, range(config.target_layers - config.num_layers, config.target_layers))
    last = f"model.layers.{config.target_layers - 1}.input_layernorm.weight"
    for i in range(config.num_layers):
        own = {name: t for name, t in drafter.named_parameters() if name.startswith(f"layers.{i}.")}
        for name in _SHARED:
            theirs = _LAYER.format(config.target_layers - config.num_layers + i, name)
            if theirs in held:
                _copy(f"layers.{i}.{name}", own[f"layers.{i}.{name}"], held[theirs])
            elif name not in _NORMS:
                raise ModelError(f"{target}: lacks the tensor {theirs}")
    drafter.norm.weight.copy_(held["model.norm.weight"])
    d = config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -d:].fill_diagonal_(1.0)
    for name, parameter in drafter.named_parameters():
        if name.endswith("hidden_norm.weight"):
            parameter.copy_(held[last])
        elif name == "eh_proj.weight":  # mtp: [embedding; context], as if there were no embedding
            parameter[:, d:].zero_().fill_diagonal_(1.0)
    if not any(name in key for key in held for name in _NORMS):
        _size_norms(drafter, [example.features.float() for example in examples])


def _copy(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """EAGLE-3's attention reads [embedding; hidden]: the target's weights go to the hidden half."""
    if ours.dim() == 2 and ours.shape[1] == 2 * theirs.shape[1]:
        ours = ours[:, theirs.shape[1] :]
    if ours.shape != theirs.shape:
        raise ConfigError(
            f"warm_start: {name} has shape {list(ours.shape)}, the target's layer "
            f"{list(theirs.shape)}; give the drafter its target's sizes or turn warm_start off"
        )
    ours.copy_(theirs)


def _size_norms(drafter: Trunk, features: list[torch.Tensor]) -> None:
    """Norms of queries and keys as large as those are in the target, by its last features."""
    d = drafter.config.hidden_size
    x = torch.cat([rows[:-1, -d:] for rows in features])
    for layer in drafter.layers:  # type: ignore[union-attr]
        attention: Attention = layer.self_attn
        read = layer.input_layernorm(x)
        if attention.q_proj.in_features == 2 * d:
            read = torch.cat((torch.zeros_like(x), layer.hidden_norm(x)), -1)
        for projection, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            heads = projection(read).unflatten(-1, (-1, norm.weight.shape[0]))
            norm.weight.fill_(heads.pow(2).mean(-1).sqrt().mean())


def _read(target: Path, layers: range) -> dict[str, torch.Tensor]:
    """float32 tensors of the chosen layers, and the final norm."""
    wanted = tuple(f"model.layers.{i}." for i in layers)
    held: dict[str, torch.Tensor] = {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.startswith(wanted) or name == "model.norm.weight":
                    held[name] = tensors.get_tensor(name).float()
    if "model.norm.weight" not in held:
        raise ModelError(
            f"{target}: has no model.norm.weight: warm_start needs a Llama-type target"
        )
    if any("pre_feedforward_layernorm" in name for name in held):
        raise ConfigError(
            "warm_start: the layers of this target are not of the drafter's form (Gemma's have "
            "further norms); turn warm_start off"
        )
    return held
