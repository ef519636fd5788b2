"""Drafters that go token by token: EAGLE-3, and the one-token head of multi-token prediction.

Both read pairs: hidden state i with token i + 1, at rotary position i. A pair of context has the
target's state, a pair of the block the drafter's own state of the step before. With one layer, keys
and values of a pair depend on that pair alone, so context is injected without attention.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.layers import Attend, DecoderLayer, RMSNorm, rotary
from dspark.models.drafters.trunk import Trunk


class AutoregressiveDrafter(Trunk):
    """What both kinds do with a pair; how they join it is their own."""

    layers: nn.ModuleList

    def join(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [N, d] and the ids [N] after them -> the residual [N, d] and what attention
        reads [N, ·]."""
        raise NotImplementedError

    def context_keys_values(
        self, features: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of the one layer, what pairs of context add: features [N, d] at positions [N], each with
        the id [N] that follows -> keys and values [N, kv_heads, hd]."""
        _, read = self.join(features, ids)
        return [self._layer.self_attn.keys_values(read, rotary(self.config, positions))]

    def step(
        self, hidden: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The next state of each pair, before the final norm: [N, d]."""
        residual, read = self.join(hidden, ids)
        layer = self._layer
        state = residual + layer.self_attn(read, rotary(self.config, positions), attend)
        return cast(torch.Tensor, state + layer.mlp(layer.post_attention_layernorm(state)))

    def step_logits(self, state: torch.Tensor) -> torch.Tensor:
        """[N, d] -> [N, Vd]: what follows the ids that went into the state."""
        return self.base_logits(self.norm(state))

    @property
    def _layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])


class Eagle3Layer(DecoderLayer):
    """Attention reads [norm(embedding); norm(hidden)]; the residual is the hidden state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Drafter(AutoregressiveDrafter):
    """EAGLE-3 as the public code has it: features are W_c [..] without a norm."""

    def __init__(self, config: DrafterConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.layers = nn.ModuleList([Eagle3Layer(config)])

    def join(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = cast(Eagle3Layer, self.layers[0])
        read = torch.cat((layer.input_layernorm(self.embed(ids)), layer.hidden_norm(hidden)), -1)
        return hidden, read


class MtpDrafter(AutoregressiveDrafter):
    """One decoder layer on W [norm(embedding); H_ctx], one token (DeepSeek-V3's multi-token
    prediction, on the features that the other kinds read)."""

    def __init__(self, config: DrafterConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        d = config.hidden_size
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.embed_norm = RMSNorm(d, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, 0)])

    def feature_norm(self) -> RMSNorm:
        return self.hidden_norm

    def join(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = self.eh_proj(torch.cat((self.embed_norm(self.embed(ids)), hidden), -1))
        return joined, self._layer.input_layernorm(joined)
