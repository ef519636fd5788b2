"""Which verifier gets a saturated drafter: by what a draft token gains there.

Every verifier comes with a few *levels*: what it would have of drafting 1/8, 2/8 … of its requests
(tokens a second) and what that asks of drafters (draft tokens a second). Levels are bought in order
of gain a draft token along each verifier's concave envelope (water-filling). What verifiers can be
given together is a polymatroid (a flow through capacities), so with concave levels this is the
optimum; a level on the envelope that cannot be paid whole is the only loss: one step of one
envelope for each drafter that runs full.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.scheduler.joint.pipes import NOTHING, Pipes
from dspark.scheduler.joint.steps import FloatArray, IntArray

# Rounds in which what even parts leave of what is required is given, where it is too much for all.
_PARTS = 2


def envelope(cost: FloatArray, value: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Steps of the upper concave envelopes of V curves: (verifier, level reached, gain a token).

    cost, value: [V, L + 1], level 0 first, which costs 0. Sorted by gain, highest first, and by
    level inside a verifier; only steps that gain anything.
    """
    V = len(cost)
    row = np.arange(V)
    at = np.zeros(V, np.intp)
    found: list[tuple[IntArray, IntArray, FloatArray]] = []
    for _ in range(cost.shape[1] - 1):
        dear = cost - cost[row, at][:, None]
        more = value - value[row, at][:, None]
        slope = np.divide(more, dear, out=np.full_like(more, -np.inf), where=dear > NOTHING)
        # The steepest, the farthest of equals.
        best = slope.max(axis=1)
        to = cost.shape[1] - 1 - slope[:, ::-1].argmax(axis=1)
        going = best > 0
        if not going.any():
            break
        found.append((row[going], to[going], best[going]))
        at = np.where(going, to, at)
    if not found:
        return np.zeros(0, np.intp), np.zeros(0, np.intp), np.zeros(0)
    verifier, level, gain = (np.concatenate(parts) for parts in zip(*found, strict=True))
    # Found in order of level; a stable sort keeps that where gains are equal.
    order = np.argsort(-gain, kind="stable")
    return verifier[order], level[order], gain[order]


def share_out(
    cost: FloatArray, value: FloatArray, pipes: Pipes, required: FloatArray
) -> FloatArray:
    """[V] draft tokens a second for each verifier, by its levels [V, L + 1] as in `envelope`; the
    pipes, of which nothing was given yet, say from whom.

    required: [V] draft tokens a second that come first whatever they gain (floors, probes), scaled
    down together where they are too many. A step of an envelope that can be paid in part is paid up
    to the best level within reach, else not at all.
    """
    bought = 0
    if pipes.fits(required):
        tokens = required
        dear, worth = _beyond(cost, value, tokens)
        verifier, level, _ = envelope(dear, worth)
        bought = _that_fit(pipes, tokens, verifier, level, dear)
        paid = _bought(verifier[:bought], level[:bought], dear)
        pipes.begin(tokens + paid)
    else:
        tokens = _required(pipes, required)
        dear, worth = _beyond(cost, value, tokens)
        verifier, level, _ = envelope(dear, worth)
        paid = np.zeros(len(cost))
    prices, worths, extra = dear.tolist(), worth.tolist(), paid.tolist()
    closed: set[int] = set()
    for v, to in zip(verifier[bought:].tolist(), level[bought:].tolist(), strict=True):
        if pipes.dry:
            break
        if v in closed:
            continue
        price = prices[v][to] - extra[v]
        got = pipes.give(v, price)
        extra[v] += got
        if got < price - NOTHING:
            closed.add(v)
            useful = _useful(prices[v], worths[v], extra[v]) if got > 0.0 else extra[v]
            pipes.take_back(v, extra[v] - useful)
            extra[v] = useful
    total: FloatArray = tokens + np.array(extra)
    return total


def _beyond(
    cost: FloatArray, value: FloatArray, tokens: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The levels where so much is paid already: those within it cost nothing, dearer ones the
    rest."""
    dear = np.maximum(cost - tokens[:, None], 0.0)
    had = np.where(dear > 0, -np.inf, value).max(axis=1, keepdims=True)
    return dear, np.where(dear > 0, value, had)


def _bought(verifier: IntArray, level: IntArray, dear: FloatArray) -> FloatArray:
    """[V] what these steps cost together: the last of each verifier says it."""
    paid = np.zeros(len(dear))
    np.maximum.at(paid, verifier, dear[verifier, level])
    return paid


def _that_fit(
    pipes: Pipes, tokens: FloatArray, verifier: IntArray, level: IntArray, dear: FloatArray
) -> int:
    """How many of the first steps can be bought with no drafter running full."""
    low, high = 0, len(verifier)
    while low < high:
        middle = (low + high + 1) // 2
        if pipes.fits(tokens + _bought(verifier[:middle], level[:middle], dear)):
            low = middle
        else:
            high = middle - 1
    return low


def _useful(cost: Sequence[float], value: Sequence[float], tokens: float) -> float:
    """Of `tokens` that end between two levels, what is worth keeping: all, where a line between
    these levels is above the best level within reach; else what that level costs."""
    last = max(level for level, price in enumerate(cost) if price <= tokens + NOTHING)
    best = max(
        (level for level in range(last + 1) if cost[level] <= tokens + NOTHING),
        key=lambda level: (value[level], -level),
    )
    if last + 1 < len(cost) and cost[last + 1] > tokens:
        slope = (value[last + 1] - value[last]) / (cost[last + 1] - cost[last])
        if value[last] + slope * (tokens - cost[last]) > value[best] + NOTHING:
            return tokens
    return min(cost[best], tokens)


def _required(pipes: Pipes, required: FloatArray) -> FloatArray:
    """[V] of `required` that can be given: all, by detours, else about the same part of each."""
    tokens = pipes.begin_evenly(required)
    missing = required - tokens
    short = np.flatnonzero(missing > NOTHING).tolist()
    for _ in range(_PARTS):
        for v in short:
            if pipes.dry:
                return tokens
            tokens[v] += pipes.give(v, float(missing[v]) / _PARTS)
    return tokens
