"""The target reads answers that are given: a teacher-forced pass, no sampling, no engine.

For answers made elsewhere (another precision, another machine) and for training that keeps no
features on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dspark.models.targets.backend import Backend, RaggedBatch
from dspark.models.targets.features import FeatureProjection
from dspark.training.examples import FEATURE_DTYPES, Layout, Target
from dspark.training.topk import top_probabilities

Text = tuple[Sequence[int], int]  # ids of prompt and answer, prompt tokens


class Reader:
    """Runs whole sequences through a backend whose KV blocks it allocates for itself.

    kv_tokens: room for the sequences of one call of `read`, which are run together. step_tokens: of
    one forward pass at most. Features come out in `layout.feature_dtype`.
    """

    def __init__(
        self, backend: Backend, layout: Layout, *, kv_tokens: int = 16_384, step_tokens: int = 512
    ) -> None:
        self.layout = layout
        self._backend = backend
        self._own = FeatureProjection(layout.layer_ids)
        self._step_tokens = step_tokens
        self._blocks = kv_tokens // backend.block_size
        backend.load_projection(self._own)
        backend.allocate(self._blocks)

    def read(self, texts: Sequence[Text]) -> list[tuple[torch.Tensor, Target]]:
        """Features [n, m D] (zeros at the last token) and target [n - prompt tokens] of each text,
        as `RecordingBackend.take`."""
        found: list[tuple[torch.Tensor, Target]] = []
        for group in self._groups(texts):
            found += self._read_group(group)
        return found

    def _groups(self, texts: Sequence[Text]) -> Iterator[list[Text]]:
        """Texts that fit into the KV blocks together."""
        group: list[Text] = []
        blocks = 0
        for text in texts:
            needs = -(-len(text[0]) // self._backend.block_size)
            if needs > self._blocks:
                raise ValueError(f"a text of {len(text[0])} tokens, room for {self._blocks} blocks")
            if group and blocks + needs > self._blocks:
                yield group
                group, blocks = [], 0
            group.append(text)
            blocks += needs
        if group:
            yield group

    def _read_group(self, texts: Sequence[Text]) -> list[tuple[torch.Tensor, Target]]:
        size = self._backend.block_size
        tables, first = [], 0
        for ids, _ in texts:
            count = -(-len(ids) // size)
            tables.append(np.arange(first, first + count, dtype=np.int32))
            first += count
        dtype = FEATURE_DTYPES[self.layout.feature_dtype]
        features = [
            torch.zeros((len(ids), self.layout.feature_width), dtype=dtype) for ids, _ in texts
        ]
        targets: list[list[Target]] = [[] for _ in texts]
        for parts in self._steps([len(ids) - 1 for ids, _ in texts]):
            batch = _batch(texts, tables, parts)
            output = self._backend.forward(batch)
            hidden = output.features[self._own.feature_id].to("cpu", dtype)
            top = top_probabilities(output.logits, self.layout.top_k)
            row = chosen = 0
            for r, start, stop in parts:
                features[r][start:stop] = hidden[row : row + stop - start]
                row += stop - start
                choosing = stop - max(start, texts[r][1] - 1)
                if choosing > 0:
                    targets[r].append(top[chosen : chosen + choosing])
                    chosen += choosing
        return [
            (rows, Target(*(torch.cat(kept) for kept in _columns(parts))))
            for rows, parts in zip(features, targets, strict=True)
        ]

    def _steps(self, lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """(text, first token, last + 1) of each forward pass, at most `step_tokens` in all."""
        parts: list[tuple[int, int, int]] = []
        room = self._step_tokens
        for r, length in enumerate(lengths):
            start = 0
            while start < length:
                stop = min(length, start + room)
                parts.append((r, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield parts
                    parts, room = [], self._step_tokens
        if parts:
            yield parts


def _columns(parts: Sequence[Target]) -> Iterator[list[torch.Tensor]]:
    yield [part.top_ids.cpu() for part in parts]
    yield [part.top_p.cpu() for part in parts]
    yield [part.tail.cpu() for part in parts]


def _batch(
    texts: Sequence[Text], tables: Sequence[np.ndarray], parts: Sequence[tuple[int, int, int]]
) -> RaggedBatch:
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    for r, start, stop in parts:
        text, prompt = texts[r]
        begin = len(ids)
        ids += [int(token) for token in text[start:stop]]
        positions += range(start, stop)
        logit_rows += range(begin + max(start, prompt - 1) - start, begin + stop - start)
        starts.append(len(ids))
    table = np.zeros((len(parts), max(len(tables[r]) for r, _, _ in parts)), np.int32)
    for row, (r, _, _) in zip(table, parts, strict=True):
        row[: len(tables[r])] = tables[r]
    return RaggedBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        query_start=np.array(starts, np.int32),
        context_len=np.array([start for _, start, _ in parts], np.int32),
        block_table=table,
        logit_rows=np.array(logit_rows, np.int32),
        feature_rows=np.arange(len(ids), dtype=np.int32),
    )
