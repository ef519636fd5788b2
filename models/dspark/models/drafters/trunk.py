"""What all trained drafters share: the target's embedding and LM head, and the projection."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.layers import RMSNorm
from dspark.models.targets.features import FeatureProjection

# The target's own tensors, frozen in training.
TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight")


class Trunk(nn.Module):
    """embed_tokens [V, d], fc W_c [d, m·d] (eq. 2), a final norm, lm_head [Vd, d].

    The LM head has the rows of the draft vocabulary only.
    """

    def __init__(self, config: DrafterConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.vocabulary = vocabulary
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.lm_head = nn.Linear(d, len(vocabulary), bias=False)

    def feature_norm(self) -> RMSNorm | None:
        """The norm of eq. 2, for kinds that have one there."""
        return None

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """H_ctx (eq. 2) of concatenated target states: [.., m·d] -> [.., d]."""
        projected, norm = self.fc(hidden), self.feature_norm()
        return cast(torch.Tensor, projected if norm is None else norm(projected))

    def projection(self) -> FeatureProjection:
        """`project` as what a verifier loads, so that d numbers a token cross the wire."""
        norm = self.feature_norm()
        return FeatureProjection(
            self.config.target_layer_ids,
            self.fc.weight.detach().clone(),
            None if norm is None else norm.weight.detach().clone(),
            self.config.rms_norm_eps,
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[..] target ids -> [.., d], scaled as the target scales them."""
        rows = cast(torch.Tensor, self.embed_tokens(ids))
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """U: normed hidden states [.., d] -> [.., Vd], capped as the target's are."""
        logits = cast(torch.Tensor, self.lm_head(hidden))
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
