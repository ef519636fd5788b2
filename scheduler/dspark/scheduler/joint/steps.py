"""Mean steps of many verifiers at once: Θ_v(K), and the K where it is highest (§5.2). Pure arrays.

Rows are verifiers, V of them. Drafts are given as a supply: `count` [V, N] draft tokens of a step,
each surviving with `gain` [N] or [V, N], falling along the row (a histogram read from its top).

Between two *knots* (a bin's last token, a grid point of T) both τ(K) and T(K) are straight lines,
and a ratio of lines is monotone. So the best whole K stands beside a knot: looking there is a full
search, whatever the stairs of T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.scheduler.step_cost import StepCost

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

_FAR = 2.0**40  # where a table's last slope ends, as StepCost has it


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Step costs side by side. tokens, seconds: [V, G] grids, each row continued along its last
    slope to the width of the longest. slopes: [V, 3] per sequence, context token and verified
    sequence."""

    costs: tuple[StepCost, ...]
    tokens: FloatArray
    seconds: FloatArray
    slopes: FloatArray

    @classmethod
    def of(cls, costs: Sequence[StepCost], before: Tables | None = None) -> Tables:
        """before: returned as it is if it is made of the very same costs."""
        if (
            before is not None
            and len(costs) == len(before.costs)
            and all(a is b for a, b in zip(costs, before.costs, strict=True))
        ):
            return before
        V, G = len(costs), max((len(cost.tokens) for cost in costs), default=0) + 1
        tokens, seconds, slopes = np.empty((V, G)), np.empty((V, G)), np.empty((V, 3))
        for v, cost in enumerate(costs):
            n = len(cost.tokens)
            tokens[v, :n], seconds[v, :n] = cost.tokens, cost.table_s
            slope = (
                (seconds[v, n - 1] - seconds[v, n - 2]) / (tokens[v, n - 1] - tokens[v, n - 2])
                if n > 1
                else 0.0
            )
            tokens[v, n:] = _FAR * np.arange(1, G - n + 1)
            seconds[v, n:] = seconds[v, n - 1] + slope * (tokens[v, n:] - tokens[v, n - 1])
            slopes[v] = (
                cost.per_sequence_s,
                cost.per_context_token_s,
                cost.per_verified_sequence_s,
            )
        return cls(tuple(costs), tokens, seconds, slopes)

    def at(self, B: FloatArray) -> FloatArray:
        """[V] table seconds of B [V] tokens: `StepCost.seconds` without what stands beside it."""
        row = np.arange(len(B))
        i = np.clip((self.tokens <= B[:, None]).sum(1) - 1, 0, self.tokens.shape[1] - 2)
        x0, x1 = self.tokens[row, i], self.tokens[row, i + 1]
        y0, y1 = self.seconds[row, i], self.seconds[row, i + 1]
        line: FloatArray = y0 + (y1 - y0) / (x1 - x0) * np.maximum(B - x0, 0.0)
        return line


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """T of a mean step by its draft tokens K in [0, most]. knots, knot_s: [V, G] K where the table
    bends, from 0 to most, and seconds there. verifying_s: [V] more as soon as K > 0. prefill_s: [V]
    what of it is prefill, which is no price of a token (`StepCost.decode_seconds`)."""

    knots: FloatArray
    knot_s: FloatArray
    verifying_s: FloatArray
    prefill_s: FloatArray

    @property
    def plain_s(self) -> FloatArray:
        """[V] T(P, R, P + R, context): a step without drafts."""
        plain: FloatArray = self.knot_s[:, 0]
        return plain

    @property
    def plain_decode_s(self) -> FloatArray:
        """[V] T(0, R, R, context)."""
        return self.plain_s - self.prefill_s

    def seconds(self, K: FloatArray) -> FloatArray:
        """T of K [V, Q]."""
        return along_rows(self.knots, self.knot_s, K) + self.verifying_s[:, None] * (K > 0)

    def rows(self, at: IntArray) -> Steps:
        return Steps(self.knots[at], self.knot_s[at], self.verifying_s[at], self.prefill_s[at])


def mean_steps(
    tables: Tables, P: FloatArray, R: FloatArray, context: FloatArray, most: FloatArray
) -> Steps:
    """Of [V] mean prefill tokens, decoding requests and context of a step, most ≥ 0 whole."""
    base = P + R
    sequence, context_token, verified = tables.slopes.T
    beside = sequence * R + context_token * context
    inner = tables.tokens - base[:, None]
    low, high = tables.at(base)[:, None], tables.at(base + most)[:, None]
    knot_s = np.where(inner <= 0, low, np.where(inner >= most[:, None], high, tables.seconds))
    knots = np.concatenate((np.zeros((len(R), 1)), np.clip(inner, 0.0, most[:, None])), axis=1)
    knot_s = np.concatenate((low, knot_s), axis=1) + beside[:, None]
    prefill_s = low[:, 0] - tables.at(R)
    return Steps(knots, knot_s, verified * np.maximum(R - 1, 0.0), prefill_s)


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """[V] each: the capacity K (whole), Θ there in tokens a second of decoding, and T."""

    K: FloatArray
    theta: FloatArray
    seconds: FloatArray


def best_capacity(
    steps: Steps, count: FloatArray, gain: FloatArray, tau0: FloatArray, overhead: FloatArray
) -> Best:
    """argmax over whole K in [0, ⌈Σ count⌉] of (τ₀ + Σ of the K highest gains) / (T(K) + overhead)
    with T less its prefill, the fewest tokens of equals.

    tau0, overhead: [V] tokens that come without drafts, seconds that a round takes beside its step.
    """
    x, y = _supply(count, gain)
    total = x[:, -1:]
    whole = np.ceil(total - 1e-6)
    beside = np.concatenate((x, np.minimum(steps.knots, whole)), axis=1)
    K = np.concatenate((np.minimum(1.0, whole), np.floor(beside), np.ceil(beside)), axis=1)
    K = np.minimum(K, np.minimum(whole, steps.knots[:, -1:]))
    tau = tau0[:, None] + along_rows(x, y, np.minimum(K, total))
    theta = tau / (steps.seconds(K) - steps.prefill_s[:, None] + overhead[:, None])
    best = theta.max(axis=1)
    K_best = np.where(theta == best[:, None], K, np.inf).min(axis=1)
    return Best(K_best, best, steps.seconds(K_best[:, None])[:, 0])


def level_curves(
    steps: Steps,
    count: FloatArray,
    gain: FloatArray,
    tau0: FloatArray,
    exposed: FloatArray,
    levels: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Θ and T [V, L] where only a fraction f of the requests is drafted, f in `levels` [L] > 0.

    `best_capacity` with counts f · count and overhead f · exposed, K real instead of whole: what a
    draft budget is worth, for sharing it out.
    """
    x, y = _supply(count, gain)
    f = levels[None, :, None]
    K_bins = np.minimum(x[:, None, :] * f, steps.knots[:, -1:, None])
    V, L, N = K_bins.shape
    T_bins = steps.seconds(K_bins.reshape(V, L * N)).reshape(V, L, N)
    tau_bins = tau0[:, None, None] + f * y[:, None, :]
    # At the knots of T the seconds are known, and the supply is looked up.
    K_knots = steps.knots[:, None, :] / f
    inside = K_knots <= x[:, -1:, None]
    looked_up = np.minimum(K_knots, x[:, -1:, None]).reshape(V, -1)
    tau_knots = tau0[:, None, None] + f * along_rows(x, y, looked_up).reshape(K_knots.shape)
    verifying = steps.verifying_s[:, None] * (steps.knots > 0)
    T_knots = np.broadcast_to((steps.knot_s + verifying)[:, None, :], K_knots.shape)
    tau = np.concatenate((tau_bins, np.where(inside, tau_knots, 0.0)), axis=2)
    T = np.concatenate((T_bins, T_knots), axis=2)
    decode = T - steps.prefill_s[:, None, None]
    theta = tau / (decode + exposed[:, None, None] * f)
    best = theta.argmax(axis=2)[:, :, None]
    return (
        np.take_along_axis(theta, best, axis=2)[:, :, 0],
        np.take_along_axis(T, best, axis=2)[:, :, 0],
    )


def admitted(count: FloatArray, K: FloatArray) -> FloatArray:
    """[V, N] share of each bin that is among the K [V] highest."""
    before = np.cumsum(count, axis=1) - count
    room = np.clip(K[:, None] - before, 0.0, count)
    return np.divide(room, count, out=np.zeros_like(room), where=count > 0)


def along_rows(x: FloatArray, y: FloatArray, q: FloatArray) -> FloatArray:
    """`np.interp` of each row of q [V, Q] in its own row of (x, y) [V, G]; x non-decreasing from 0,
    q inside. One call: rows are laid end to end at whole distances, so whole q stay exact."""
    start = np.concatenate(([0.0], np.cumsum(np.ceil(x[:-1, -1]) + 1.0)))[:, None]
    flat = np.interp((q + start).ravel(), (x + start).ravel(), y.ravel())
    return flat.reshape(q.shape)


def summed(at: IntArray, values: FloatArray, n: int) -> FloatArray:
    """[n] Σ of values by index `at`."""
    total: FloatArray = np.bincount(at, values, n).astype(np.float64)
    return total


def _supply(count: FloatArray, gain: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[V, N + 1] tokens and Σ gain after each bin, from 0."""
    zero = np.zeros((len(count), 1))
    tokens = np.concatenate((zero, np.cumsum(count, axis=1)), axis=1)
    return tokens, np.concatenate((zero, np.cumsum(count * gain, axis=1)), axis=1)
