"""The three acceptance rules as pure functions (design.md §4, L1 to L3).

A position's row depends on the draft tokens before it and is not needed after a rejection, so
rows come from a function of k: row(k) is the distribution of x_{k+1} given x_1..x_k, k = 0..ℓ, as
a `Distribution` or as a vector of V probabilities. A row is done with before the next is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.core.noise import gumbel, gumbel_of_gaps, noise_gaps
from dspark.core.verdicts import Verdict
from dspark.models.verification.scratch import Scratch
from dspark.models.verification.support import (
    Distribution,
    IdArray,
    Probabilities,
    Weights,
    normalized_weights,
)

Row = Callable[[int], Distribution | Probabilities]


def verify_own(own: Callable[[int], int], draft_ids: Sequence[int]) -> Verdict:
    """x_k stands iff it equals the target's own token there, so the text is the target's alone.

    own(k): the target's token after x_1..x_k, asked for k = 0, 1, .. up to the first that differs.
    """
    for k, x in enumerate(draft_ids):
        token = own(k)
        if token != x:
            return Verdict((*draft_ids[:k], token))
    return Verdict((*draft_ids, own(len(draft_ids))))


def verify_greedy(argmax_ids: NDArray[np.int64], draft_ids: Sequence[int]) -> Verdict:
    """L1: x_k stands iff it is the argmax of its row. argmax_ids: [ℓ+1], row 0 the anchor's."""
    return verify_own(argmax_ids.tolist().__getitem__, draft_ids)


def verify_coupled(
    row: Row,
    draft_ids: Sequence[int],
    seed: int,
    choice: int,
    output_position: int,
    scratch: Scratch | None = None,
) -> Verdict:
    """L3: x_k stands iff it equals the target's sample under the shared Gumbel noise.

    output_position: generated tokens before x_1, so position of x_1.
    """
    return verify_own(
        lambda k: coupled_token(row(k), seed, choice, output_position + k, scratch), draft_ids
    )


def coupled_token(
    p: Distribution | Probabilities,
    seed: int,
    choice: int,
    position: int,
    scratch: Scratch | None = None,
) -> int:
    """argmax_v (log p(v) + g(v)) with g of core/noise.py: a sample of p that noise alone decides.

    p: not negative; a vector need not sum to 1.
    """
    p = Distribution.of(p)
    if p.ids is not None and 4 * len(p.ids) < p.ids[-1]:
        # A block of noise serves four neighbouring ids: for few of them it is made one by one.
        entries, noise = (
            np.arange(len(p.ids)),
            gumbel(seed, choice, position, p.ids, int(p.ids[-1]) + 1),
        )
    else:
        scratch = scratch or Scratch()
        p = p.spread(scratch)
        gaps = noise_gaps(seed, choice, position, len(p.weights), scratch.noise)
        entries, noise = _contenders(p.weights, gaps, scratch)
    best = 0
    if len(entries) > 1:
        with np.errstate(divide="ignore"):
            best = int((np.log(p.values(entries)) + noise).argmax())
    return int(entries[best] if p.ids is None else p.ids[best])


def _contenders(
    weights: Probabilities, gaps: Iterable[tuple[int, Probabilities]], scratch: Scratch
) -> tuple[IdArray, Probabilities]:
    """The few ids that can win, ascending, and their noise. gaps: of `noise_gaps`.

    log p + g is largest where -log(u) / p is smallest, and 1 - u <= -log(u): an id whose
    (1 - u) / p is above -log(u) / p of another has lost, without a logarithm. The least bound is
    nearly always the winner's own. 1e-9 covers the rounding of quotients and of scores.
    """
    ids, kept = [], []
    least = np.inf
    for start, gap in gaps:
        part = weights[start : start + gap.size]
        if len(part) < gap.size:  # the last block is not whole
            part = np.pad(part, (0, gap.size - len(part)))
        bounds = scratch.bounds(gap.size)
        with np.errstate(divide="ignore", over="ignore"):
            np.divide(gap, part.reshape(-1, 4).T, out=bounds.reshape(gap.shape))
        best = int(bounds.argmin())
        if bounds[best] == np.inf:
            continue
        exact = -np.log1p(-(2.0**-32) * gap.flat[best])
        least = min(least, bounds[best] * (2.0**32 * exact / gap.flat[best]))
        inside = np.flatnonzero(bounds <= least * (1.0 + 1e-9))
        word, block = np.divmod(inside, gap.shape[1])
        ids.append(start + 4 * block + word)
        kept.append(gap.reshape(-1)[inside])
    every = np.concatenate(ids)
    order = every.argsort()
    return every[order], gumbel_of_gaps(np.concatenate(kept)[order])


def verify_rejection(
    row: Row,
    draft_ids: Sequence[int],
    support_ids: NDArray[np.int32] | None,
    support_weights: Weights | None,
    rng: np.random.Generator,
) -> Verdict:
    """L2 (paper §2): accept x_k with min(1, p/q); at the first rejection draw from the residual
    max(0, p - q), or from p, counted, if that has no mass; if all stand draw from p.

    support_ids, support_weights: [≥ ℓ, M], what x_k was drawn from; None is a point mass on x_k.
    ℓ may be less than was drafted: what follows a trimmed block is drawn from p like any bonus.
    """
    for k, x in enumerate(draft_ids):
        p = Distribution.of(row(k)).normalized()
        if support_ids is None or support_weights is None:
            ids, q, q_x = np.array([x]), np.ones(1), 1.0
        else:
            ids, q = support_ids[k], normalized_weights(support_weights[k])
            q_x = float(q[ids == x].sum())
        if rng.random() * q_x < p.at(x):
            continue
        token = p.draw_residual(ids, q, rng)
        empty = token is None
        return Verdict((*draft_ids[:k], p.draw(rng) if token is None else token), (), int(empty))
    return Verdict((*draft_ids, Distribution.of(row(len(draft_ids))).draw(rng)))
