"""Live calibration: how confidence logits are scaled, refitted from verdicts while serving.

A `CalibrationState` is a value: verdict counts go in, a state comes out, and once in a while a
`refit` gives a `Calibration` of the next version. The fit, and why trimming does not bias it:
`sts.py`. Verdicts of every other report are kept apart: a scaling is fitted on one half and
replaces the one in use only if the other half, which it has not seen, says that it is better. The
halves go by the golden ratio, not by parity: no rhythm of reports puts one verifier's all in one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dspark.core.plans import Calibration, CalibrationTable
from dspark.core.reports import CONFIDENCE_BINS, VerdictCounts
from dspark.core.sampling import SamplingMode
from dspark.scheduler.sts import (
    BIN_LOGITS,
    MIN_VERDICTS,
    UNSCALED,
    confidence,
    fit_counts,
    log_likelihood,
    scaled,
)

FloatArray = NDArray[np.float64]
Key = tuple[str, SamplingMode]

# Seconds after which a verdict counts half: long enough for MIN_VERDICTS at a few tokens a second,
# short enough to follow a change of traffic within the hour.
HALF_LIFE_S = 600.0
# The same for the newest window, which drift is measured on.
WINDOW_HALF_LIFE_S = 30.0
# A table is replaced where the other half's gain is above its own noise (standard errors) and worth
# a new version: 1e-4 nats a verdict is about 0.6 points of confidence at 0.8.
MIN_SIGMAS = 2.0
MIN_GAIN = 1e-4
# Streams with fewer verdicts than this left are dropped.
FORGOTTEN = 0.5
# Tables of a calibration, which travels with every plan: 20 checkpoints in all modes. Those whose
# drafters were not heard of for longest go first.
MAX_TABLES = 64
# Tables kept that drafters brought with their checkpoints.
MAX_SHIPPED = 256

# Where a stream's counts are: [3, 2, γ, bins], each of them reached and accepted.
FIT, JUDGE, WINDOW = range(3)


@dataclass(frozen=True, slots=True)
class CalibrationState:
    """calibration: in use. reports: taken in so far. streams: by drafter and mode, counts float64
    [3, 2, γ, bins], read-only, forgotten exponentially; the newest heard of come last. shipped:
    tables of drafters' checkpoints, which verifiers use where the calibration has none."""

    calibration: Calibration = field(default_factory=lambda: Calibration(0))
    reports: int = 0
    streams: Mapping[Key, FloatArray] = field(default_factory=lambda: MappingProxyType({}))
    shipped: tuple[CalibrationTable, ...] = ()

    @property
    def in_use(self) -> Calibration:
        """What verifiers scale with: its own tables first."""
        return replace(self.calibration, tables=(*self.calibration.tables, *self.shipped))


@dataclass(frozen=True, slots=True)
class Drift:
    """How far one drafter's table is from its newest verdicts.

    error: expected calibration error of single confidences over all positions and bins, in [0, 1].
    noise: what a perfect table would show, from so few verdicts. verdicts: of the window, by
    weight.
    """

    drafter_id: str
    mode: SamplingMode
    error: float
    noise: float
    verdicts: float


def scaling_of(table: CalibrationTable) -> FloatArray:
    """Temperatures and offsets, float64 [2, γ]."""
    scaling = np.zeros((2, len(table.temperatures)))
    scaling[0] = table.temperatures
    if table.offsets:
        scaling[1] = table.offsets
    return scaling


def stretched(scaling: FloatArray, gamma: int) -> FloatArray:
    """For a block of gamma tokens, [2, gamma]: later positions use the last."""
    return scaling[:, np.minimum(np.arange(gamma), scaling.shape[1] - 1)]


def scaling_for(
    calibration: Calibration, drafter_id: str, mode: SamplingMode, gamma: int
) -> FloatArray:
    """Of the confidence logits of a block, float64 [2, gamma]; of a drafter or mode without a table
    one that changes nothing."""
    for table in calibration.tables:
        if table.drafter_id == drafter_id and table.mode is mode and table.temperatures:
            return stretched(scaling_of(table), gamma)
    return stretched(UNSCALED[:, None], gamma)


def absorb(
    state: CalibrationState, verdicts: Iterable[VerdictCounts], elapsed_s: float
) -> CalibrationState:
    """Take in the verdicts of one report, or of one interval's reports together; all go to the same
    half.

    verdicts: as `check_report` lets them pass. elapsed_s: seconds since the last call, for
    forgetting; a clock that jumped back forgets nothing.
    """
    by_key: defaultdict[Key, defaultdict[int, list[VerdictCounts]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for counts in verdicts:
        by_key[counts.drafter_id, counts.mode][len(counts.reached)].append(counts)
    new = {key: reduce(_sum, map(_total, of.values())) for key, of in by_key.items()}
    elapsed_s = elapsed_s if elapsed_s > 0 else 0.0
    slow, fast = (0.5 ** (elapsed_s / life) for life in (HALF_LIFE_S, WINDOW_HALF_LIFE_S))
    keep = np.array([slow, slow, fast])[:, None, None, None]
    streams: dict[Key, FloatArray] = {}
    for key in [*(key for key in state.streams if key not in new), *new]:
        old = state.streams.get(key)
        counts_now = np.zeros((3, 2, 1, CONFIDENCE_BINS)) if old is None else old * keep
        if key in new:
            added = np.zeros((3, *new[key].shape))
            added[[half_of(state.reports), WINDOW]] = new[key]
            counts_now = _sum(counts_now, added)
        if counts_now[:WINDOW, 0].sum() >= FORGOTTEN:
            counts_now.flags.writeable = False
            streams[key] = counts_now
    return replace(state, reports=state.reports + 1, streams=MappingProxyType(streams))


def ship(state: CalibrationState, tables: Iterable[CalibrationTable]) -> CalibrationState:
    """Take in what drafters brought with their checkpoints, the newest last. Those of drafters that
    have left stay, as their verdicts still come: of more than MAX_SHIPPED the newest."""
    known = {(table.drafter_id, table.mode): table for table in state.shipped}
    for table in tables:
        known.pop((table.drafter_id, table.mode), None)
        known[table.drafter_id, table.mode] = table
    return replace(state, shipped=tuple(known.values())[-MAX_SHIPPED:])


def half_of(report: int) -> int:
    """FIT or JUDGE, for the report of this number: is {report · φ} below one half? Of any
    arithmetic progression of reports one half goes to each (Weyl)."""
    return report * 0x9E3779B97F4A7C15 % 2**64 >> 63


def refit(state: CalibrationState) -> CalibrationState:
    """The state with a calibration of the next version, where any position of any drafter is
    calibrated better by a new scaling; else the state itself.

    A position is fitted and judged on its own, on at least MIN_VERDICTS reached tokens in each
    half, and keeps the scaling in use unless the judging half prefers the new one by MIN_SIGMAS
    standard errors and MIN_GAIN. Of more tables than MAX_TABLES those go that were not heard of for
    longest. Tables that drafters shipped are where a fit begins; they are not published unchanged.
    """
    tables = {(table.drafter_id, table.mode): table for table in state.calibration.tables}
    shipped = {(table.drafter_id, table.mode): table for table in state.shipped}
    in_use, changed = state.in_use, False
    for (drafter_id, mode), counts in state.streams.items():
        gamma = counts.shape[2]
        current = scaling_for(in_use, drafter_id, mode, gamma)
        fitted = fit_counts(counts[FIT], current[1])
        candidate = np.where(np.isnan(fitted), current, fitted)
        better = _is_better(counts[JUDGE], current, candidate)
        if not better.any():
            continue
        changed = True
        known = tables.get((drafter_id, mode)) or shipped.get((drafter_id, mode))
        chosen = np.where(better, candidate, current)
        if known is not None:
            chosen = np.concatenate((chosen, scaling_of(known)[:, gamma:]), axis=1)
        temperatures, offsets = map(tuple, chosen.tolist())
        tables[drafter_id, mode] = CalibrationTable(drafter_id, mode, temperatures, offsets)
    if not changed:
        return state
    heard = [*(key for key in tables if key not in state.streams), *state.streams]
    excess = len(tables) - MAX_TABLES
    for key in [key for key in heard if key in tables][: max(excess, 0)]:
        del tables[key]
    calibration = Calibration(state.calibration.version + 1, tuple(tables.values()))
    return replace(state, calibration=calibration)


def drift(state: CalibrationState) -> list[Drift]:
    """Of every drafter and mode with verdicts in the newest window."""
    found, in_use = [], state.in_use
    for (drafter_id, mode), counts in state.streams.items():
        reached, accepted = counts[WINDOW]
        total = float(reached.sum())
        if total < FORGOTTEN:
            continue
        c = confidence(BIN_LOGITS, scaling_for(in_use, drafter_id, mode, len(reached))[:, :, None])
        error = float(np.abs(accepted - reached * c).sum()) / total
        # A binomial's mean absolute deviation is √(2/π) of its standard deviation.
        noise = float(np.sqrt(reached * c * (1 - c) * (2 / np.pi)).sum()) / total
        found.append(Drift(drafter_id, mode, error, noise, total))
    return found


def _is_better(counts: FloatArray, current: FloatArray, new: FloatArray) -> NDArray[np.bool_]:
    """Whether held-out counts [2, γ, bins] prefer the new scaling, at each position [γ]."""
    reached, accepted = counts
    total = np.maximum(reached.sum(axis=1), 1.0)
    gain = log_likelihood(counts, new) - log_likelihood(counts, current)
    # The gain is linear in the accepted counts, which vary as binomials do; its slope is the
    # difference of log odds.
    slope = scaled(BIN_LOGITS, new[:, :, None]) - scaled(BIN_LOGITS, current[:, :, None])
    rate = accepted / np.maximum(reached, 1.0)
    noise = np.sqrt((reached * rate * (1 - rate) * slope**2).sum(axis=1))
    enough = total >= MIN_VERDICTS
    better: NDArray[np.bool_] = enough & (gain >= MIN_SIGMAS * noise) & (gain >= MIN_GAIN * total)
    return better


def _total(verdicts: list[VerdictCounts]) -> FloatArray:
    """Sum [2, γ, bins] of counts whose blocks are of one length."""
    counts = np.array([(v.reached, v.accepted) for v in verdicts], np.float64)
    shape = len(verdicts), 2, len(verdicts[0].reached), CONFIDENCE_BINS
    total: FloatArray = counts.reshape(shape).sum(axis=0)
    return total


def _sum(a: FloatArray, b: FloatArray) -> FloatArray:
    """Sum of two arrays of counts [..., γ, bins] whose blocks may be of different length."""
    short, long = sorted((a, b), key=lambda counts: counts.shape[-2])
    total = long.copy()
    total[..., : short.shape[-2], :] += short
    return total
