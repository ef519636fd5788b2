"""What a trained drafter computes with: torch (any kind, any device), or the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from dspark.models.drafters.autoregressive import AutoregressiveDrafter
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.blocks import draft_blocks
from dspark.models.drafters.choosing import Chooser, FloatArray, IdArray
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.injection import inject_context
from dspark.models.drafters.sessions import Ready, RingLayout, Sessions
from dspark.models.drafters.token_steps import draft_steps
from dspark.models.drafters.trunk import Trunk
from dspark.models.targets.packed import PackedLinear, can_pack, pack_linears


class DraftKernel(Protocol):
    """The work of a draft step, on sessions whose rings have its layout. One caller."""

    @property
    def name(self) -> str:
        """Equal for kernels that give the same numbers."""
        ...

    @property
    def layout(self) -> RingLayout: ...

    def inject(self, sessions: Sessions, batch: Sequence[Ready]) -> None:
        """Put the new context of all of a batch into its rings, which have room."""
        ...

    def draft(
        self, sessions: Sessions, batch: Sequence[Ready], chooser: Chooser, steps: int
    ) -> tuple[IdArray, FloatArray]:
        """Ids and raw confidence logits, each [R, steps], of sessions whose context is injected."""
        ...


class TorchKernel:
    """Of a model that is its own from then on (linear layers are packed).

    candidates: of the sequential head, 0 = the whole draft vocabulary.
    """

    def __init__(self, model: Trunk, candidates: int) -> None:
        self._model = _ready_to_draft(model)
        self._candidates = candidates
        weight = model.norm.weight
        self.name = f"torch-{str(weight.dtype).removeprefix('torch.')}"
        self.layout: RingLayout = SlotRings(model.config, weight.device)

    @torch.inference_mode()
    def inject(self, sessions: Sessions, batch: Sequence[Ready]) -> None:
        inject_context(self._model, sessions, batch)

    @torch.inference_mode()
    def draft(
        self, sessions: Sessions, batch: Sequence[Ready], chooser: Chooser, steps: int
    ) -> tuple[IdArray, FloatArray]:
        if isinstance(self._model, ParallelDrafter):
            return draft_blocks(self._model, sessions, batch, chooser, steps, self._candidates)
        assert isinstance(self._model, AutoregressiveDrafter)
        return draft_steps(self._model, sessions, batch, chooser, steps)


class SlotRings:
    """float32 [layers, 2, kv_heads, slots + γ, hd]: what torch's attention reads in one slice."""

    axis = 3

    def __init__(self, config: DrafterConfig, device: torch.device) -> None:
        self._config = config
        self._device = device

    def empty(self, slots: int) -> torch.Tensor:
        config = self._config
        return torch.empty(
            config.num_layers,
            2,
            config.num_kv_heads,
            slots + config.gamma,
            config.head_dim,
            device=self._device,
        )


def _ready_to_draft(model: Trunk) -> Trunk:
    """Linear layers packed where that is possible. The sequential head keeps its rows, which are
    gathered, and so does what is not used here (`fc`)."""
    if can_pack(model.norm.weight.device, model.norm.weight.dtype):
        pack_linears(model.get_submodule("layers"))
        for name in ("lm_head", "eh_proj"):
            linear = getattr(model, name, None)
            if type(linear) is nn.Linear:
                setattr(model, name, PackedLinear(linear))
    return model.eval().requires_grad_(False)
