"""The native backend: a whole ragged step of a dense decoder in one call of our C++ library."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from dspark.core.errors import ModelError
from dspark.models.cache import Progress
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.models.targets.features import FeatureProjection
from dspark.models.targets.fingerprint import fingerprint
from dspark.models.targets.native import decoder
from dspark.models.targets.native.compiling import machine
from dspark.models.targets.native.library import (
    Batch,
    Config,
    NativeUnavailable,
    Projection,
    best_set,
    kernel_sets,
    load_library,
)
from dspark.models.targets.native.packing import Packing
from dspark.models.targets.native.rotary import RotaryTables
from dspark.models.targets.native.threads import usable_threads
from dspark.models.targets.native.weights import Shelf
from dspark.models.targets.transformers import check_rows_stand_alone

_PRECISIONS = {"float32": 0, "int8": 1}
_ARRAYS = (
    *("token_ids", "positions", "query_start", "context_len", "block_table"),
    *("logit_rows", "feature_rows"),
)


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """precision: of matrix products. kv: "float32" or "float16", None for what goes with the
    precision. threads: 0 for what the process may use. kernels: a kernel set, None for the best
    one. cache: where the library is kept, None for the usual place. shelf: where packed weights
    are kept, to be mapped by all processes; None for memory of this process."""

    precision: str = "float32"
    kv: str | None = None
    threads: int = 0
    kernels: str | None = None
    cache: Path | None = None
    shelf: Shelf | None = None

    @property
    def half_kv(self) -> bool:
        return (self.kv or ("float16" if self.precision == "int8" else "float32")) == "float16"


class NativeBackend:
    """Runs ragged steps of a float32 `…ForCausalLM` on the CPU. Its matrices are copied, the model
    is left as it is; with a shelf nothing of it is needed afterwards, without one its embedding.

    Rows are bit-equal whatever the batch mates, the chunking and the number of threads; between
    kernel sets they are not, hence `name`. Raises `NativeUnavailable` for a model or a machine
    that it does not fit, `ModelError` for weights that are not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_size: int = 16,
        options: NativeOptions | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        options = options or NativeOptions()
        self.shape = shape = decoder.shape_of(model)
        check_rows_stand_alone(model.config.get_text_config())
        self.target_id = fingerprint(model)
        self.block_size = block_size
        self.threads = usable_threads(options.threads)
        self.precision = options.precision
        self.context_length = int(model.config.get_text_config().max_position_embeddings)
        self.vocab_size = shape.vocab
        self._rotary = RotaryTables(model)
        self._library = load_library(progress, options.cache)
        kernels = options.kernels or best_set(kernel_sets(self._library), machine())
        embedding = model.get_input_embeddings().weight.detach().contiguous()
        self._int8 = _PRECISIONS[options.precision]
        config = Config(
            layers=shape.layers,
            width=shape.width,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            inner=shape.inner,
            vocab=shape.vocab,
            block_size=block_size,
            int8=self._int8,
            half_kv=options.half_kv,
            threads=self.threads,
            norm_eps=shape.norm_eps,
            query_scale=shape.query_scale,
            kernels=kernels.encode(),
        )
        handle = self._library.dn_create(ctypes.byref(config), embedding.data_ptr())
        if not handle:
            raise NativeUnavailable(self._said())
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, self._library.dn_destroy, self._handle)
        self.kernels: str = self._library.dn_model_kernels(self._handle).decode()
        kv = "-kv16" if options.half_kv else ""
        self.name = f"native-{options.precision}-{self.kernels}{kv}"
        packing = Packing(self._library, self._handle, model, shape.windows)
        file = None
        if options.shelf is None:
            packing.private()
        else:
            maker = f"{self._library.dn_source().decode()}-{self.kernels}-{options.precision}"
            file = packing.shared(options.shelf, maker, progress)
        self.shares_weights = file is not None
        if file is None:
            self._embedding = embedding  # the library reads it
        else:
            weakref.finalize(self, file.close)
        self._projections: dict[str, _Loaded] = {}
        self._logits = torch.empty(0, shape.vocab)
        self.allocate(0)

    @property
    def library(self) -> ctypes.CDLL:
        return self._library

    @property
    def handle(self) -> ctypes.c_void_p:
        """Of the model in the library, for what works beside it."""
        return self._handle

    @property
    def kv_bytes(self) -> int:
        return int(self._library.dn_kv_bytes(self._handle))

    @property
    def weight_bytes(self) -> int:
        """That a step reads whose rows want logits."""
        return int(self._library.dn_weight_bytes(self._handle))

    @property
    def multiply_adds(self) -> int:
        """Of a row that wants logits, in matrix products."""
        return self.shape.multiply_adds

    def allocate(self, blocks: int) -> None:
        self._blocks = blocks
        self._check(self._library.dn_allocate(self._handle, blocks))

    def copy(self, src_block: int, dst_block: int) -> None:
        for block in (src_block, dst_block):
            if not 0 <= block < self._blocks:
                raise IndexError(f"block {block} of {self._blocks}")
        self._library.dn_copy(self._handle, src_block, dst_block)

    def load_projection(self, projection: FeatureProjection) -> None:
        layers = self.shape.layers
        for layer in projection.layer_ids:
            if not -1 <= layer < layers - 1:
                raise ModelError(
                    f"context features of layer {layer}: the target has layers -1 (embeddings) "
                    f"to {layers - 2}, the last one is not allowed"
                )
        self._projections[projection.feature_id] = _Loaded(
            self._library, self._handle, projection, self.shape.width, self._int8
        )

    def unload_projection(self, feature_id: str) -> None:
        self._projections.pop(feature_id, None)

    def forward(self, batch: RaggedBatch) -> StepOutput:
        arrays = {name: np.ascontiguousarray(getattr(batch, name), np.int32) for name in _ARRAYS}
        B, L, F = len(batch.token_ids), len(batch.logit_rows), len(batch.feature_rows)
        if not B:
            return StepOutput(self._logits[:0], {})
        if L > len(self._logits):
            self._logits = torch.empty(L, self.vocab_size)
        loaded = self._projections if F else {}
        features = {name: torch.empty(F, one.width) for name, one in loaded.items()}
        projections = (Projection * len(loaded))(
            *(one.call(features[name]) for name, one in loaded.items())
        )
        cos, sin = self._rotary.upto(int(batch.positions.max()) + 1)
        step = Batch(
            B=B,
            R=len(batch.context_len),
            L=L,
            F=F,
            table_width=batch.block_table.shape[1],
            projections=len(loaded),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            logits=self._logits.data_ptr(),
            projection=ctypes.cast(projections, ctypes.c_void_p),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        self._check(self._library.dn_step(self._handle, ctypes.byref(step)))
        return StepOutput(self._logits[:L], features)

    def bandwidth(self) -> float:
        """Bytes a second at which these threads read the weights by a plain loop."""
        return float(self._library.dn_bandwidth(self._handle))

    def arithmetic(self) -> float:
        """Multiply-adds a second of these threads, in this precision, on registers alone."""
        return float(self._library.dn_arithmetic(self._handle))

    def products(self, B: int, L: int) -> None:
        """Only the matrix products of a step of B rows, L of them with logits; what they multiply
        is whatever the last step left. For measurements."""
        if L > len(self._logits):
            self._logits = torch.empty(L, self.vocab_size)
        self._check(self._library.dn_step_products(self._handle, B, L, self._logits.data_ptr()))

    def multiply(self, weight: torch.Tensor, x: torch.Tensor, *, int8: bool) -> torch.Tensor:
        """x [rows, k] times weight [n, k] transposed, by this backend's kernels."""
        weight, x = weight.contiguous(), x.contiguous()
        n, k = weight.shape
        library, out = self._library, torch.empty(len(x), n)
        matrix = library.dn_matrix_create(self._handle, weight.data_ptr(), n, k, int8)
        if not matrix:
            raise MemoryError(self._said())
        try:
            self._check(
                library.dn_multiply(self._handle, matrix, x.data_ptr(), len(x), out.data_ptr())
            )
        finally:
            library.dn_matrix_destroy(matrix)
        return out

    def _said(self) -> str:
        return str(self._library.dn_error().decode())

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"native step: {self._said()}")


class _Loaded:
    """A projection whose matrix is laid out for the kernels."""

    def __init__(
        self,
        library: Any,
        model: ctypes.c_void_p,
        projection: FeatureProjection,
        width: int,
        int8: int,
    ) -> None:
        self._layer_ids = np.array(projection.layer_ids, np.int32)
        self._eps = projection.eps
        self._matrix = self._norm = None
        self.width = len(projection.layer_ids) * width
        if projection.weight is not None:
            weight = projection.weight.detach().float().cpu().contiguous()
            self.width, inputs = weight.shape
            if inputs != len(projection.layer_ids) * width:
                raise ModelError(
                    f"a projection of {inputs} inputs does not fit "
                    f"{len(projection.layer_ids)} layers of {width}"
                )
            made = library.dn_matrix_create(model, weight.data_ptr(), self.width, inputs, int8)
            if not made:
                raise MemoryError(library.dn_error().decode())
            self._matrix = ctypes.c_void_p(made)
            weakref.finalize(self, library.dn_matrix_destroy, self._matrix)
        if projection.norm_weight is not None:
            self._norm = projection.norm_weight.detach().float().cpu().contiguous()

    def call(self, out: torch.Tensor) -> Projection:
        return Projection(
            matrix=self._matrix,
            norm=_pointer(self._norm),
            eps=self._eps,
            layers=len(self._layer_ids),
            layer_ids=self._layer_ids.ctypes.data,
            out=out.data_ptr(),
        )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
