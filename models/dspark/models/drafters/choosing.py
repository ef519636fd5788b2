"""How each draft token is drawn, for a batch whose requests go by rules of their own (L1 to L3).

Greedy rows take the likeliest id. Rejection rows draw from a truncated support whose weights are
rounded to float32 first, so what is shipped is what was drawn from (L2). Coupled rows take the
likeliest id under the noise that they share with the target (L3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import DraftRequest
from dspark.core.noise import gumbel_at
from dspark.core.sampling import SamplingMode

FloatArray = NDArray[np.float32]
IdArray = NDArray[np.int64]

# A confidence from max q is a logit of at most this, or q = 1 would be an infinite one.
MAX_LOGIT = 30.0


class Chooser:
    """Draws position after position for R requests. rng: of rejection rows.

    sampled: bool [R], the rows that are not greedy. tops: keep `top_logits`, [R, steps], the logit
    of max_v q_k(v) at each position drawn so far; it is known before x_k is.
    """

    def __init__(
        self, requests: Sequence[DraftRequest], rng: np.random.Generator, *, tops: bool = True
    ) -> None:
        modes = [request.sampling.mode for request in requests]
        sampled = [r for r in requests if r.sampling.mode is SamplingMode.REJECTION]
        noisy = [r for r in requests if r.sampling.mode is SamplingMode.COUPLED]
        self.sampled = np.array([mode is not SamplingMode.GREEDY for mode in modes])
        self._rng = rng
        self._rejection = np.flatnonzero([mode is SamplingMode.REJECTION for mode in modes])
        self._coupled = np.flatnonzero([mode is SamplingMode.COUPLED for mode in modes])
        self._temperatures = np.array(
            [
                1.0 if mode is SamplingMode.GREEDY else request.sampling.temperature
                for mode, request in zip(modes, requests, strict=True)
            ],
            np.float32,
        )[:, None]
        self._seeds = np.array([[r.sampling.seed % 2**64] for r in noisy], np.uint64)
        self._choices = np.array([[r.sampling.choice] for r in noisy], np.int64)
        self._positions = np.array([[r.output_position] for r in noisy], np.int64)
        self._widths = np.array([r.support_m for r in sampled], np.int64)
        self._tops: list[FloatArray] | None = [] if tops else None
        self._supports: list[tuple[IdArray, FloatArray]] = []

    def choose(self, logits: FloatArray, ids: IdArray) -> IdArray:
        """The next position: columns drawn, int64 [R].

        logits: [R, C] of its candidates, finite. ids: [R, C], or [C] if all rows have the same.
        """
        chosen: IdArray = logits.argmax(axis=1)
        if self._tops is None and not self.sampled.any():
            return chosen
        ids = np.broadcast_to(ids, logits.shape)
        top = np.take_along_axis(logits, chosen[:, None], axis=1)
        scaled = (logits - top) / self._temperatures
        weights = np.exp(scaled)
        if self._tops is not None:
            # The largest weighs 1, so the logit of max q is the log of 1 / Σ of all others.
            rest = np.maximum(weights.sum(axis=1) - 1.0, np.exp(np.float32(-MAX_LOGIT)))
            self._tops.append(-np.log(rest))
        if len(rows := self._rejection):
            chosen[rows] = self._draw(weights[rows], ids[rows])
        if len(rows := self._coupled):
            noise = gumbel_at(self._seeds, self._choices, self._positions, ids[rows])
            chosen[rows] = (scaled[rows] + noise).argmax(axis=1)
            self._positions += 1
        return chosen

    def _draw(self, weights: FloatArray, ids: IdArray) -> IdArray:
        """Columns drawn by `normalized_weights` of a support of the largest weights."""
        columns = largest_columns(weights, int(self._widths.max()))
        support = np.take_along_axis(weights, columns, axis=1)
        for row, width in enumerate(self._widths.tolist()):
            if width < support.shape[1]:
                least = np.argpartition(support[row], -width)[:-width]
                support[row, least] = 0.0
        # `sample_from_support` for all rows at once: the first whose running sum is above u.
        running = np.cumsum(support, axis=1, dtype=np.float64)
        reached = self._rng.random(len(running)) * running[:, -1]
        index = (running <= reached[:, None]).sum(axis=1)
        self._supports.append((np.take_along_axis(ids, columns, axis=1), support))
        drawn: IdArray = np.take_along_axis(columns, index[:, None], axis=1)[:, 0]
        return drawn

    @property
    def top_logits(self) -> FloatArray:
        assert self._tops is not None
        return np.stack(self._tops, axis=1)

    def support(self, row: int) -> tuple[NDArray[np.int32], FloatArray] | None:
        """ids and weights [steps, M] that a rejection row was drawn from; None for another."""
        at = int(np.searchsorted(self._rejection, row))
        if at == len(self._rejection) or self._rejection[at] != row:
            return None
        ids, weights = zip(*((i[at], w[at]) for i, w in self._supports), strict=True)
        return np.stack(ids).astype(np.int32), np.stack(weights)


def largest_columns(values: FloatArray, count: int) -> IdArray:
    """int64 [N, min(count, C)]: columns of the largest values of each row of [N, C], any order."""
    if count >= values.shape[1]:
        return np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return np.argpartition(values, -count, axis=1)[:, -count:]
