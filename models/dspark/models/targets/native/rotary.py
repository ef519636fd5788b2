"""Rotary tables, by the model's own function: whatever scaling its configuration asks for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

_GROWTH = 512  # positions


class RotaryTables:
    """cos and sin, float32 [positions, head_dim / 2], made as far as they are needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._function: Any = copy.deepcopy(model.base_model.rotary_emb)
        self._tables = (torch.empty(0), torch.empty(0))

    def upto(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables that know at least so many positions. A position's rows never change."""
        known = len(self._tables[0])
        if positions > known:
            last = max(positions, 2 * known)
            last = -(-last // _GROWTH) * _GROWTH
            with torch.inference_mode():
                cos, sin = self._function(torch.empty(1), torch.arange(last)[None])
            half = cos.shape[-1] // 2  # the second half says the same again
            self._tables = (cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        return self._tables
