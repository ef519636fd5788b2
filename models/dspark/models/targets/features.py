"""Context features: what a drafter reads of its target (paper eq. 2, projected at the verifier)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class FeatureProjection:
    """H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)]) (eq. 2).

    layer_ids: m target layers; layer i is the output of decoder layer i, -1 the embeddings, the
    last layer is not allowed. weight: [d, m * D], or None for the bare concatenation (d = m * D).
    norm_weight: [d], or None for no norm. eps: of the norm.
    """

    layer_ids: tuple[int, ...]
    weight: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 1e-6

    @cached_property
    def feature_id(self) -> str:
        """Equal for equal layers and tensors, whatever device they are on."""
        digest = hashlib.blake2b(repr((self.layer_ids, self.eps)).encode(), digest_size=8)
        for tensor in (self.weight, self.norm_weight):
            if tensor is not None:
                digest.update(repr(tuple(tensor.shape)).encode())
                digest.update(tensor.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device, dtype: torch.dtype) -> FeatureProjection:
        """The same projection on a device. The id is of the original tensors."""

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, dtype)

        moved = FeatureProjection(
            self.layer_ids, move(self.weight), move(self.norm_weight), self.eps
        )
        moved.__dict__["feature_id"] = self.feature_id
        return moved

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """[F, m * D] concatenated hidden states -> float32 [F, d]."""
        projected = hidden if self.weight is None else hidden @ self.weight.T
        if self.norm_weight is None:
            return projected.float()
        scale = projected.float().pow(2).mean(-1, keepdim=True).add(self.eps).rsqrt()
        return projected.float() * scale * self.norm_weight.float()
