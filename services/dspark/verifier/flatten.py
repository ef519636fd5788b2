"""A composed and planned step as the flat arrays that a backend runs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from dspark.models.targets.backend import RaggedBatch
from dspark.verifier.batcher import Item
from dspark.verifier.kv_cache import KVCache


def flatten(items: Seq[Item], lengths: Seq[int], cache: KVCache) -> RaggedBatch:
    """Rows in the order of `items`: each one's uncomputed tokens, then its first ℓ draft tokens.

    Logits are asked for the last uncomputed token, where a step reaches it, and for each draft
    token; features for every row of a sequence whose drafter reads them.
    """
    token_ids: list[int] = []
    starts, contexts = [0], []
    logit_rows: list[int] = []
    feature_rows: list[int] = []
    for item, length in zip(items, lengths, strict=True):
        sequence, state = item.sequence, item.sequence.state
        begin = len(token_ids)
        token_ids.extend(state.ids[state.computed : state.computed + item.tokens])
        if length and sequence.draft is not None:
            token_ids.extend(sequence.draft.draft.ids[:length])
        end = len(token_ids)
        if item.reaches_end:
            logit_rows.extend(range(begin + item.tokens - 1, end))
        if sequence.feature_id:
            feature_rows.extend(range(begin, end))
        starts.append(end)
        contexts.append(state.computed)
    query_start = np.array(starts, np.int32)
    context_len = np.array(contexts, np.int32)
    offsets = np.repeat(context_len - query_start[:-1], np.diff(query_start))
    return RaggedBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(len(token_ids), dtype=np.int32) + offsets,
        query_start=query_start,
        context_len=context_len,
        block_table=cache.table([item.sequence for item in items]),
        logit_rows=np.array(logit_rows, np.int32),
        feature_rows=np.array(feature_rows, np.int32),
    )
