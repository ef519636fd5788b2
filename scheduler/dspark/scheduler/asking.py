"""Who asks for drafts after a step, and for how long ones: one decision for all its requests. Pure.

A batch of drafts that is waited for is waited for as long however few are in it, so no request has
a price of its own: charged the whole wait, each stays out because the others do. The rule weighs
sets (`askers`), with D(n), the seconds until n drafts are back, learnt from those that came
(`DraftCost`).

What could keep everybody out for good, and what is done about it:
- a first reply that paid for warming up: until WARM replies are in, drafts count as free, and the
  quickest of them is believed;
- a drafter that was slow for a while: a reply in 1 / ANEW of the time D says starts D anew;
- few askers that make many look dear: what D grows by for each draft is remembered longer than how
  long it takes, and those left out are probed together, which shows D where many ask;
- few askers that make verifying look dear: probed together they share what a step pays only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.scheduler.step_cost import MAX_SECONDS

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

# The share of step time that probing requests whose drafts do not pay may cost (design.md §8).
PROBE_SHARE = 0.01
# Weight of the newest reply in the mean of D, and in what D grows by for each draft: the latter
# needs replies to different n, which may be few and far between.
LEVEL_RATE = 0.1
SLOPE_RATE = 0.02
# Replies until D counts as known.
WARM = 5
# A reply is taken to have lasted at most this many times D, four deviations and a moment more: a
# hiccup moves D by a tenth, a drafter that got ten times slower is known in about 25 replies.
SURPRISE = 2.0
MOMENT_S = 1e-4
# Replies are late by accident, but not this many times too early: that is another drafter's pace.
ANEW = 4.0
# Of a block's reach that each shorter verify length takes back: after ten rounds it is forgotten.
REACH_RATE = 1 / 8
# How much spread of n, as a share of the mean's square, it takes to believe the slope seen rather
# than that all of D goes with n. That belief invites few to ask, and so corrects itself.
SPREAD = 0.002


class DraftCost:
    """D(n) = a + b·n seconds, a and b ≥ 0: from asking for n drafts together until they are back.

    D passes through the means of the newest replies; b is a least-squares slope that forgets more
    slowly. seen: replies. deviation: running mean of |reply − D| in seconds. Not thread-safe.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.deviation = 0.0
        self._n = self._s = 0.0  # means of the newest replies
        self._old_n = self._old_s = self._nn = self._ns = 0.0  # slow means, variance, covariance

    @property
    def known(self) -> bool:
        """Whether enough replies are in to decide by."""
        return self.seen >= WARM

    @property
    def line(self) -> tuple[float, float]:
        """(a, b)."""
        if not self.seen:
            return 0.0, 0.0
        most = self._s / self._n
        prior = SPREAD * self._n**2
        b = min(max((self._ns + prior * most) / (self._nn + prior), 0.0), most)
        return max(self._s - b * self._n, 0.0), b

    def seconds(self, n: int) -> float:
        """D(n); D(0) and D before the first reply are 0."""
        a, b = self.line
        return a + b * n if n > 0 else 0.0

    def curve(self, most: int) -> FloatArray:
        """float64 [most + 1]: D(0), …, D(most)."""
        a, b = self.line
        seconds: FloatArray = a + b * np.arange(most + 1, dtype=np.float64)
        seconds[0] = 0.0
        return seconds

    def observe(self, n: int, seconds: float) -> None:
        """Take in a reply to n drafts asked for; what is no measurement is ignored."""
        if n < 1 or not 0 <= seconds <= MAX_SECONDS:
            return
        expected = self.seconds(n)
        quick = seconds < (expected if not self.known else expected / ANEW)
        anew = quick or not self.seen
        if not anew:
            seconds = min(seconds, SURPRISE * expected + 4 * self.deviation + MOMENT_S)
        self._learn_slope(n, seconds)
        self.seen += 1
        if anew:
            self._n, self._s, self.deviation = float(n), seconds, seconds / 2
            return
        self.deviation += LEVEL_RATE * (abs(seconds - expected) - self.deviation)
        self._n += LEVEL_RATE * (n - self._n)
        self._s += LEVEL_RATE * (seconds - self._s)

    def _learn_slope(self, n: int, seconds: float) -> None:
        rate = max(SLOPE_RATE, 1 / (self.seen + 1))
        off_n, off_s = n - self._old_n, seconds - self._old_s
        self._old_n += rate * off_n
        self._old_s += rate * off_s
        self._nn = (1 - rate) * (self._nn + rate * off_n * off_n)
        self._ns = (1 - rate) * (self._ns + rate * off_n * off_s)


def askers(
    savings: ArrayLike,
    cost: DraftCost | Sequence[DraftCost],
    hidden_s: float,
    *,
    unasked: ArrayLike,
    step_s: float,
    bypassed: ArrayLike | None = None,
    drafter: ArrayLike | None = None,
) -> IntArray:
    """Which of R requests to ask for drafts now: indices, increasing.

    savings [R]: mean seconds that a request's draft saves a round (`planner.saving`), NaN or None
    before its first. hidden_s: seconds of drafting that pass behind other work. unasked [R]: rounds
    since each was asked for, this one included. step_s > 0: of a step, for probes. bypassed [R]:
    whom the scheduler's plan leaves alone. cost: of the drafter, or of several that answer at the
    same time; then drafter [R]: whose number in `cost` drafts for each.

    The set that maximises Σ saving − max_d max(0, D_d(n_d) − hidden_s), n_d those of it that d
    drafts for, with all whom nobody knows yet; of equal sets the quickest, then the smallest. The
    rest is probed together as often as PROBE_SHARE of step time pays for, that is every round where
    drafting hides behind other work. Uses the past only.
    """
    saving = np.asarray(savings, np.float64)
    if not len(saving):
        return np.zeros(0, np.intp)
    costs = [cost] if isinstance(cost, DraftCost) else cost
    whose = np.zeros(len(saving), np.intp) if drafter is None else np.asarray(drafter, np.intp)
    free = np.ones(len(saving), np.bool_) if bypassed is None else ~np.asarray(bypassed, np.bool_)
    chosen: NDArray[np.bool_] = free & np.isnan(saving)

    # By drafter, with n = 0, 1, … of those that pay besides the chosen: what they save, the wait.
    ranks = [_ranked(saving, free & (whose == d)) for d in range(len(costs))]
    worths = [np.cumsum(np.concatenate(([0.0], saving[rank]))) for rank in ranks]
    sizes = np.bincount(whose, minlength=len(costs)).tolist()
    curves = [_exposed(c, n, hidden_s) for c, n in zip(costs, sizes, strict=True)]
    sure = np.bincount(whose[chosen], minlength=len(costs)).tolist()
    waits = [w[f : f + len(r) + 1] for w, f, r in zip(curves, sure, ranks, strict=True)]

    # Whoever answers within the longest wait of all may as well be asked.
    longest = np.unique(np.concatenate(waits))
    longest = longest[longest >= max(wait[0] for wait in waits)]
    within = [np.searchsorted(wait, longest, "right") - 1 for wait in waits]
    gain = -longest
    for worth, n in zip(worths, within, strict=True):
        gain += worth[n]
    best = int(gain.argmax())
    for rank, n in zip(ranks, within, strict=True):
        chosen[rank[: n[best]]] = True

    rest = np.flatnonzero(~chosen)
    probe_s = max(curve[-1] for curve in curves) - float(longest[best])
    if len(rest) and np.asarray(unasked)[rest].max() >= probe_rounds(probe_s, step_s):
        chosen[rest] = True
    return np.flatnonzero(chosen)


def afforded(blocks: ArrayLike, savings: ArrayLike, tokens: int) -> IntArray:
    """Of R requests that would ask for blocks [R] of draft tokens, those that a drafter's budget of
    so many tokens is enough for: indices, increasing.

    Those first whose drafts save most (savings [R], seconds), and before them those that nobody
    knows yet (NaN). Who is short waits for the budget to fill and all behind it with it: short
    blocks that slip past would keep a long one out for good.
    """
    blocks, saving = np.asarray(blocks, np.intp), np.asarray(savings, np.float64)
    order = np.argsort(-np.where(np.isnan(saving), np.inf, saving), kind="stable")
    return np.sort(order[np.cumsum(blocks[order]) <= tokens])


def reach(now: ArrayLike, verified: ArrayLike) -> FloatArray:
    """How many draft tokens are worth asking for, of requests that had `now` and of whose drafts
    `verified` tokens were verified, each [R]: one more than lately, so that it grows again.

    A parallel drafter's work goes with the tokens of a block, and its first ones are as good in a
    shorter one (docs/decisions/2026-11-30-what-drafting-costs.md).
    """
    then, more = np.asarray(now, np.float64), np.asarray(verified, np.float64) + 1.0
    return np.maximum(more, then + REACH_RATE * (more - then))


def blocks(
    longest: ArrayLike,
    reaches: ArrayLike,
    probed: ArrayLike,
    seconds: ArrayLike,
    step_s: float,
) -> IntArray:
    """Draft tokens [R] to ask for, of those that are asked. longest [R]: that there may be. reaches
    [R]: NaN before the first draft. probed [R]: whose drafts are asked for to see what they are
    worth, so whole. seconds [R]: of the drafts that are asked for with each; next to nothing asks
    for whole ones."""
    most, wanted = np.asarray(longest, np.intp), np.asarray(reaches, np.float64)
    free = np.asarray(seconds, np.float64) <= PROBE_SHARE * step_s
    whole = free | np.asarray(probed, np.bool_) | np.isnan(wanted)
    tokens: IntArray = np.minimum(np.where(whole, most, np.rint(wanted)), most).astype(np.intp)
    return tokens


def probe_rounds(probe_s: float, step_s: float) -> int:
    """Rounds from one probe of probe_s seconds to the next that keep probing within PROBE_SHARE of
    the steps' time. What a probe's tokens cost in the step is the planner's to refuse."""
    return max(1, math.ceil(probe_s / (PROBE_SHARE * step_s)))


def _ranked(saving: FloatArray, among: NDArray[np.bool_]) -> IntArray:
    """Those whose drafts save anything, the most first."""
    pays = np.flatnonzero(among & (saving > 0))
    ranked: IntArray = pays[np.argsort(-saving[pays], kind="stable")]
    return ranked


def _exposed(cost: DraftCost, most: int, hidden_s: float) -> FloatArray:
    """Seconds [most + 1] that nothing hides of drafting for n, non-decreasing."""
    seconds = cost.curve(most) if cost.known else np.zeros(most + 1)
    exposed: FloatArray = np.maximum(seconds - hidden_s, 0.0)
    return exposed
