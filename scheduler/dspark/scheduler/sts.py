"""Sequential Temperature Scaling (STS, §3.2.1): the temperature of each position of a block.

A confidence head says σ(z_k); divided by the right temperature t_k > 0 the products ∏_{i<=k}
σ(z_i / t_i) are the probabilities with which x_1..x_k stand. Order within a position is kept. Pure:
arrays in, arrays out; γ positions, N blocks, G temperatures of the grid.

Verdicts are *censored*: a trimmed token has none. Trimming decides on x_k from c_<=k and other
requests (design.md §4, L2), never from whether x_k would stand. So of all blocks with the same
c_<=k those that were verified at k are a fair sample, though blocks with high c_<=k are seen more
often than others. Both fits below therefore condition on what admission could see, and neither
counts a trimmed token as rejected nor guesses it:

- `fit_records` judges the product at k on blocks with at least k tokens verified, where both the
  prediction (a function of c_<=k) and the outcome are known;
- `fit_counts` judges c_k on tokens that were verified and had all before them accepted, each bin of
  raw confidence against its own rate, by likelihood: the censoring mechanism is a factor of the
  likelihood in which no temperature occurs, so it drops out. Where each σ(z_k / t_k) is right of
  tokens that are reached, so is the product, by the chain rule, as far as c_k tells of x_k all that
  c_<k would.

What trimming does change is how often each bin is seen, so where no temperature fits all bins, the
fit is best for those that are verified. Looking ahead (greedy and coupled requests) admits x_k by
c_j, j > k, also; that much of a selection by x_k stays in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.reports import CONFIDENCE_BINS, CONFIDENCE_LOGITS

FloatArray = NDArray[np.float64]
CountArray = NDArray[np.int64]

# 1/8 to 8 in steps of 2.2 %, finer than a rate from thousands of verdicts is known; 1 is in it.
GRID: FloatArray = np.exp2(np.linspace(-3.0, 3.0, 193))
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


def confidence(logits: ArrayLike, temperatures: ArrayLike = 1.0) -> FloatArray:
    """c = σ(z / t) of any shapes that broadcast; no logit overflows."""
    z = np.asarray(logits, np.float64) / np.asarray(temperatures, np.float64)
    return 0.5 + 0.5 * np.tanh(0.5 * z)


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
    """STS on records: temperatures float64 [γ].

    logits: [N, γ] raw. accepted, verified: [N] draft tokens of each block; None: all γ verified.
    For k = 1..γ in order a search over GRID minimises the ECE of ∏_{i<=k} σ(z_i / t_i) against
    "k tokens stood", earlier positions fixed. A position with fewer than MIN_VERDICTS blocks takes
    the temperature before it (1 at the first).
    """
    z, seen, stood = _records(logits, accepted, verified)
    product, temperature = np.ones(len(z)), 1.0
    fitted = np.empty(z.shape[1])
    for k in range(z.shape[1]):
        at = seen[:, k]
        if np.count_nonzero(at) >= MIN_VERDICTS:
            before, z_k, stood_k = product[at], z[at, k], stood[at, k]
            errors = [calibration_error(before * confidence(z_k, t), stood_k) for t in GRID]
            temperature = float(GRID[np.argmin(errors + _PREFERENCE)])
        product *= confidence(z[:, k], temperature)
        fitted[k] = temperature
    return fitted


def record_errors(
    logits: ArrayLike,
    accepted: ArrayLike,
    verified: ArrayLike | None = None,
    temperatures: ArrayLike = 1.0,
) -> FloatArray:
    """ECE of the product at each position, float64 [γ], as in Figure 6; 0 where none was verified.

    Arguments as of `fit_records`; temperatures: [γ], or one for all.
    """
    z, seen, stood = _records(logits, accepted, verified)
    product = np.cumprod(confidence(z, temperatures), axis=1)
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


def log_likelihood(counts: NDArray[Any], temperatures: ArrayLike) -> FloatArray:
    """Of verdict counts [2, γ, bins] (reached, accepted), nats at each position: float64 [γ].

    temperatures: [γ]. Σ_bins accepted · log c + (reached − accepted) · log(1 − c), with c at the
    middle of each bin.
    """
    z = BIN_LOGITS / np.asarray(temperatures, np.float64)[:, None]
    reached, accepted = counts
    stands, falls = -np.logaddexp(0.0, -z), -np.logaddexp(0.0, z)
    total: FloatArray = (accepted * stands + (reached - accepted) * falls).sum(axis=-1)
    return total


def fit_counts(counts: NDArray[Any]) -> FloatArray:
    """STS on verdict counts: temperatures float64 [γ], NaN where fewer than MIN_VERDICTS were
    reached. counts: [2, γ, bins], reached and accepted. The grid's most likely temperature.
    """
    z = BIN_LOGITS / GRID[:, None]
    reached, accepted = np.asarray(counts, np.float64)
    stands, falls = -np.logaddexp(0.0, -z), -np.logaddexp(0.0, z)
    loss = -(accepted @ stands.T + (reached - accepted) @ falls.T)
    total = reached.sum(axis=1)
    loss = loss / np.maximum(total, 1.0)[:, None] + _PREFERENCE
    return np.where(total >= MIN_VERDICTS, GRID[np.argmin(loss, axis=1)], np.nan)
