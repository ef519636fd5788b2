"""Context comes in: features become keys and values (§2, eq. 3), kept in a session's ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dspark.models.drafters.autoregressive import AutoregressiveDrafter
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.sessions import Ready, Sessions
from dspark.models.drafters.trunk import Trunk

# Rows projected at a time, so that many long prompts at once do not double their memory.
ROWS = 4096


def inject_context(model: Trunk, sessions: Sessions, batch: Sequence[Ready]) -> None:
    """Project the new positions of a batch and keep what comes of them. This is the only work that
    grows with the context, and it is done once a position."""
    for group in groups(batch):
        counts = [ready.session.end - ready.first for ready in group]
        layers = _project(model, group)
        parts = [
            list(zip(torch.split(key, counts), torch.split(value, counts), strict=True))
            for key, value in layers
        ]
        for which, ready in enumerate(group):
            sessions.inject(ready, [part[which] for part in parts])


def _project(model: Trunk, group: Sequence[Ready]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    device = model.norm.weight.device
    features, positions = [], []
    following: list[int] = []
    for ready in group:
        request, skipped = ready.request, ready.first - ready.request.start
        assert request.features is not None
        features.append(request.features[skipped:])
        positions.append(np.arange(ready.first, ready.session.end))
        following.extend(request.tokens[skipped + 1 :])
    rows = torch.from_numpy(np.concatenate(features)).to(device)
    at = torch.from_numpy(np.concatenate(positions)).to(device)
    if isinstance(model, ParallelDrafter):
        return model.context_keys_values(rows, at)
    assert isinstance(model, AutoregressiveDrafter)
    return model.context_keys_values(rows, at, torch.tensor(following, device=device))


def groups(batch: Sequence[Ready]) -> Iterator[list[Ready]]:
    """Requests with new positions, as they are projected together: at most ROWS rows, or
    one request."""
    group: list[Ready] = []
    rows = 0
    for ready in batch:
        count = ready.session.end - ready.first
        if group and rows + count > ROWS:
            yield group
            group, rows = [], 0
        if count:
            group.append(ready)
            rows += count
    if group:
        yield group
