"""Drawing tokens: from a drafter's truncated support, and from a whole distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import MAX_SUPPORT
from dspark.models.verification.scratch import Scratch

Weights = NDArray[np.float32]
Probabilities = NDArray[np.float64]
IdArray = NDArray[np.int64]

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


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """p of L2 at one position, without the zeros of truncation: p(ids[i]) = scale * weights[i].

    weights: float64 [n], not negative. ids: int64 [n], ascending; None: id i is entry i. scale:
    None for what makes them sum to 1, which is worked out only where p itself is asked for.
    """

    weights: Probabilities
    ids: IdArray | None = None
    scale: float | None = None

    @classmethod
    def of(cls, p: Distribution | Probabilities) -> Distribution:
        """A vector float64 [V] as it is, or what is a distribution already."""
        return p if isinstance(p, Distribution) else cls(p, scale=1.0)

    def normalized(self) -> Distribution:
        """The same with its scale worked out."""
        return Distribution(self.weights, self.ids, self._scale())

    def values(self, entries: IdArray | slice) -> Probabilities:
        """p of the ids at some entries."""
        p: Probabilities = self.weights[entries] * self._scale()
        return p

    def at(self, token: int) -> float:
        """p(token)."""
        entry = token if self.ids is None else int(np.searchsorted(self.ids, token))
        if self.ids is not None and (entry == len(self.ids) or self.ids[entry] != token):
            return 0.0
        return float(self.weights[entry]) * self._scale()

    def draw(self, rng: np.random.Generator) -> int:
        """A token of p."""
        entry = draw(self.weights, rng)
        return entry if self.ids is None else int(self.ids[entry])

    def draw_residual(
        self, ids: NDArray[np.int32] | IdArray, q: Probabilities, rng: np.random.Generator
    ) -> int | None:
        """A token of max(0, p - q), q being [M] at `ids` and 0 elsewhere; None if nothing is left.

        The weights are changed for the draw and put back: a copy would be the vocabulary's size.
        """
        entries, there = self._entries(ids)
        held = self.weights[entries]
        try:
            left = np.maximum(self.values(entries) - q[there], 0.0)
            self.weights[entries] = left / self._scale()
            return self.draw(rng) if self.weights.any() else None
        finally:
            self.weights[entries] = held

    def spread(self, scratch: Scratch) -> Distribution:
        """The same with an entry for each id up to the last, in the scratch's row of weights."""
        if self.ids is None:
            return self
        weights = scratch.weights(int(self.ids[-1]) + 1)
        weights[:] = 0.0
        weights[self.ids] = self.weights
        return Distribution(weights, None, self._scale())

    def dense(self, vocab_size: int) -> Probabilities:
        """p as a vector float64 [V]."""
        p = np.zeros(vocab_size)
        p[slice(None) if self.ids is None else self.ids] = self.values(slice(None))
        return p

    def _scale(self) -> float:
        return float(1.0 / self.weights.sum()) if self.scale is None else self.scale

    def _entries(self, ids: NDArray[np.int32] | IdArray) -> tuple[IdArray, NDArray[np.bool_]]:
        """Where `ids` are among the weights, and which of them are there at all."""
        if self.ids is None:
            return ids.astype(np.int64), np.ones(len(ids), np.bool_)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        found = self.ids[at] == ids
        return at[found], found


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
