"""`eagle3` and `mtp`: token by token. x_1 comes out of the context itself, each further token out
of one more pass of the layer over the drafter's own last state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dspark.models.drafters.autoregressive import AutoregressiveDrafter
from dspark.models.drafters.choosing import Chooser, FloatArray, IdArray
from dspark.models.drafters.ring_attention import RingAttention
from dspark.models.drafters.sessions import Ready, Sessions


def draft_steps(
    model: AutoregressiveDrafter,
    sessions: Sessions,
    batch: Sequence[Ready],
    chooser: Chooser,
    steps: int,
) -> tuple[IdArray, FloatArray]:
    """Ids and confidence logits, each [R, steps], of requests whose context is injected.

    The last pair of context (feature of the position before the anchor, the anchor) is in its ring
    already and is looked at again as a query.
    """
    device = model.norm.weight.device
    features = np.stack([_last_feature(ready) for ready in batch])
    state = torch.from_numpy(features).to(device)
    tokens = torch.tensor([ready.request.tokens[-1] for ready in batch], device=device)
    positions = torch.tensor([r.request.anchor_position - 1 for r in batch], device=device)
    attend = RingAttention(
        [ready.ring for ready in batch],
        [sessions.held(ready.session) for ready in batch],
        1,
        writes=False,
    )
    vocabulary = model.vocabulary
    ids = np.empty((len(batch), steps), np.int64)
    for k in range(steps):
        state = model.step(state, tokens, positions, attend)
        if attend.writes:
            attend.written += 1
        attend.writes = True
        logits = model.step_logits(state).cpu().numpy()
        ids[:, k] = vocabulary.ids[chooser.choose(logits, vocabulary.ids)]
        tokens = torch.from_numpy(ids[:, k]).to(device)
        positions = positions + 1
    return ids, chooser.top_logits


def _last_feature(ready: Ready) -> FloatArray:
    """[d], of the position before the anchor: `Sessions` asks for it with every draft."""
    features = ready.request.features
    assert features is not None
    row: FloatArray = features[-1]
    return row
