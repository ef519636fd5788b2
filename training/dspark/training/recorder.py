"""What the target thinks of every token it runs, kept while it runs it.

`RecordingBackend` is a `Backend` around another one: the engine notices nothing. Beside each KV
slot it keeps the hidden states of the row that was run there and, where its logits were asked for,
the likeliest ids. Such a row lives exactly as long as its KV slot, so whatever the engine may use
of a sequence (prefix hits, copied blocks, drafts that stood) is recorded, and a rejected row is
overwritten as its keys and values are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from dspark.models.targets.backend import Backend, RaggedBatch, StepOutput
from dspark.models.targets.features import FeatureProjection
from dspark.training.examples import FEATURE_DTYPES, Layout, Target
from dspark.training.topk import top_probabilities

Key = tuple[str, int]
# The blocks that each running sequence owns in the step that is about to run.
Owners = Callable[[], Mapping[Key, Sequence[int]]]


class RecordingBackend:
    """Forwards to `backend` and keeps rows in `layout`. owners: asked in each forward pass."""

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self.owners: Owners = dict
        self._backend = backend
        self._layout = layout
        self._own = FeatureProjection(layout.layer_ids)
        self._blocks_of: dict[Key, list[int]] = {}
        backend.load_projection(self._own)

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def target_id(self) -> str:
        return self._backend.target_id

    @property
    def vocab_size(self) -> int:
        return self._backend.vocab_size

    @property
    def context_length(self) -> int:
        return self._backend.context_length

    @property
    def block_size(self) -> int:
        return self._backend.block_size

    @property
    def kv_bytes(self) -> int:
        return self._backend.kv_bytes

    def allocate(self, blocks: int) -> None:
        self._backend.allocate(blocks)
        slots, K = blocks * self.block_size, self._layout.top_k
        dtype = FEATURE_DTYPES[self._layout.feature_dtype]
        # Touched where a row is kept, so an idle slot costs no memory.
        self._tokens = np.full(slots, -1, np.int32)
        self._features = torch.empty((slots, self._layout.feature_width), dtype=dtype)
        self._top = Target(
            torch.empty((slots, K), dtype=torch.int32),
            torch.empty((slots, K), dtype=torch.float16),
            torch.empty(slots),
        )
        self._has_top = np.zeros(slots, bool)

    def copy(self, src_block: int, dst_block: int) -> None:
        self._backend.copy(src_block, dst_block)
        size = self.block_size
        src, dst = (slice(b * size, (b + 1) * size) for b in (src_block, dst_block))
        self._tokens[dst], self._has_top[dst] = self._tokens[src], self._has_top[src]
        self._features[dst] = self._features[src]
        for kept in (self._top.top_ids, self._top.top_p, self._top.tail):
            kept[dst] = kept[src]

    def load_projection(self, projection: FeatureProjection) -> None:
        self._backend.load_projection(projection)

    def unload_projection(self, feature_id: str) -> None:
        self._backend.unload_projection(feature_id)

    def forward(self, batch: RaggedBatch) -> StepOutput:
        self._blocks_of = {key: list(blocks) for key, blocks in self.owners().items()}
        every = np.arange(len(batch.token_ids), dtype=np.int32)
        output = self._backend.forward(replace(batch, feature_rows=every))
        features = dict(output.features)
        self._keep(batch, features.pop(self._own.feature_id), output.logits)
        wanted = torch.from_numpy(batch.feature_rows).long()
        return StepOutput(
            output.logits, {name: rows[wanted.to(rows.device)] for name, rows in features.items()}
        )

    def _keep(self, batch: RaggedBatch, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        slots = self._slots(batch)
        self._tokens[slots] = batch.token_ids
        self._has_top[slots] = False
        self._features[torch.from_numpy(slots)] = hidden.to("cpu", self._features.dtype)
        if len(batch.logit_rows):
            chosen = slots[batch.logit_rows]
            self._has_top[chosen] = True
            top = top_probabilities(logits, self._layout.top_k)
            at = torch.from_numpy(chosen)
            self._top.top_ids[at], self._top.tail[at] = top.top_ids.cpu(), top.tail.cpu()
            self._top.top_p[at] = top.top_p.to("cpu", torch.float16)

    def _slots(self, batch: RaggedBatch) -> np.ndarray:
        """The KV slot of each row, int64 [B]."""
        row = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
        at = batch.positions.astype(np.int64)
        block = batch.block_table[row, at // self.block_size].astype(np.int64)
        slots: np.ndarray = block * self.block_size + at % self.block_size
        return slots

    def take(self, key: Key, ids: Sequence[int], prompt_tokens: int) -> tuple[torch.Tensor, Target]:
        """Features [n, m D] and target [n - prompt_tokens] of a choice that ended in the last step.

        ids: prompt and answer, n. The last token was not run: its features are zeros.
        Raises LookupError if a row is not there: it was taken away (preemption).
        """
        blocks = np.array(self._blocks_of[key], np.int64)
        at = np.arange(len(ids) - 1)
        slots = blocks[at // self.block_size] * self.block_size + at % self.block_size
        choosing = slots[prompt_tokens - 1 :]
        if not (
            np.array_equal(self._tokens[slots], np.array(ids[:-1], np.int32))
            and self._has_top[choosing].all()
        ):
            raise LookupError(f"{key}: rows of its tokens are not in the cache")
        features = torch.zeros((len(ids), self._layout.feature_width), dtype=self._features.dtype)
        features[:-1] = self._features[torch.from_numpy(slots)]
        return features, self._top[torch.from_numpy(choosing)]
