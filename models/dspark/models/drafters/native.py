"""Block drafting on the native kernels: two calls a round, one for new context, one for blocks."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.models.cache import Progress
from dspark.models.drafters.choosing import Chooser, FloatArray, IdArray
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.injection import groups
from dspark.models.drafters.native_library import (
    HEADS,
    Block,
    Config,
    Context,
    Head,
    Layer,
    drafting,
)
from dspark.models.drafters.native_tensors import Tensors, head_tensors, layer_tensors, takes
from dspark.models.drafters.sessions import Ready, RingLayout, Sessions
from dspark.models.drafters.trunk import Trunk
from dspark.models.targets.native import NativeBackend, NativeUnavailable
from dspark.models.targets.native.compiling import machine
from dspark.models.targets.native.library import best_set, kernel_sets, load_library
from dspark.models.targets.native.threads import usable_threads

BLOCK_SIZE = 16  # slots side by side in a ring, a multiple of any vector


@dataclass(frozen=True, slots=True)
class NativeDraftOptions:
    """precision: of layers and LM head, "float32" or "int8"; the small heads stay float32. kv: of
    the rings, "float32" or "float16", None for what goes with the precision. threads: 0 for what
    the process may use. kernels: a kernel set, None for the best one. beside: the target's backend
    in this process, whose threads work for the drafter too. cache: where the library is kept, None
    for the usual place."""

    precision: str = "float32"
    kv: str | None = None
    threads: int = 0
    kernels: str | None = None
    beside: NativeBackend | None = None
    cache: Path | None = None

    @property
    def half_kv(self) -> bool:
        return (self.kv or ("float16" if self.precision == "int8" else "float32")) == "float16"

    @classmethod
    def beside_target(cls, backend: object) -> NativeDraftOptions | None:
        """In a target's precision and by its threads; None for one that is not native."""
        if not isinstance(backend, NativeBackend):
            return None
        return cls(backend.precision, threads=backend.threads, beside=backend)


class NativeKernel:
    """A `DraftKernel` of a `dspark` or `dflash` model. What a session is drafted depends on nothing
    else in its batch, bit for bit. Greedy batches are drawn in the library; for others it gives one
    position's logits at a time, and the `Chooser` draws as ever (L2, L3).

    Raises NativeUnavailable for a model or machine that it does not fit, ModelError for weights
    that are not finite.
    """

    def __init__(
        self,
        model: Trunk,
        candidates: int,
        options: NativeDraftOptions,
        progress: Progress = lambda _: None,
    ) -> None:
        parallel = takes(model)
        config = model.config
        beside = options.beside
        self._beside = beside  # its threads are used
        self._ids = model.vocabulary.ids
        self.candidates = min(candidates or len(self._ids), len(self._ids))
        self.threads = usable_threads(options.threads)
        library = load_library(progress, options.cache) if beside is None else beside.library
        self._library = drafting(library)
        kernels = options.kernels or (
            best_set(kernel_sets(library), machine()) if beside is None else beside.kernels
        )
        half = options.half_kv
        self._confident = config.confidence
        reads = config.confidence_reads_prev
        embedding = parallel.embed_tokens.weight.detach().contiguous()
        native = Config(
            layers=config.num_layers,
            width=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            gamma=config.gamma,
            mask=config.mask_token_id,
            draft_vocab=len(self._ids),
            candidates=self.candidates,
            head=HEADS[config.head],
            rank=config.rank,
            head_rows=model.vocabulary.rows,
            confidence=(2 if reads else 1) if config.confidence else 0,
            block_size=BLOCK_SIZE,
            int8=options.precision == "int8",
            half_kv=half,
            threads=self.threads,
            norm_eps=config.rms_norm_eps,
            embed_scale=config.embed_scale,
            softcap=config.logit_softcap or 0.0,
            kernels=kernels.encode(),
        )
        handle = library.dn_drafter_create(
            ctypes.byref(native), beside.handle if beside else None, embedding.data_ptr()
        )
        if not handle:
            raise NativeUnavailable(self._said())
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, library.dn_drafter_destroy, self._handle)
        self.kernels: str = library.dn_drafter_kernels(self._handle).decode()
        self.name = f"native-{options.precision}-{self.kernels}{'-kv16' if half else ''}"
        self.layout: RingLayout = BlockRings(config, torch.float16 if half else torch.float32)
        for index, tensors in enumerate(layer_tensors(parallel)):
            layer = Layer(**_pointers(tensors))
            self._check(library.dn_drafter_set_layer(self._handle, index, ctypes.byref(layer)))
        head = head_tensors(parallel)
        tables = [head.tensors.get(name) for name in ("w1", "w2")]
        self.shares_embedding = bool(library.dn_drafter_shares(self._handle))
        if not self.shares_embedding:
            tables.append(embedding)
        self._read = (*tables, head.index)  # by the library; the rest of the model is not needed
        self._check(
            library.dn_drafter_set_head(
                self._handle,
                ctypes.byref(
                    Head(
                        **_pointers(head.tensors),
                        confidence_bias=head.confidence_bias,
                        index=head.index.ctypes.data,
                    )
                ),
            )
        )

    def inject(self, sessions: Sessions, batch: Sequence[Ready]) -> None:
        for group in groups(batch):
            counts = [ready.session.end - ready.first for ready in group]
            features = [_features(ready) for ready in group]
            rows = features[0] if len(group) == 1 else np.concatenate(features)
            rows = np.ascontiguousarray(rows)
            facts = np.array(
                [
                    [ready.first for ready in group],
                    counts,
                    [sessions.first_slot(ready) for ready in group],
                    [_blocks(ready) for ready in group],
                ],
                np.int32,
            )
            rings = np.array([ready.ring.data_ptr() for ready in group], np.uintp)
            call = Context(
                len(group), sessions.window, *_rows(facts), rows.ctypes.data, rings.ctypes.data
            )
            self._check(self._library.dn_drafter_inject(self._handle, ctypes.byref(call)))

    def draft(
        self, sessions: Sessions, batch: Sequence[Ready], chooser: Chooser, steps: int
    ) -> tuple[IdArray, FloatArray]:
        R = len(batch)
        facts = np.array(
            [
                [ready.request.tokens[-1] for ready in batch],
                [ready.session.end for ready in batch],
                [sessions.held(ready.session) for ready in batch],
                [_blocks(ready) for ready in batch],
            ],
            np.int32,
        )
        rings = np.array([ready.ring.data_ptr() for ready in batch], np.uintp)
        confidences = np.empty((R, steps), np.float32)
        greedy = not chooser.sampled.any()
        out = np.empty((R, steps) if greedy else (R, steps, self.candidates), np.int32)
        at = out.ctypes.data
        call = Block(
            R, steps, greedy, *_rows(facts), rings.ctypes.data,
            at if greedy else None, confidences.ctypes.data, None if greedy else at,
        )  # fmt: skip
        self._check(self._library.dn_drafter_block(self._handle, ctypes.byref(call)))
        if greedy:
            return self._ids[out], confidences
        return self._draw(chooser, out)

    def _draw(
        self, chooser: Chooser, candidates: np.ndarray[Any, np.dtype[np.int32]]
    ) -> tuple[IdArray, FloatArray]:
        """Position after position of the last block, of whose base logits these are the largest."""
        R, steps, M = candidates.shape
        logits = np.empty((R, M), np.float32)
        confidences = np.empty((steps, R), np.float32)
        ids = np.empty((R, steps), np.int64)
        rows, chosen = np.arange(R), None
        for k in range(steps):
            self._check(
                self._library.dn_drafter_next(
                    self._handle,
                    k,
                    None if chosen is None else chosen.ctypes.data,
                    logits.ctypes.data,
                    confidences[k:].ctypes.data,
                )
            )
            these = self._ids[candidates[:, k]]
            picked = chooser.choose(logits, these)
            ids[:, k] = these[rows, picked]
            chosen = picked.astype(np.int32)
        if self._confident:
            return ids, confidences.T
        # Of a greedy row the library's figure, as in a batch where all are greedy.
        return ids, np.where(chooser.sampled[:, None], chooser.top_logits, confidences.T)

    def products(self, requests: int, context: int) -> None:
        """Only the matrix products of a block of so many requests and of `context` new positions,
        on whatever the last block left. For measurements."""
        self._check(self._library.dn_drafter_products(self._handle, requests, context))

    def _said(self) -> str:
        return str(self._library.dn_error().decode())

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"native draft step: {self._said()}")


class BlockRings:
    """[layers, 2, blocks, kv_heads * hd * BLOCK_SIZE]: what the kernels read, slots in blocks."""

    axis = 2

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype

    def empty(self, slots: int) -> torch.Tensor:
        config = self._config
        blocks = -(-(slots + config.gamma) // BLOCK_SIZE)
        numbers = config.num_kv_heads * config.head_dim * BLOCK_SIZE
        return torch.empty(config.num_layers, 2, blocks, numbers, dtype=self._dtype)


def _features(ready: Ready) -> FloatArray:
    features = ready.request.features
    assert features is not None
    return features[ready.first - ready.request.start :]


def _blocks(ready: Ready) -> int:
    return ready.ring.shape[2]


def _rows(facts: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Where each row begins."""
    at, stride = facts.ctypes.data, facts.strides[0]
    return [at + row * stride for row in range(len(facts))]


def _pointers(tensors: Tensors) -> dict[str, int | None]:
    return {name: None if one is None else one.data_ptr() for name, one in tensors.items()}
