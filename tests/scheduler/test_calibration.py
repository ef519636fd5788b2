"""Scalings from verdicts: what trimming may not bias, what noise may not replace."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq

from dspark.core.plans import Calibration, CalibrationTable
from dspark.core.reports import CONFIDENCE_BINS, VerdictCounts
from dspark.core.sampling import SamplingMode
from dspark.scheduler import Policy, StepCost, plan
from dspark.scheduler.calibration import (
    FIT,
    HALF_LIFE_S,
    JUDGE,
    MAX_SHIPPED,
    MAX_TABLES,
    WINDOW,
    CalibrationState,
    absorb,
    drift,
    half_of,
    refit,
    scaling_for,
    scaling_of,
    ship,
)
from dspark.scheduler.sts import (
    BIN_LOGITS,
    GRID,
    MAX_OFFSET,
    MIN_VERDICTS,
    UNSCALED,
    calibration_error,
    confidence,
    fit_counts,
    fit_records,
    log_likelihood,
    record_errors,
    tally,
)

GREEDY, REJECTION = SamplingMode.GREEDY, SamplingMode.REJECTION
KEY = ("d", GREEDY)
Array = NDArray[Any]

# An overconfident head, the more so early in the block; underconfident at its end.
TRUTH = np.array([2.0, 1.6, 1.25, 1.0, 0.75])
GAMMA = len(TRUTH)


def blocks(seed: int, N: int, truth: Array = TRUTH, shift: float = 0.0) -> tuple[Array, Array]:
    """N drafts: raw logits [N, γ], which go together inside a block, and how many tokens stand.
    A token stands with σ(z / truth − shift)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.8, 0.8, (N, 1)) + rng.normal(0.6, 0.8, (N, len(truth)))
    stands = rng.random(logits.shape) < confidence(logits / truth - shift)
    return logits, np.cumprod(stands, axis=1).sum(axis=1)


def early_stop(logits: Array, R: int = 32) -> Array:
    """Tokens [N] that Algorithm 1 verifies of each block, in steps of R requests."""
    cost = StepCost((1, 512), (1.0, 8.0))
    survival = np.cumprod(confidence(logits), axis=1)
    steps = np.array_split(survival, len(survival) // R)
    policy = Policy.parse("early-stop")
    return np.concatenate([plan(list(a), cost, 0, len(a), 0, policy) for a in steps])


def counts_of(tallied: Array, drafter: str = "d", mode: SamplingMode = GREEDY) -> VerdictCounts:
    reached, accepted = (tuple(map(tuple, counts.tolist())) for counts in tallied)
    return VerdictCounts(drafter, mode, reached, accepted)


def array_of(counts: VerdictCounts) -> Array:
    return np.array((counts.reached, counts.accepted))


def verdicts(seed: int, N: int, truth: Array = TRUTH) -> VerdictCounts:
    logits, accepted = blocks(seed, N, truth)
    return counts_of(tally(logits, np.full(N, len(truth)), accepted))


def fed(
    state: CalibrationState, *reports: VerdictCounts, elapsed_s: float = 0.0
) -> CalibrationState:
    for report in reports:
        state = absorb(state, [report], elapsed_s)
    return state


def in_use(t: list[float], version: int = 1) -> CalibrationState:
    return CalibrationState(Calibration(version, (CalibrationTable(*KEY, tuple(t)),)))


def of(state: CalibrationState, gamma: int = GAMMA) -> Array:
    return scaling_for(state.calibration, *KEY, gamma)


def pure(temperatures: Any) -> Array:
    """A scaling without offsets."""
    return np.stack((temperatures, np.zeros(len(temperatures))))


def apart(a: Array, b: Array) -> float:
    """The largest mean distance of confidences under two scalings, at any position."""
    logits, _ = blocks(7, 4000, np.ones(a.shape[1]))
    return float(np.abs(confidence(logits, a) - confidence(logits, b)).mean(axis=0).max())


RIGHT = pure(TRUTH)


# --- STS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 0.8, -0.8])
def test_records_give_the_scaling_that_made_them(shift: float) -> None:
    logits, accepted = blocks(1, 20_000, shift=shift)
    fitted = fit_records(logits, accepted)
    made = np.stack((TRUTH, np.full(GAMMA, -shift)))
    assert apart(fitted, made) < 0.02
    before, after = (
        record_errors(logits, accepted, None, scaling) for scaling in (UNSCALED, fitted)
    )
    assert (after <= before).all()
    assert after.max() < 0.015 < 0.05 < before.max()


def test_each_position_is_the_best_of_the_grid_with_earlier_ones_fixed() -> None:
    """Against a search written out, with the offset of each temperature by a root finder."""
    logits, accepted = blocks(2, 3000, shift=1.0)
    fitted = fit_records(logits, accepted)
    for k in range(2):
        before = np.prod(confidence(logits[:, :k], fitted[:, :k]), axis=1)

        def said(t: float, b: float, k: int = k, before: Array = before) -> Array:
            alive: Array = before * confidence(logits[:, k], (t, b))
            return alive

        def balanced(t: float, k: int = k, said: Any = said) -> float:
            stood = (accepted > k).sum()
            found = brentq(lambda b: said(t, b).sum() - stood, -99, 99)
            return float(np.clip(found, -MAX_OFFSET, MAX_OFFSET))

        as_before = fitted[1, k - 1] if k else 0.0
        near = min(calibration_error(said(t, as_before), accepted > k) for t in GRID)
        best = min(calibration_error(said(t, balanced(t)), accepted > k) for t in GRID)
        wanted = best if near - best > 0.5 / math.sqrt(3000) else near
        at = calibration_error(said(*fitted[:, k]), accepted > k)
        # Offsets are searched in steps of 1e-3, which moves a few blocks to another bin.
        assert at == pytest.approx(wanted, abs=1e-3)
        assert said(*fitted[:, k]).mean() == pytest.approx((accepted > k).mean(), abs=0.02)


def test_ece_is_the_mean_gap_of_bins() -> None:
    predicted = np.array([0.02, 0.03, 0.51, 0.52, 1.0])
    stood = np.array([False, True, True, False, True])
    assert calibration_error(predicted, stood) == pytest.approx((0.95 + 0.03 + 0.0) / 5)


def test_without_need_there_is_no_offset() -> None:
    logits, accepted = blocks(2, 3000)
    t, b = fit_records(logits, accepted)
    assert not b.any()
    for k in range(GAMMA):
        before = np.prod(confidence(logits[:, :k], (t[:k], b[:k])), axis=1)
        errors = [
            calibration_error(before * confidence(logits[:, k], (one, 0.0)), accepted > k)
            for one in GRID
        ]
        assert t[k] == GRID[np.argmin(errors)]


def test_a_position_with_few_records_takes_the_scaling_before_it() -> None:
    logits, accepted = blocks(3, 5000)
    verified = np.where(np.arange(5000) < MIN_VERDICTS - 1, 5, 3)
    fitted = fit_records(logits, accepted, verified)
    assert (fitted[:, 3:] == fitted[:, 2:3]).all()
    assert fitted[0, 2] != 1.0
    few = fit_records(logits[: MIN_VERDICTS - 1], accepted[: MIN_VERDICTS - 1])
    assert (few == UNSCALED[:, None]).all()


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 40))
@settings(max_examples=50)
def test_tally_counts_what_was_reached_and_what_stood(seed: int, gamma: int, N: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (N, gamma))
    logits[rng.random(logits.shape) < 0.05] = math.nan
    accepted, verified = rng.integers(0, gamma + 1, (2, N))
    accepted = np.minimum(accepted, verified)
    want = np.zeros((2, gamma, CONFIDENCE_BINS), int)
    for z, ell, tau in zip(logits, verified, accepted, strict=True):
        for k in range(min(ell, tau + 1)):
            if not math.isnan(z[k]):
                b = min(max(math.floor((z[k] + 4.5) / 0.6), 0), CONFIDENCE_BINS - 1)
                want[:, k, b] += (1, k < tau)
    assert (tally(logits, verified, accepted) == want).all()


# --- what trimming does --------------------------------------------------------------------------


N_BLOCKS = 60_000


@pytest.fixture(scope="module", params=[11, 12])
def streams(request: pytest.FixtureRequest) -> tuple[Array, Array, Array]:
    """Logits, what would stand, and what Algorithm 1 let be verified."""
    logits, accepted = blocks(request.param, N_BLOCKS)
    verified = early_stop(logits)
    whole, trimmed = (
        tally(logits, np.full(N_BLOCKS, GAMMA), accepted),
        tally(logits, verified, np.minimum(accepted, verified)),
    )
    # It trims a lot, and not at random: low confidences at late positions are rarely seen.
    assert trimmed[0, -1].sum() < 0.7 * whole[0, -1].sum()
    assert trimmed[0, -1, :10].sum() < 0.2 * whole[0, -1, :10].sum()
    return logits, accepted, verified


def test_a_trimmed_stream_gives_the_scaling_of_the_whole_one(
    streams: tuple[Array, Array, Array],
) -> None:
    logits, accepted, verified = streams
    stood = np.minimum(accepted, verified)
    whole = fit_counts(tally(logits, np.full(N_BLOCKS, GAMMA), accepted))
    trimmed = fit_counts(tally(logits, verified, stood))
    again, stands = blocks(99, N_BLOCKS)
    noise = apart(whole, fit_counts(tally(again, np.full(N_BLOCKS, GAMMA), stands)))
    assert apart(trimmed, whole) <= noise + 0.01
    assert apart(trimmed, RIGHT) < 0.02


def test_so_do_records_of_a_trimmed_stream(streams: tuple[Array, Array, Array]) -> None:
    logits, accepted, verified = (a[:20_000] for a in streams)
    whole = fit_records(logits, accepted)
    trimmed = fit_records(logits, np.minimum(accepted, verified), verified)
    assert apart(trimmed, whole) < 0.03
    # Judged on what was trimmed away too, they are as good.
    assert record_errors(logits, accepted, None, trimmed).max() < 0.02


def test_counting_trimmed_tokens_as_rejected_is_visibly_biased(
    streams: tuple[Array, Array, Array],
) -> None:
    """The naive estimator: how many tokens of each draft stood, trimmed or not."""
    logits, accepted, verified = (a[:20_000] for a in streams)
    naive = fit_records(logits, np.minimum(accepted, verified))
    assert apart(naive, RIGHT) > 0.1
    assert record_errors(logits, accepted, None, naive).max() > 0.07


def test_dropping_blocks_whose_end_was_not_seen_is_visibly_biased_too(
    streams: tuple[Array, Array, Array],
) -> None:
    """The other naive one: keep a block at k if it was verified there *or rejected before*. What
    stands is then thrown away more often than what falls."""
    logits, accepted, verified = streams
    stood = np.minimum(accepted, verified)
    k = GAMMA - 1
    known = (verified > k) | (stood < verified)
    claimed = np.prod(confidence(logits[known], RIGHT), axis=1).mean()
    assert claimed - (stood[known] > k).mean() > 0.05
    right = verified > k
    claimed = np.prod(confidence(logits[right], RIGHT), axis=1).mean()
    assert abs(claimed - (stood[right] > k).mean()) < 0.01


def test_where_no_scaling_is_right_trimming_moves_the_fit_less_than_a_naive_one() -> None:
    logits, accepted = blocks(13, 20_000, np.ones(GAMMA))
    seen = logits + 0.25 * logits**2  # what the head says is bent
    verified = early_stop(seen)
    stood = np.minimum(accepted, verified)
    whole = fit_counts(tally(seen, np.full(len(seen), GAMMA), accepted))
    trimmed = fit_counts(tally(seen, verified, stood))
    naive = fit_records(seen, stood)
    assert apart(trimmed, whole) < 0.5 * apart(naive, whole)


# --- counts: taken in, forgotten -----------------------------------------------------------------


def test_reports_go_to_the_halves_in_turn_and_all_to_the_window() -> None:
    a, b = verdicts(1, 100), verdicts(2, 100)
    state = fed(CalibrationState(), a, b, a)
    counts = state.streams[KEY]
    A, B = array_of(a), array_of(b)
    assert (counts[FIT] == 2 * A).all()
    assert (counts[JUDGE] == B).all()
    assert (counts[WINDOW] == 2 * A + B).all()


@pytest.mark.parametrize("period", [1, 2, 3, 8, 20])
def test_no_rhythm_of_reports_fills_one_half_only(period: int) -> None:
    """Verdicts come with every period-th report."""
    halves = [half_of(n) for n in range(0, 200 * period, period)]
    assert halves.count(JUDGE) == pytest.approx(100, abs=8)
    assert half_of(0) == FIT


def test_one_call_sums_what_several_verifiers_saw_and_keeps_drafters_and_modes_apart() -> None:
    a = verdicts(1, 100)
    other = dataclasses.replace(a, drafter_id="e")
    sampled = dataclasses.replace(a, mode=REJECTION)
    state = absorb(CalibrationState(), [a, other, a, sampled], 0.0)
    assert (state.streams[KEY][FIT] == 2 * array_of(a)).all()
    assert (state.streams["e", GREEDY][FIT] == array_of(a)).all()
    assert (state.streams["d", REJECTION][FIT] == array_of(a)).all()


def test_counts_halve_in_a_half_life_and_a_stream_that_says_nothing_is_dropped() -> None:
    state = fed(CalibrationState(), verdicts(1, 100))
    later = absorb(state, [], HALF_LIFE_S)
    assert later.streams[KEY][FIT] == pytest.approx(state.streams[KEY][FIT] / 2)
    assert later.streams[KEY][WINDOW].sum() < 0.01
    assert absorb(state, [], 20 * HALF_LIFE_S).streams == {}


@pytest.mark.parametrize("elapsed_s", [-1e9, math.nan, -math.inf])
def test_a_clock_that_jumps_back_forgets_nothing(elapsed_s: float) -> None:
    state = fed(CalibrationState(), verdicts(1, 100))
    assert (absorb(state, [], elapsed_s).streams[KEY] == state.streams[KEY]).all()


def test_a_block_that_grew_longer_keeps_its_counts() -> None:
    short, long = verdicts(1, 100, TRUTH[:2]), verdicts(2, 100)
    state = fed(CalibrationState(), short, short, long, short)
    counts = state.streams[KEY]
    assert counts.shape == (3, 2, GAMMA, CONFIDENCE_BINS)
    assert (counts[FIT][:, :2] == (array_of(short) + array_of(long)[:, :2])).all()


def test_the_state_is_a_value() -> None:
    before = fed(CalibrationState(), verdicts(1, 100))
    kept = before.streams[KEY].copy()
    fed(before, verdicts(2, 100), elapsed_s=5.0)
    assert (before.streams[KEY] == kept).all()
    with pytest.raises(ValueError, match="read-only"):
        before.streams[KEY][0, 0, 0, 0] = 1.0


# --- tables that drafters ship -----------------------------------------------------------------


SHIPPED = (CalibrationTable(*KEY, (2.0,) * 7),)


def few_at_the_end(seed: int) -> VerdictCounts:
    """Only positions 1 and 2 are reached MIN_VERDICTS times."""
    logits, accepted = blocks(seed, 6000, np.array([3.0, 3.0, *[2.0] * 5]))
    judged = np.where(np.arange(6000) < 400, 7, 2)
    return counts_of(tally(logits, judged, np.minimum(accepted, judged)))


def test_a_refit_begins_with_what_a_drafter_shipped() -> None:
    """Where too few verdicts came to fit anything, it stays; and drift is measured against it."""
    state = fed(ship(CalibrationState(), SHIPPED), few_at_the_end(1), few_at_the_end(2))
    assert state.calibration == Calibration(0)  # nothing is published that all know
    fitted = refit(state)
    assert fitted.calibration.version == 1
    table = of(fitted, 7)
    assert apart(table[:, :2], pure([3.0, 3.0])) < 0.02
    assert (table[:, 2:] == pure([2.0] * 5)).all()
    right = fed(ship(CalibrationState(), SHIPPED), verdicts(3, 4000, np.full(7, 2.0)))
    (seen,) = drift(right)
    assert seen.error < 2 * seen.noise
    assert refit(right).calibration.version == 0


def test_a_fitted_table_outlives_what_is_shipped_again() -> None:
    state = ship(in_use([1.5]), SHIPPED)
    assert (scaling_for(state.in_use, *KEY, 7) == pure([1.5] * 7)).all()


def test_shipped_tables_have_a_bound_and_the_newest_stay() -> None:
    state = CalibrationState()
    for i in range(MAX_SHIPPED + 9):
        state = ship(state, [CalibrationTable(f"{i}", GREEDY, (2.0,))])
        state = ship(state, [CalibrationTable("known", GREEDY, (float(i + 1),))])
    assert len(state.shipped) == MAX_SHIPPED
    assert state.shipped[-1].temperatures == (MAX_SHIPPED + 9.0,)


# --- refits --------------------------------------------------------------------------------------


def test_a_miscalibrated_drafter_is_calibrated_and_then_left_alone() -> None:
    state = fed(CalibrationState(), verdicts(1, 20_000), verdicts(2, 20_000))
    better = refit(state)
    assert better.calibration.version == 1
    assert apart(of(better), RIGHT) < 0.02
    assert refit(better) is better
    more = fed(better, *(verdicts(seed, 5000) for seed in range(3, 9)), elapsed_s=1.0)
    assert refit(more).calibration.version <= 2


def test_tables_of_drafters_that_are_gone_make_room_for_new_ones() -> None:
    """Out goes who was not heard of for longest, and first of all whose verdicts are forgotten."""
    seen = fed(CalibrationState(), verdicts(1, 20_000), verdicts(2, 20_000)).streams[KEY]

    def drafters(*numbers: int) -> dict[tuple[str, SamplingMode], Array]:
        return {(f"d{i}", GREEDY): seen for i in numbers}

    state = refit(CalibrationState(streams=drafters(*range(MAX_TABLES))))
    assert len(state.calibration.tables) == MAX_TABLES, "all have a place"
    state = dataclasses.replace(
        state, streams=drafters(*(i for i in range(MAX_TABLES + 3) if i != 30))
    )
    for i in range(5):
        state = absorb(state, [dataclasses.replace(verdicts(3, 10), drafter_id=f"d{i}")], 0.0)
    ids = {table.drafter_id for table in refit(state).calibration.tables}
    assert ids == {f"d{i}" for i in range(MAX_TABLES + 3)} - {"d30", "d5", "d6"}


def test_too_few_verdicts_change_nothing() -> None:
    one = np.zeros((2, 1, CONFIDENCE_BINS), int)
    one[0, 0, 18] = MIN_VERDICTS - 1
    enough = one + 1 * (one > 0)
    rng_free = counts_of(one), counts_of(one)
    assert refit(fed(CalibrationState(), *rng_free)).calibration.version == 0
    assert (
        refit(fed(CalibrationState(), counts_of(enough), counts_of(one))).calibration.version == 0
    )
    assert (
        refit(fed(CalibrationState(), counts_of(enough), counts_of(enough))).calibration.version
        == 1
    )


def test_a_position_with_few_verdicts_has_no_fit() -> None:
    counts = np.zeros((2, 2, CONFIDENCE_BINS))
    counts[0, :, 10] = MIN_VERDICTS, MIN_VERDICTS - 1
    counts[1] = counts[0] / 2
    assert np.isnan(fit_counts(counts)).tolist() == [[False, True]] * 2


def test_the_most_likely_scaling_of_counts() -> None:
    """No step to the side is better, and as many stand as are said to; without need the offset in
    use stays."""
    logits, accepted = blocks(4, 20_000, shift=0.6)
    counts = tally(logits, np.full(len(logits), GAMMA), accepted)
    fitted = fit_counts(counts)
    best = log_likelihood(counts, fitted)
    for t, b in ((1.022, 0.0), (1 / 1.022, 0.0), (1.0, 0.02), (1.0, -0.02)):
        aside = fitted * [[t], [1.0]] + [[0.0], [b]]
        assert (log_likelihood(counts, aside) < best).all()
    reached, stood = counts
    said = (reached * confidence(BIN_LOGITS, fitted[:, :, None])).sum(axis=1)
    assert said == pytest.approx(stood.sum(axis=1), rel=2e-3)
    near = fitted[1] + 0.05
    assert (fit_counts(counts, near)[1] == near).all()


@pytest.mark.parametrize("share", [0, 1])
def test_where_all_or_none_stood_the_offset_has_a_bound(share: int) -> None:
    counts = np.zeros((2, 1, CONFIDENCE_BINS))
    counts[:, 0, 10] = MIN_VERDICTS, share * MIN_VERDICTS
    t, b = fit_counts(counts)[:, 0]
    assert abs(b) <= MAX_OFFSET
    assert confidence(BIN_LOGITS[10], (t, b)) == pytest.approx(share, abs=1e-3)


def test_only_positions_with_enough_verdicts_move() -> None:
    logits, accepted = blocks(1, 20_000)
    verified = np.full(len(logits), 2)
    report = counts_of(tally(logits, verified, np.minimum(accepted, 2)))
    state = refit(fed(in_use([1.0, 1.0, 3.0, 3.5, 4.0, 4.5]), report, report))
    assert apart(of(state, 2), RIGHT[:, :2]) < 0.02
    assert (of(state, 6)[:, 2:] == pure([3.0, 3.5, 4.0, 4.5])).all()


@given(st.integers(0, 2**32), st.floats(0.3, 3.0), st.integers(300, 4000))
@settings(max_examples=60, deadline=None)
def test_a_worse_fit_never_replaces_a_better_one(seed: int, t: float, N: int) -> None:
    """Whatever the half that fits says (here: another drafter's verdicts), what is rolled out is
    better at each position on the half that it has not seen."""
    rng = np.random.default_rng(seed)
    start = in_use([t] * GAMMA, 7)
    lies = verdicts(seed, N, rng.uniform(0.3, 3.0, GAMMA))
    state = fed(start, lies, verdicts(seed + 1, N))
    after = refit(state)
    held_out = state.streams[KEY][JUDGE]
    moved = (of(after) != of(state)).any(axis=0)
    gain = log_likelihood(held_out, of(after)) - log_likelihood(held_out, of(state))
    assert (gain[moved] > 0).all()
    assert after.calibration.version == 7 + moved.any()


def test_noise_rarely_replaces_the_truth() -> None:
    """The table in use is right; 40 streams of new verdicts may not talk it away more than the
    2.3 % of two standard errors, at γ positions each."""
    moved = 0
    for seed in range(40):
        state = fed(in_use(TRUTH.tolist()), verdicts(2 * seed, 3000), verdicts(2 * seed + 1, 3000))
        moved += int(np.count_nonzero((of(refit(state)) != RIGHT).any(axis=0)))
    assert moved <= 0.05 * 40 * GAMMA


def test_it_follows_a_change_of_traffic() -> None:
    state = fed(CalibrationState(), *(verdicts(seed, 5000) for seed in range(8)), elapsed_s=60.0)
    state = refit(state)
    changed = TRUTH[::-1].copy()
    for seed in range(60):
        state = refit(fed(state, verdicts(100 + seed, 2000, changed), elapsed_s=60.0))
    assert apart(of(state), pure(changed)) < 0.03


# --- drift ---------------------------------------------------------------------------------------


def test_drift_is_noise_while_the_table_is_right_and_error_when_it_is_not() -> None:
    right = fed(in_use(TRUTH.tolist()), verdicts(1, 5000), verdicts(2, 5000))
    (good,) = drift(right)
    assert (good.drafter_id, good.mode) == KEY
    assert good.error < 1.6 * good.noise
    (bad,) = drift(fed(in_use([0.5] * GAMMA), verdicts(1, 5000), verdicts(2, 5000)))
    assert bad.error > 0.1 > 5 * bad.noise


def test_drift_looks_at_the_newest_verdicts_only() -> None:
    state = fed(in_use(TRUTH.tolist()), *(verdicts(seed, 5000) for seed in range(6)))
    state = fed(state, verdicts(50, 5000, TRUTH[::-1].copy()), elapsed_s=300.0)
    (now,) = drift(state)
    assert now.error > max(0.05, 3 * now.noise)
    assert drift(absorb(state, [], 3600.0)) == []


def test_drift_is_the_mean_gap_written_out() -> None:
    counts = np.zeros((2, 1, CONFIDENCE_BINS), int)
    counts[:, 0, 4], counts[:, 0, 15] = (100, 30), (300, 200)
    (found,) = drift(fed(in_use([2.0]), counts_of(counts)))
    c = confidence(BIN_LOGITS[[4, 15]], (2.0, 0.0))
    gap = abs(30 - 100 * c[0]) + abs(200 - 300 * c[1])
    assert found.error == pytest.approx(gap / 400)
    assert found.verdicts == 400


# --- tables --------------------------------------------------------------------------------------


def test_scaling_for_a_block() -> None:
    table = CalibrationTable("d", GREEDY, (2.0, 1.5), (0.5, -0.25))
    calibration = Calibration(3, (table, CalibrationTable("d", SamplingMode.COUPLED, (3.0,))))
    found = scaling_for(calibration, "d", GREEDY, 4)
    assert found.tolist() == [[2.0, 1.5, 1.5, 1.5], [0.5, -0.25, -0.25, -0.25]]
    assert scaling_for(calibration, "d", GREEDY, 1).tolist() == [[2.0], [0.5]]
    assert scaling_for(calibration, "d", GREEDY, 0).shape == (2, 0)
    assert scaling_for(calibration, "d", SamplingMode.COUPLED, 2).tolist() == [[3.0] * 2, [0.0] * 2]
    for unknown in (("d", REJECTION), ("other", GREEDY)):
        assert scaling_for(calibration, *unknown, 2).tolist() == [[1.0] * 2, [0.0] * 2]
    assert scaling_of(table).dtype == np.float64
