"""A model becomes a native backend that has shown that it computes what transformers does."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dspark.core.errors import ModelError
from dspark.models.cache import Progress
from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.native.backend import NativeBackend, NativeOptions

# Largest difference of a logit over the largest logit, float32. Sound kernels stay below 1e-5.
FLOAT32_LIMIT = 1e-3
# Root mean square of the difference over that of the logits around their mean, int8: rounding alone
# makes 0.04 (tiny models) to 0.14 (30 layers), one wrong projection of one layer 0.5.
INT8_LIMIT = 0.35
_TEXT = 24  # tokens of the check


def open_native(
    model: PreTrainedModel,
    block_size: int = 16,
    options: NativeOptions | None = None,
    progress: Progress = lambda _: None,
) -> NativeBackend:
    """`NativeBackend` after its self-check. Raises `NativeUnavailable` where it does not fit, and
    `ModelError` where its numbers are not transformers'."""
    options = options or NativeOptions()
    backend = NativeBackend(model, block_size, options, progress)
    self_check(backend, model, options.precision)
    return backend


def self_check(backend: NativeBackend, model: PreTrainedModel, precision: str) -> None:
    """Two texts that the backend writes itself, token by token, are read again in chunks, which
    must give the same bits, and by one pass of transformers. Raises `ModelError` on a mismatch.
    Leaves no blocks allocated."""
    blocks = -(-_TEXT // backend.block_size)
    table = np.arange(2 * blocks, dtype=np.int32).reshape(2, blocks)[:, ::-1].copy()
    texts = np.array([[1], [backend.vocab_size // 2]]) % backend.vocab_size
    said = []
    backend.allocate(2 * blocks)
    for at in range(_TEXT):
        said.append(_run(backend, table, texts, (at, at), (1, 1)))
        texts = np.append(texts, said[-1].argmax(-1).numpy()[:, None], axis=1)
    ours = torch.stack(said, 1)
    backend.allocate(2 * blocks)
    cut = _TEXT - 9
    first = _run(backend, table, texts, (0, 0), (cut, _TEXT - 1))
    second = _run(backend, table, texts, (cut, _TEXT - 1), (_TEXT - cut, 1))
    again = torch.cat([first[:cut], second[:-1], first[cut:], second[-1:]])
    backend.allocate(0)
    if not torch.equal(again.nan_to_num(), ours.flatten(0, 1).nan_to_num()):
        raise ModelError(f"{backend.name}: the self-check found rows that depend on their company")
    with torch.inference_mode():
        ids = torch.from_numpy(texts[:, :_TEXT])
        truth: torch.Tensor = model(ids, use_cache=False).logits.float()
    _compare(backend.name, precision, ours, truth)


def _run(
    backend: NativeBackend,
    table: NDArray[np.int32],
    texts: NDArray[np.int64],
    done: tuple[int, int],
    counts: tuple[int, int],
) -> torch.Tensor:
    """Logits of `counts` tokens of each text behind the `done` ones."""
    rows = [np.arange(a, a + n, dtype=np.int32) for a, n in zip(done, counts, strict=True)]
    ids = [text[row] for text, row in zip(texts, rows, strict=True)]
    return backend.forward(
        RaggedBatch(
            token_ids=np.concatenate(ids).astype(np.int32),
            positions=np.concatenate(rows),
            query_start=np.cumsum([0, *counts], dtype=np.int32),
            context_len=np.array(done, np.int32),
            block_table=table,
            logit_rows=np.arange(sum(counts), dtype=np.int32),
            feature_rows=np.empty(0, np.int32),
        )
    ).logits.clone()


def _compare(name: str, precision: str, ours: torch.Tensor, truth: torch.Tensor) -> None:
    if not torch.equal(ours.isfinite(), truth.isfinite()):
        raise ModelError(
            f"{name}: the self-check found other numbers finite than transformers does"
        )
    seen = truth.isfinite().all(-1)
    if not seen.any():
        raise ModelError(f"{name}: the model's own logits are not finite")
    ours, truth = ours[seen], truth[seen]
    if precision == "int8":
        spread = truth - truth.mean(-1, keepdim=True)
        error = ((ours - truth).square().mean() / spread.square().mean()).sqrt().item()
        limit = INT8_LIMIT
    else:
        error = ((ours - truth).abs().max() / truth.abs().max()).item()
        limit = FLOAT32_LIMIT
    if not error <= limit:
        raise ModelError(
            f"{name}: the self-check differs from transformers by {error:.2g} (limit {limit:g}); "
            "it does not serve. Please report this with the output of lscpu"
        )
