"""The promise of a target backend: one ragged forward pass over paged KV blocks.

The engine owns block numbers, the backend owns what a block looks like. All backends pass one
conformance suite (tests/models/test_backend_conformance.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.models.targets.features import FeatureProjection

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """B tokens of R sequences, flattened; sequence r owns rows query_start[r]:query_start[r+1].

    token_ids, positions: i32 [B]. query_start: i32 [R+1]. context_len: i32 [R], tokens already in
    the KV cache before this step. block_table: i32 [R, N], padded with any valid block.
    logit_rows: i32 [L], rows whose logits are wanted. feature_rows: i32 [F], rows whose context
    features are wanted. Row i of sequence r attends to its context and to its rows up to i.
    """

    token_ids: IntArray
    positions: IntArray
    query_start: IntArray
    context_len: IntArray
    block_table: IntArray
    logit_rows: IntArray
    feature_rows: IntArray


@dataclass(frozen=True, slots=True)
class StepOutput:
    """logits: float32 [L, V] on the backend's device. features: feature_id -> float32 [F, d].

    Tensors are the caller's to read until the next forward.
    """

    logits: torch.Tensor
    features: Mapping[str, torch.Tensor]


class Backend(Protocol):
    """A target model that can run ragged steps. One caller at a time."""

    @property
    def name(self) -> str:
        """Backend, precision and device: what a step cost profile is valid for."""
        ...

    @property
    def target_id(self) -> str:
        """Hash of configuration and weights' names and shapes: which model this is."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def kv_bytes(self) -> int:
        """Of the blocks that are allocated, written or not; known after the first forward."""
        ...

    def allocate(self, blocks: int) -> None:
        """Make room for `blocks` KV blocks, forgetting any before."""
        ...

    def copy(self, src_block: int, dst_block: int) -> None:
        """Copy one block's keys and values, every layer."""
        ...

    def load_projection(self, projection: FeatureProjection) -> None:
        """From now on every step yields features under `projection.feature_id` too."""
        ...

    def unload_projection(self, feature_id: str) -> None: ...

    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Run one step: write B keys and values, return chosen logits and features."""
        ...
