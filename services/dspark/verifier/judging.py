"""Verdicts of one step: each sequence's rows of logits against its draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.core.errors import DsparkError, ModelError
from dspark.core.verdicts import Verdict
from dspark.models.verification import Scratch, judge, verify_own
from dspark.verifier.batcher import Item

# A verdict, None for a prefill chunk that does not reach its end, or what went wrong.
Outcome = Verdict | DsparkError | None

_NO_TOKEN = ModelError("the target gave no token to choose: its largest logit is not finite")


def judge_step(
    items: Seq[Item],
    lengths: Seq[int],
    logits: torch.Tensor,
    argmax: NDArray[np.int64],
    scratch: Scratch | None = None,
) -> list[Outcome]:
    """One outcome an item. logits: float32 [L, V] in the order of `flatten`; argmax: int64 [L].
    scratch: kept from step to step; None makes one for this step."""
    outcomes: list[Outcome] = []
    scratch = scratch or Scratch()
    largest = logits.gather(1, torch.from_numpy(argmax)[:, None].to(logits.device)).cpu()
    sound = np.isfinite(largest.numpy()[:, 0]).tolist()
    own = argmax.tolist()
    row = 0
    for item, length in zip(items, lengths, strict=True):
        if not item.reaches_end:
            outcomes.append(None)
            continue
        rows = slice(row, row + 1 + length)
        draft = item.sequence.draft
        draft_ids = () if draft is None else draft.draft.ids[:length]
        if item.sequence.state.request.sampling.plain:
            verdict = verify_own(own[rows].__getitem__, draft_ids)
            judged = sound[row : row + len(verdict.ids)]
            outcomes.append(verdict if all(judged) else _NO_TOKEN)
        else:
            outcomes.append(_judge_one(item, logits[rows], draft_ids, scratch))
        row = rows.stop
    return outcomes


def _judge_one(
    item: Item, logits: torch.Tensor, draft_ids: tuple[int, ...], scratch: Scratch
) -> Outcome:
    sequence, state = item.sequence, item.sequence.state
    draft = None if sequence.draft is None else sequence.draft.draft
    try:
        return judge(
            logits,
            state.request.sampling,
            draft_ids,
            output_position=state.outputs,
            rng=sequence.rng,
            choice=state.request.choice,
            stop_ids=state.stop_ids,
            counts=sequence.counts,
            support_ids=None if draft is None else draft.support_ids,
            support_weights=None if draft is None else draft.support_weights,
            scratch=scratch,
        )
    except DsparkError as error:  # a row without a finite logit costs its own request only
        return error
