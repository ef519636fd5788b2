"""The three acceptance rules as pure functions (design.md §4, L1 to L3).

A position's row depends on the draft tokens before it and is not needed after a rejection, so
rows come from a function of k: row(k) is the distribution of x_{k+1} given x_1..x_k, k = 0..ℓ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.core.noise import gumbel
from dspark.core.verdicts import Verdict
from dspark.models.verification.support import Probabilities, Weights, draw, normalized_weights

Row = Callable[[int], Probabilities]


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
    row: Row, draft_ids: Sequence[int], seed: int, choice: int, output_position: int
) -> Verdict:
    """L3: x_k stands iff it equals the target's sample under the shared Gumbel noise.

    output_position: generated tokens before x_1, so position of x_1.
    """
    return verify_own(lambda k: coupled_token(row(k), seed, choice, output_position + k), draft_ids)


def coupled_token(p: Probabilities, seed: int, choice: int, position: int) -> int:
    """argmax_v (log p(v) + g(v)) with g of core/noise.py: a sample of p that noise alone decides.

    p: float64 [V], not negative; need not sum to 1.
    """
    ids = np.flatnonzero(p > 0)
    if 4 * len(ids) < len(p):
        scores = np.log(p[ids]) + gumbel(seed, choice, position, ids, len(p))
        return int(ids[scores.argmax()])
    with np.errstate(divide="ignore"):
        scores = np.log(p)
    scores += gumbel(seed, choice, position, None, len(p))
    return int(scores.argmax())


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
        p = row(k)
        if support_ids is None or support_weights is None:
            ids, q, q_x = np.array([x]), np.ones(1), 1.0
        else:
            ids, q = support_ids[k], normalized_weights(support_weights[k])
            q_x = float(q[ids == x].sum())
        if rng.random() * q_x < p[x]:
            continue
        residual = p.copy()
        residual[ids] = np.maximum(p[ids] - q, 0.0)
        empty = not residual.any()
        token = draw(p if empty else residual, rng)
        return Verdict((*draft_ids[:k], token), fallbacks=int(empty))
    return Verdict((*draft_ids, draw(row(len(draft_ids)), rng)))
