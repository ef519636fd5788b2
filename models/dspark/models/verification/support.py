"""Drawing tokens: from a drafter's truncated support, and from a whole distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import MAX_SUPPORT

Weights = NDArray[np.float32]
Probabilities = NDArray[np.float64]

_BLOCK = 256


def normalized_weights(weights: Weights) -> Probabilities:
    """q of L2: float64 [M] from the float32 [M] weights that travel, summed in their order.

    Drafter and verifier both call this, on the same numbers, so q is exactly what was drawn from.
    """
    q: Probabilities = weights / np.cumsum(weights, dtype=np.float64)[-1]
    return q


def sample_from_support(weights: Weights, rng: np.random.Generator) -> int:
    """Index into a support of float32 [M] weights, drawn as `normalized_weights` says.

    A drafter rounds its weights to float32 first, then draws: what it ships is what it used.
    """
    return _pick(np.cumsum(weights, dtype=np.float64), rng.random())


def draw(weights: Probabilities, rng: np.random.Generator) -> int:
    """Index of float64 [V] weights, drawn in proportion. They need not sum to 1.

    In two levels, since a running sum over the vocabulary costs more than all the rest.
    """
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
    start = _BLOCK * _pick(np.cumsum(blocks), rng.random())
    return start + _pick(np.cumsum(weights[start : start + _BLOCK]), rng.random())


def check_support(
    ids: NDArray[np.int32], weights: Weights, draft_ids: Sequence[int], vocab_size: int
) -> bool:
    """Whether a drafter's [γ, M] support can be believed in form (L5): M at most 128, unique ids
    in [0, V), weights finite, not negative, of positive sum, and each x_k in it with weight > 0.
    """
    gamma = len(draft_ids)
    if ids.ndim != 2 or ids.shape != weights.shape or ids.shape[0] != gamma:
        return False
    if not 0 < ids.shape[1] <= MAX_SUPPORT:
        return gamma == 0
    ordered = np.sort(ids, axis=1)
    if ordered.size and not (ordered[:, 0].min() >= 0 and ordered[:, -1].max() < vocab_size):
        return False
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return False
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        return False
    drawn = ids == np.asarray(draft_ids, np.int64)[:, None]
    return bool((drawn & (weights > 0)).any(axis=1).all())


def _pick(running: Probabilities, u: float) -> int:
    """First index whose running sum is above u of the total; never one without weight.

    There is one: u is at most 1 - 2^-53, and that much of any normal total rounds to less than it.
    """
    return int(np.searchsorted(running, u * running[-1], side="right"))
