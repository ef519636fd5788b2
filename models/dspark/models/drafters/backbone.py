"""The parallel stage (§3.1) with KV injection (§2, eq. 3): `dspark` and `dflash`.

The block is the anchor and γ - 1 mask tokens; hidden states h_1..h_γ come from one pass, the anchor
being the first position that predicts. Its positions see each other in both directions and all of
the context, which is positions before the anchor, each at its own rotary position.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.heads import ConfidenceHead, make_head
from dspark.models.drafters.layers import Attend, Attention, DecoderLayer, RMSNorm, rotary
from dspark.models.drafters.trunk import Trunk


class ParallelDrafter(Trunk):
    def __init__(self, config: DrafterConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.markov_head = make_head(config, vocabulary.rows, len(vocabulary))
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def feature_norm(self) -> RMSNorm:
        return self.hidden_norm

    def context_keys_values(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer, what context adds to it (eq. 3): H_ctx [N, d] at positions [N]
        -> keys and values [N, kv_heads, hd]."""
        turn = rotary(self.config, positions)
        return [self._attention(i).keys_values(features, turn) for i in range(len(self.layers))]

    def block_ids(self, anchors: torch.Tensor) -> torch.Tensor:
        """[R] anchors -> [R, γ]: the block's input ids."""
        ids = anchors.new_full((len(anchors), self.config.gamma), self.config.mask_token_id)
        ids[:, 0] = anchors
        return ids

    def block_hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """h: block ids and their positions, [N] flat -> normed hidden states [N, d]."""
        hidden, turn = self.embed(ids), rotary(self.config, positions)
        for layer in self.layers:
            hidden = layer(hidden, turn, attend)
        return cast(torch.Tensor, self.norm(hidden))

    def _attention(self, layer: int) -> Attention:
        return cast(DecoderLayer, self.layers[layer]).self_attn
