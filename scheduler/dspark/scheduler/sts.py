"""Sequential Temperature Scaling (STS, §3.2.1): temperature and offset of each position of a block.

A confidence head says σ(z_k). Scaled by the right temperature t_k > 0 and offset b_k the products
∏_{i<=k} σ(z_i / t_i + b_i) are the probabilities with which x_1..x_k stand. Order within a position
is kept. The paper has temperatures alone; the offset is for a mode in which the head is wrong on
one side, as one that learned from greedy texts is for sampled ones
(docs/decisions/2026-11-30-calibration-offset.md). Both fits below have an offset only where it is
worth it, and then the one at which as many tokens stand as are said to.

Pure: arrays in, arrays out; γ positions, N blocks, G temperatures of the grid. A scaling is float64
[2, γ]: temperatures, offsets.

Verdicts are *censored*: a trimmed token has none. Trimming decides on x_k from c_<=k and other
requests (design.md §4, L2), never from whether x_k would stand. So of all blocks with the same
c_<=k those that were verified at k are a fair sample, though blocks with high c_<=k are seen more
often than others. Both fits below therefore condition on what admission could see, and neither
counts a trimmed token as rejected nor guesses it:

- `fit_records` judges the product at k on blocks with at least k tokens verified, where both the
  prediction (a function of c_<=k) and the outcome are known;
- `fit_counts` judges c_k on tokens that were verified and had all before them accepted, each bin of
  raw confidence against its own rate, by likelihood: the censoring mechanism is a factor of the
  likelihood in which no scaling occurs, so it drops out. Where each σ(z_k / t_k + b_k) is right of
  tokens that are reached, so is the product, by the chain rule, as far as c_k tells of x_k all that
  c_<k would.

What trimming does change is how often each bin is seen, so where no scaling fits all bins, the
fit is best for those that are verified. Looking ahead (greedy and coupled requests) admits x_k by
c_j, j > k, also; that much of a selection by x_k stays in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.reports import CONFIDENCE_BINS, CONFIDENCE_LOGITS

FloatArray = NDArray[np.float64]
CountArray = NDArray[np.int64]
Scaling = FloatArray | tuple[FloatArray | float, FloatArray | float]

# 1/8 to 8 in steps of 2.2 %, finer than a rate from thousands of verdicts is known; 1 is in it.
GRID: FloatArray = np.exp2(np.linspace(-3.0, 3.0, 193))
# Offsets lie in ± this: σ is then within 3.4e-4 of 0 or 1.
MAX_OFFSET = 8.0
# Nats a verdict that a new offset has to be worth: 2.2 points of confidence at one half. Where only
# few confidences are seen, temperature and offset are hard to tell apart.
OFFSET_GAIN = 1e-3
# Of an offset in the search, finer than a rate from thousands of verdicts is known.
_OFFSET_STEP = 1e-3
# Of logits of one position, in `fit_records`: below MIN_VERDICTS, so that none is empty.
_GROUPS = 500
# What leaves a logit as it is.
UNSCALED: FloatArray = np.array([1.0, 0.0])
# Verdicts below which a position is not fitted: a rate of 0.8 is then known to 1.3 points.
MIN_VERDICTS = 1000
# Equal bins of the expected calibration error of predictions.
ECE_BINS = 20

_LOW, _HIGH = CONFIDENCE_LOGITS
_WIDTH = (_HIGH - _LOW) / CONFIDENCE_BINS
# The logit at the middle of each bin.
BIN_LOGITS: FloatArray = np.linspace(_LOW, _HIGH, 2 * CONFIDENCE_BINS + 1)[1::2]
# Equals are decided for the temperature nearest to 1.
_PREFERENCE: FloatArray = 1e-12 * np.abs(np.log(GRID))


def scaled(logits: ArrayLike, scaling: Scaling = UNSCALED) -> FloatArray:
    """z / t + b of any shapes that broadcast: scaling [2, ...], or the two of them."""
    t, b = scaling
    z: FloatArray = np.asarray(logits, np.float64) / t + b
    return z


def confidence(logits: ArrayLike, scaling: Scaling = UNSCALED) -> FloatArray:
    """c = σ(z / t + b), as `scaled`; no logit overflows."""
    return 0.5 + 0.5 * np.tanh(0.5 * scaled(logits, scaling))


def tally(logits: ArrayLike, verified: ArrayLike, accepted: ArrayLike) -> NDArray[np.int64]:
    """Counts int64 [2, γ, CONFIDENCE_BINS], reached and accepted, of N judged blocks: what
    `VerdictCounts` carries.

    logits: [N, γ] raw, padded with anything beyond a block's end. verified, accepted: [N] draft
    tokens of each. A token is reached if it was verified and all before it stood.
    """
    z = np.asarray(logits, np.float64)
    verified, accepted = np.asarray(verified), np.asarray(accepted)
    position = np.arange(z.shape[1])
    seen = (position < verified[:, None]) & (position <= accepted[:, None]) & np.isfinite(z)
    stood = seen & (position < accepted[:, None])
    bins = np.clip((np.where(seen, z, 0.0) - _LOW) / _WIDTH, 0, CONFIDENCE_BINS - 1)
    cell = position * CONFIDENCE_BINS + bins.astype(np.intp)
    size = z.shape[1] * CONFIDENCE_BINS
    counts = [np.bincount(cell[mask], minlength=size) for mask in (seen, stood)]
    return np.reshape(counts, (2, z.shape[1], CONFIDENCE_BINS)).astype(np.int64)


def calibration_error(predicted: FloatArray, stood: NDArray[np.bool_]) -> float:
    """ECE of N predictions in [0, 1]: Σ over ECE_BINS equal bins of |Σ (predicted − stood)| / N."""
    bins = np.minimum(predicted * ECE_BINS, ECE_BINS - 1).astype(np.intp)
    gap = np.bincount(bins, weights=predicted - stood, minlength=ECE_BINS)
    return float(np.abs(gap).sum() / max(len(predicted), 1))


def fit_records(
    logits: ArrayLike, accepted: ArrayLike, verified: ArrayLike | None = None
) -> FloatArray:
    """STS on records: a scaling, float64 [2, γ].

    logits: [N, γ] raw. accepted, verified: [N] draft tokens of each block; None: all γ verified.
    For k = 1..γ in order a search over GRID minimises the ECE of ∏_{i<=k} σ(z_i / t_i + b_i)
    against "k tokens stood", earlier positions fixed. b_k is that of the position before (0 at the
    first), or what makes the means alike where that lowers the ECE by more than the standard
    deviation of a rate. A position with fewer than MIN_VERDICTS blocks takes the scaling before it
    (none at the first).
    """
    z, seen, stood = _records(logits, accepted, verified)
    product, scaling = np.ones(len(z)), UNSCALED
    fitted = np.empty((2, z.shape[1]))
    for k in range(z.shape[1]):
        at = seen[:, k]
        if np.count_nonzero(at) >= MIN_VERDICTS:
            scaling = _fit_position(product[at], z[at, k], stood[at, k], scaling[1])
        product *= confidence(z[:, k], scaling)
        fitted[:, k] = scaling
    return fitted


def _fit_position(
    before: FloatArray, logits: FloatArray, stood: NDArray[np.bool_], offset: float
) -> FloatArray:
    """[2] of one position: products before it, its logits, whether the block stood, each [n];
    offset: of the position before."""
    # Offsets are sought on the means of groups of alike logits: a sum of n would be hardly another.
    order = np.argsort(logits)
    edges = np.linspace(0, len(order), _GROUPS, endpoint=False).astype(np.intp)
    mass = np.add.reduceat(before[order], edges)
    mean = np.add.reduceat((before * logits)[order], edges) / np.maximum(mass, 1e-300)

    def standing(b: FloatArray) -> FloatArray:
        total: FloatArray = confidence(mean, (GRID[:, None], b[:, None])) @ mass
        return total

    def best(offsets: FloatArray) -> tuple[float, FloatArray]:
        scalings = np.stack((GRID, offsets), axis=1)
        errors = [calibration_error(before * confidence(logits, one), stood) for one in scalings]
        at = np.argmin(errors + _PREFERENCE)
        return float(errors[at]), scalings[at]

    error, plain = best(np.full(len(GRID), offset))
    less, moved = best(_balance(standing, np.full(len(GRID), float(stood.sum()))))
    return moved if error - less > 0.5 / math.sqrt(len(stood)) else plain


def _balance(standing: Callable[[FloatArray], FloatArray], wanted: FloatArray) -> FloatArray:
    """Offsets within ± MAX_OFFSET at which `standing`, which grows with each of them, is as wanted,
    by halving."""
    low, high = np.full(wanted.shape, -MAX_OFFSET), np.full(wanted.shape, MAX_OFFSET)
    middle = np.zeros(wanted.shape)
    for _ in range(math.ceil(math.log2(2 * MAX_OFFSET / _OFFSET_STEP))):
        below = standing(middle) < wanted
        low, high = np.where(below, middle, low), np.where(below, high, middle)
        middle = (low + high) / 2
    return middle


def record_errors(
    logits: ArrayLike,
    accepted: ArrayLike,
    verified: ArrayLike | None = None,
    scaling: FloatArray = UNSCALED,
) -> FloatArray:
    """ECE of the product at each position, float64 [γ], as in Figure 6; 0 where none was verified.

    Arguments as of `fit_records`; scaling: [2, γ], or [2] for all.
    """
    z, seen, stood = _records(logits, accepted, verified)
    product = np.cumprod(confidence(z, scaling), axis=1)
    columns = zip(product.T, seen.T, stood.T, strict=True)
    return np.array([calibration_error(a[at], yes[at]) for a, at, yes in columns])


def _records(
    logits: ArrayLike, accepted: ArrayLike, verified: ArrayLike | None
) -> tuple[FloatArray, NDArray[np.bool_], NDArray[np.bool_]]:
    """Logits [N, γ], and for each position: was it verified (a block ends where its logits make no
    sense), did the block stand up to it."""
    z = np.asarray(logits, np.float64)
    if z.ndim != 2:
        raise ValueError(f"logits have shape {z.shape}, not [N, γ]")
    position = np.arange(z.shape[1])
    stood = position < np.reshape(np.asarray(accepted), (len(z), 1))
    seen = np.logical_and.accumulate(np.isfinite(z), axis=1)
    if verified is not None:
        seen &= position < np.reshape(np.asarray(verified), (len(z), 1))
    return z, seen, stood


def log_likelihood(counts: NDArray[Any], scaling: FloatArray) -> FloatArray:
    """Of verdict counts [2, γ, bins] (reached, accepted), nats at each position: float64 [γ].

    scaling: [2, γ]. Σ_bins accepted · log c + (reached − accepted) · log(1 − c), with c at the
    middle of each bin.
    """
    z = scaled(BIN_LOGITS, scaling[:, :, None])
    reached, accepted = counts
    stands, falls = -np.logaddexp(0.0, -z), -np.logaddexp(0.0, z)
    total: FloatArray = (accepted * stands + (reached - accepted) * falls).sum(axis=-1)
    return total


def fit_counts(counts: NDArray[Any], offsets: ArrayLike = 0.0) -> FloatArray:
    """STS on verdict counts: a scaling float64 [2, γ], NaN where fewer than MIN_VERDICTS were
    reached. counts: [2, γ, bins], reached and accepted. offsets: [γ] in use.

    The most likely temperature of the grid with the offset in use; or with its own one, at which
    as many stand as are said to, where that is OFFSET_GAIN nats a verdict more likely.
    """
    reached, accepted = np.asarray(counts, np.float64)
    total, stood = reached.sum(axis=1), accepted.sum(axis=1)
    shape = len(total), len(GRID)
    positions = np.arange(len(total))

    def standing(b: FloatArray) -> FloatArray:
        c = confidence(BIN_LOGITS, (GRID[:, None], b[..., None]))  # [γ, G, bins]
        said: FloatArray = np.einsum("kn,kgn->kg", reached, c)
        return said

    def best(offsets: FloatArray) -> tuple[FloatArray, FloatArray]:
        z = scaled(BIN_LOGITS, (GRID[:, None], offsets[..., None]))
        loss = np.einsum("kn,kgn->kg", accepted, np.logaddexp(0.0, -z))
        loss += np.einsum("kn,kgn->kg", reached - accepted, np.logaddexp(0.0, z))
        loss /= np.maximum(total, 1.0)[:, None]
        at = np.argmin(loss + _PREFERENCE, axis=1)
        return loss[positions, at], np.stack((GRID[at], offsets[positions, at]))

    loss, plain = best(np.broadcast_to(np.reshape(offsets, (-1, 1)), shape))
    less, moved = best(_balance(standing, np.broadcast_to(stood[:, None], shape)))
    fitted = np.where(loss - less > OFFSET_GAIN, moved, plain)
    fitted[:, total < MIN_VERDICTS] = np.nan
    return fitted
