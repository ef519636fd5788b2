"""The decoder layer of all trained drafters: Qwen3's, with the attention itself left to the caller.

Rows are flat: N of them, of any sequences; who may look at whom is the caller's `attend`. Names of
parameters are those of the public DeepSpec format.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from dspark.models.drafters.config import DrafterConfig

Rotary = tuple[torch.Tensor, torch.Tensor]


class Attend(Protocol):
    """Attention of one layer over whatever its caller keeps."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [N, heads, hd], key and value [N, kv_heads, hd] of the same N rows, rotated;
        scaling is 1/√hd -> [N, heads, hd]."""
        ...


class RMSNorm(nn.Module):
    """x / rms(x) · w in float32, [.., d]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def wavelengths(config: DrafterConfig, device: torch.device | None = None) -> torch.Tensor:
    """float32 [hd / 2]: a position over them are its rotary angles."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    lengths: torch.Tensor = config.rope_theta ** (half / config.head_dim)
    return lengths


def rotary(config: DrafterConfig, positions: torch.Tensor) -> Rotary:
    """cos and sin [N, 1, hd] of positions [N], float32; sin has the sign of the rotated half."""
    angle = positions.float()[:, None, None] / wavelengths(config, positions.device)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: torch.Tensor, turn: Rotary) -> torch.Tensor:
    """x [N, heads, hd] turned by its positions' angles."""
    cos, sin = turn
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int, inputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        d, hd, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(inputs, self.heads * hd, bias=bias)
        self.k_proj = nn.Linear(inputs, self.kv_heads * hd, bias=bias)
        self.v_proj = nn.Linear(inputs, self.kv_heads * hd, bias=bias)
        self.o_proj = nn.Linear(self.heads * hd, d, bias=bias)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps)
        self.k_norm = RMSNorm(hd, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, turn: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, inputs] -> keys, normed and rotated, and values, each [N, kv_heads, hd] (eq. 3)."""
        shape = (len(x), self.kv_heads, self.head_dim)
        key, value = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        return rotate(self.k_norm(key), turn), value

    def forward(self, x: torch.Tensor, turn: Rotary, attend: Attend) -> torch.Tensor:
        """x [N, inputs] -> [N, d]."""
        query = self.q_proj(x).view(len(x), self.heads, self.head_dim)
        query = rotate(self.q_norm(query), turn)
        seen = attend(self.layer, query, *self.keys_values(x, turn))
        return cast(torch.Tensor, self.o_proj(seen.reshape(len(x), -1)))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=False)
        self.up_proj = nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return cast(torch.Tensor, self.down_proj(gated))


class DecoderLayer(nn.Module):
    """One pre-norm layer on flat rows [N, d]."""

    def __init__(self, config: DrafterConfig, layer: int, inputs: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, inputs or config.hidden_size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, turn: Rotary, attend: Attend) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn, attend)
        return cast(torch.Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))
