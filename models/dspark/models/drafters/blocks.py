"""`dspark` and `dflash` (§3.1): one pass for all blocks, then the sequential stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.choosing import Chooser, FloatArray, IdArray, largest_columns
from dspark.models.drafters.ring_attention import RingAttention
from dspark.models.drafters.sessions import Ready, Sessions


def draft_blocks(
    model: ParallelDrafter,
    sessions: Sessions,
    batch: Sequence[Ready],
    chooser: Chooser,
    steps: int,
    candidates: int,
) -> tuple[IdArray, FloatArray]:
    """Ids and raw confidence logits, each [R, steps], of requests whose context is injected.

    candidates: the sequential head is applied to so many of the largest base logits of each
    position, 0 = to all of them.
    """
    anchors = torch.tensor([ready.request.tokens[-1] for ready in batch])
    hidden = backbone_pass(model, sessions, batch, anchors)[:, :steps]
    logits = model.base_logits(hidden)
    return sequential_stage(model, hidden, logits, anchors, chooser, candidates)


def backbone_pass(
    model: ParallelDrafter, sessions: Sessions, batch: Sequence[Ready], anchors: torch.Tensor
) -> torch.Tensor:
    """h of all blocks: [R, γ, d]. A block is always whole: its positions see each other."""
    gamma = model.config.gamma
    starts = torch.tensor([ready.request.anchor_position for ready in batch])
    positions = starts[:, None] + torch.arange(gamma)
    attend = RingAttention(
        [ready.ring for ready in batch],
        [sessions.held(ready.session) for ready in batch],
        gamma,
    )
    ids = model.block_ids(anchors)
    hidden = model.block_hidden(ids.flatten(), positions.flatten(), attend)
    return hidden.view(len(batch), gamma, -1)


def sequential_stage(
    model: ParallelDrafter,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    anchors: torch.Tensor,
    chooser: Chooser,
    candidates: int,
) -> tuple[IdArray, FloatArray]:
    """Eq. 4: hidden [R, s, d], base logits [R, s, Vd], anchors [R] -> ids and confidence logits
    [R, s]. O(s·M·r) a request for M candidates instead of O(s·Vd·r)."""
    R, steps, size = logits.shape
    vocabulary, head = model.vocabulary, model.markov_head
    columns: IdArray | None = None
    if 0 < candidates < size:
        flat = logits.view(R * steps, size)
        picked = largest_columns(flat.numpy(), candidates)
        logits = flat.gather(1, torch.from_numpy(picked)).view(R, steps, candidates)
        columns = picked.reshape(R, steps, candidates)
    if head is not None:
        weight = head.markov_w2.weight
        if columns is not None:
            after = functional.embedding(torch.from_numpy(columns), weight).numpy()  # [R, s, M, r]
        prepared, state = head.prepare(hidden), head.start(hidden[:, 0])
        before = torch.from_numpy(vocabulary.index)[anchors]
    confident = model.confidence_head
    confidence = None if confident is None else confident.by_hidden(hidden)
    reads_previous = model.config.confidence_reads_prev
    ids = np.empty((R, steps), np.int64)
    rows = np.arange(R)
    for k in range(steps):
        now = logits[:, k].numpy()
        if head is not None:
            previous = head.previous(before)
            latent, state = head.latent(previous, prepared[:, k], state)
            if columns is None:
                now = torch.addmm(logits[:, k], latent, weight.T).numpy()
            else:
                now = now + np.matmul(after[:, k], latent.numpy()[..., None])[..., 0]
            if confidence is not None and confident is not None and reads_previous:
                confidence[:, k] += confident.by_previous(previous)
        these = None if columns is None else columns[:, k]
        chosen = chooser.choose(now, vocabulary.ids if these is None else vocabulary.ids[these])
        place = chosen if these is None else these[rows, chosen]
        ids[:, k] = vocabulary.ids[place]
        if head is not None:
            before = torch.from_numpy(place)
    return ids, chooser.top_logits if confidence is None else confidence.numpy()
