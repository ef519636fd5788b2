"""How far confidences can be believed, before and after scaling (STS, §3.2.1, Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.scheduler.sts import ECE_BINS, UNSCALED, confidence, fit_records, record_errors
from dspark.training.records import Records

FloatArray = NDArray[np.float64]

# Samples of what a perfect model would show.
PERFECT_DRAWS = 20


@dataclass(frozen=True, slots=True)
class Position:
    """One position of a block: its survival ∏_{i<=k} c_i against "x_1..x_k stood", which every
    whole block says. ece_perfect: what a perfectly calibrated model shows on as many.
    auc_conditional: of c_k alone, among blocks that reached x_k.
    """

    position: int
    rounds: int
    stood: float
    ece_before: float
    ece: float
    ece_perfect: float
    brier_before: float
    brier: float
    auc: float
    auc_conditional: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Of one mode. temperatures, offsets [γ]; reliability: of each position, rows (mean prediction,
    share that stood, rounds) of the ECE's bins that are not empty."""

    mode: str
    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    positions: tuple[Position, ...]
    reliability: tuple[tuple[tuple[float, float, int], ...], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fit(found: Records) -> FloatArray:
    """Scaling [2, γ]; a position that was seen too seldom takes the one before it."""
    return fit_records(found.logits, found.accepted, found.judged)


def judge_calibration(mode: str, found: Records, scaling: FloatArray, *, seed: int = 0) -> Judged:
    """Figures of records that the scaling [2, γ] was not fitted on."""
    before, after = survivals(found), survivals(found, scaling)
    raw = record_errors(found.logits, found.accepted, found.judged)
    fitted = record_errors(found.logits, found.accepted, found.judged, scaling)
    rng = np.random.default_rng(seed)
    positions, reliability = [], []
    for k in range(found.logits.shape[1]):
        at = found.known[:, k]
        stood, a = found.stood[at, k], after[at, k]
        reached = found.reached[:, k]
        c = confidence(found.logits[reached, k], scaling[:, k])
        positions.append(
            Position(
                position=k + 1,
                rounds=int(at.sum()),
                stood=_mean(stood),
                ece_before=float(raw[k]),
                ece=float(fitted[k]),
                ece_perfect=perfect_error(a, rng),
                brier_before=_mean((before[at, k] - stood) ** 2),
                brier=_mean((a - stood) ** 2),
                auc=auc(a, stood),
                auc_conditional=auc(c, found.stood[reached, k]),
            )
        )
        reliability.append(reliability_rows(a, stood))
    temperatures, offsets = map(tuple, scaling.tolist())
    return Judged(mode, temperatures, offsets, tuple(positions), tuple(reliability))


def survivals(found: Records, scaling: FloatArray = UNSCALED) -> FloatArray:
    """∏_{i<=k} σ(z_i / t_i + b_i): float64 [N, γ]."""
    product = confidence(found.logits, scaling)
    np.cumprod(product, axis=1, out=product)
    return product


def auc(scores: FloatArray, stood: NDArray[np.bool_]) -> float:
    """Chance that one that stood was scored above one that did not, equal scores counting half; NaN
    without both."""
    ones = int(stood.sum())
    zeros = len(stood) - ones
    if not ones or not zeros:
        return float("nan")
    values, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    rank = (last - (counts - 1) / 2)[group]  # of equal scores the mean of their ranks
    assert len(values) == len(counts)
    return float((rank[stood].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def perfect_error(predicted: FloatArray, rng: np.random.Generator) -> float:
    """The ECE that chance alone leaves: the mean over samples in which each block stands with just
    the probability that was said."""
    if not len(predicted):
        return 0.0
    bins = np.minimum(predicted * ECE_BINS, ECE_BINS - 1).astype(np.intp)
    total = np.bincount(bins, predicted, ECE_BINS)
    errors = []
    for _ in range(PERFECT_DRAWS):
        stood = np.bincount(bins, rng.random(len(predicted)) < predicted, ECE_BINS)
        errors.append(np.abs(total - stood).sum() / len(predicted))
    return float(np.mean(errors))


def reliability_rows(
    predicted: FloatArray, stood: NDArray[np.bool_]
) -> tuple[tuple[float, float, int], ...]:
    """(mean prediction, share that stood, rounds) of each bin that is not empty."""
    bins = np.minimum(predicted * ECE_BINS, ECE_BINS - 1).astype(np.intp)
    counts = np.bincount(bins, minlength=ECE_BINS)
    told = np.bincount(bins, predicted, ECE_BINS)
    came = np.bincount(bins, stood, ECE_BINS)
    return tuple(
        (float(told[b] / counts[b]), float(came[b] / counts[b]), int(counts[b]))
        for b in np.flatnonzero(counts).tolist()
    )


def halves(found: Sequence[Records]) -> tuple[list[Records], list[Records]]:
    """Answers for fitting and for judging, every other one: rounds of one answer are alike, so they
    stay on one side."""
    return list(found[0::2]), list(found[1::2])


def join(parts: Sequence[Records], gamma: int) -> Records:
    if not parts:
        none = np.zeros(0, np.int64)
        return Records(np.zeros((0, gamma)), none, none)
    return Records(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.accepted for part in parts]),
        np.concatenate([part.judged for part in parts]),
    )


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else float("nan")
