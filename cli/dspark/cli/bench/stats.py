"""Figures from samples: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 99)
RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over theirs, paired round by round: the geometric mean, and where the bootstrap puts it
    with 95 % confidence. pairs: rounds; one alone has no spread and so no interval."""

    ratio: float
    low: float | None
    high: float | None
    pairs: int


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99, linear between neighbours."""
    points = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return {f"p{p}": float(point) for p, point in zip(PERCENTILES, points, strict=True)}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Both above 0, one a round. The draws are seeded: the same samples say the same."""
    logs = np.log(np.asarray(ours, np.float64)) - np.log(np.asarray(theirs, np.float64))
    ratio, pairs = float(np.exp(logs.mean())), len(logs)
    if pairs < 2:
        return Ratio(ratio, None, None, pairs)
    means = np.random.default_rng(0).choice(logs, (RESAMPLES, pairs)).mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.exp(np.quantile(means, (tail, 1 - tail)))
    return Ratio(ratio, float(low), float(high), pairs)
