"""Which entries of a row are its largest, without sorting the row. Ties go to the lower index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32] | NDArray[np.float64]
Indices = NDArray[np.int64]

# Rows of the table whose columns' maxima bound the n-th largest value from below.
_ROWS = 32
# So many values are sorted rather than counted into bins.
_FEW = 4096
# Bits of a float64 below its bin: 44 leaves 256 bins for each power of two.
_BIN_BITS = np.int64(44)
# Sums of bins and running sums round differently, by less than this part of the total.
_ROUNDING = 1e-10


def largest(values: Values, n: int) -> Indices:
    """Indices of the n largest values, ascending; 0 < n <= len(values), no NaN.

    The n-th largest of some groups' maxima bounds the n-th largest value from below; for few n
    next to nothing else is above it, and only that is partitioned.
    """
    groups = len(values) // _ROWS
    if 2 * n > groups:
        return _largest_of(values, n)
    maxima = values[: groups * _ROWS].reshape(_ROWS, groups).max(axis=0)
    bound = np.partition(maxima, groups - n)[groups - n]
    candidates = np.flatnonzero(values >= bound)
    return candidates[_largest_of(values[candidates], n)]


def nucleus(weights: NDArray[np.float64], top_p: float) -> Indices:
    """Indices, ascending, of the smallest set, heaviest first, that holds top_p of all the weight
    (at least one index).

    All indices below (1 - top_p) / n of the total together hold less than 1 - top_p of it, so the
    nucleus lies among the others. Half of that bound leaves room for rounding.
    """
    total = weights.sum()
    target = top_p * total
    candidates = np.flatnonzero(weights >= 0.5 * (1.0 - top_p) * total / len(weights))
    values = weights[candidates]
    found = _held_by_bins(values, target, _ROUNDING * total) if len(values) > _FEW else None
    if found is None:
        ordered = np.sort(values)[::-1]
        size = min(int(np.searchsorted(np.cumsum(ordered), target)) + 1, len(values))
        found = size, float(ordered[size - 1])
    return candidates[_from(values, *found)]


def _held_by_bins(
    values: NDArray[np.float64], target: float, tolerance: float
) -> tuple[int, float] | None:
    """How many of the largest values sum up to `target`, and the least of them; None if that hangs
    on rounding.

    A bin is a range of the leading bits of a positive float64, which order as the numbers do. Only
    the bin in which the running sum passes the target is sorted.
    """
    bins = values.view(np.int64) >> _BIN_BITS
    bins -= bins.min()
    sums = np.bincount(bins, values)[::-1]
    held = np.cumsum(sums)
    passes = int(np.searchsorted(held, target))
    if passes == len(held):
        return None
    passed = len(held) - 1 - passes
    inside = np.sort(values[bins == passed])[::-1]
    before = held[passes] - sums[passes]
    running = before + np.concatenate(([0.0], np.cumsum(inside)))
    more = int(np.searchsorted(running, target))
    if more in (0, len(running)) or np.abs(running[more - 1 : more + 1] - target).min() < tolerance:
        return None
    return int(np.count_nonzero(bins > passed)) + more, float(inside[more - 1])


def _largest_of(values: Values, n: int) -> Indices:
    least = np.partition(values, len(values) - n)[len(values) - n]
    return _from(values, n, float(least))


def _from(values: Values, n: int, least: float) -> Indices:
    """Indices of the n largest values, of which the least is known."""
    chosen = values > least
    missing = n - int(np.count_nonzero(chosen))
    chosen[np.flatnonzero(values == least)[:missing]] = True
    return np.flatnonzero(chosen)
