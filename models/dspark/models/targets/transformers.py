"""The transformers backend: any proven decoder's own modules with our attention in their middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from dspark.core.errors import ModelError
from dspark.models.targets.attention import PaddedAttention, StepAttention, attend
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.models.targets.features import FeatureProjection
from dspark.models.targets.fingerprint import fingerprint
from dspark.models.targets.kv import PagedKV
from dspark.models.targets.packed import can_pack, pack_linears, padded_rows

ATTENTION_NAME = "dspark"


class TransformersBackend:
    """Runs ragged steps through a `…ForCausalLM` of transformers, in its dtype and on its device.

    No Hugging Face cache and no mask is ever built: our attention function reads and writes paged
    blocks. On a CPU in float32 the model's linear layers are packed in place: the model is the
    backend's from then on. Rows are not bit-equal across batch shapes (kernels are picked by
    shape), so greedy equality holds up to near-ties; see design.md §4, L1.
    """

    def __init__(self, model: PreTrainedModel, block_size: int = 16) -> None:
        self._config = model.config.get_text_config()
        check_rows_stand_alone(self._config)
        AttentionInterface.register(ATTENTION_NAME, attend)
        model.set_attn_implementation(ATTENTION_NAME)
        self.block_size = block_size
        self._model = model.eval().requires_grad_(False)
        self._decoder: Any = model.base_model
        self.target_id = fingerprint(model)
        self._packed = can_pack(model.device, model.dtype)
        if self._packed:
            pack_linears(model)
        self._head: Any = model.get_output_embeddings()
        self._softcap: float | None = getattr(self._config, "final_logit_softcapping", None)
        self._kv = PagedKV(0, block_size)
        self._projections: dict[str, FeatureProjection] = {}
        self._attention: Callable[[RaggedBatch], StepAttention] = self._padded
        if self.device.type == "cuda" and self.dtype != torch.float32:
            self._attention = self._flashinfer()

    def _padded(self, batch: RaggedBatch) -> StepAttention:
        return PaddedAttention(batch, self._kv, self.device)

    def _flashinfer(self) -> Callable[[RaggedBatch], StepAttention]:
        from dspark.models.targets.attention_cuda import WORKSPACE_BYTES, FlashInferStep

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return lambda batch: FlashInferStep(batch, self._kv, self.device, workspace)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def name(self) -> str:
        return f"transformers-{str(self.dtype).removeprefix('torch.')}-{self.device.type}"

    @property
    def vocab_size(self) -> int:
        return int(self._head.out_features)

    @property
    def context_length(self) -> int:
        return int(self._config.max_position_embeddings)

    @property
    def kv_bytes(self) -> int:
        return self._kv.nbytes

    def allocate(self, blocks: int) -> None:
        self._kv = PagedKV(blocks, self.block_size)

    @torch.inference_mode()
    def copy(self, src_block: int, dst_block: int) -> None:
        self._kv.copy(src_block, dst_block)

    def load_projection(self, projection: FeatureProjection) -> None:
        layers = len(self._decoder.layers)
        for layer in projection.layer_ids:
            if not -1 <= layer < layers - 1:
                raise ModelError(
                    f"context features of layer {layer}: the target has layers -1 (embeddings) "
                    f"to {layers - 2}, the last one is not allowed"
                )
        self._projections[projection.feature_id] = projection.to(self.device, self.dtype)

    def unload_projection(self, feature_id: str) -> None:
        self._projections.pop(feature_id, None)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> StepOutput:
        taps = _Taps(self._decoder.layers, self._wanted_layers(batch))
        with taps, _flushed_denormals():
            hidden = self._decoder(
                input_ids=self._rows(batch.token_ids)[None],
                position_ids=self._rows(batch.positions)[None],
                use_cache=False,
                dspark_step=self._attention(batch),
            ).last_hidden_state[0]
        rows = batch.logit_rows
        if not np.array_equal(rows, np.arange(len(batch.token_ids))):
            hidden = hidden[self._rows(rows)]
        logits = self._head(hidden)[: len(rows)]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return StepOutput(logits.float(), self._features(batch, taps.hidden))

    def _rows(self, values: np.ndarray) -> torch.Tensor:
        """int64 of one value a row, on the device; rows that pad them repeat the first."""
        rows = torch.from_numpy(values).to(self.device).long()
        more = padded_rows(len(values)) - len(values) if self._packed and len(values) else 0
        return torch.cat((rows, rows[:1].expand(more))) if more else rows

    def _wanted_layers(self, batch: RaggedBatch) -> set[int]:
        if not len(batch.feature_rows):
            return set()
        return {layer for p in self._projections.values() for layer in p.layer_ids}

    def _features(
        self, batch: RaggedBatch, hidden: dict[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if not hidden:
            return {}
        rows = torch.from_numpy(batch.feature_rows).to(self.device)
        return {
            feature_id: projection.apply(
                torch.cat([hidden[layer][rows] for layer in projection.layer_ids], dim=-1)
            )
            for feature_id, projection in self._projections.items()
        }


def check_rows_stand_alone(config: Any) -> None:
    """Raise `ModelError` for a model whose rows depend on more than their own sequence's past."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    for part in (rope, *by_layer_type):
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise ModelError(
                f"rope_type {part['rope_type']!r} is not served: its frequencies follow the "
                "longest sequence of a batch, so batch mates would change a text"
            )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError("a model that attends to later tokens is not served: it cannot generate")


@contextmanager
def _flushed_denormals() -> Iterator[None]:
    """Denormals cost tens of times a normal operation and change nothing that is seen; but a thread
    that flushes them breaks what others compute on it, so only a step does."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class _Taps:
    """Hooks that keep the hidden states of chosen layers for the length of one step."""

    def __init__(self, layers: Any, wanted: set[int]) -> None:
        self.hidden: dict[int, torch.Tensor] = {}
        self._layers = layers
        self._wanted = wanted
        self._hooks: list[Any] = []

    def __enter__(self) -> _Taps:
        for layer in self._wanted:
            # The input of layer i + 1 is the output of layer i, and the embeddings come as the
            # input of layer 0: one kind of hook serves both.
            self._hooks.append(self._layers[layer + 1].register_forward_pre_hook(self._keep(layer)))
        return self

    def _keep(self, layer: int) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            self.hidden[layer] = args[0][0]

        return hook

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
