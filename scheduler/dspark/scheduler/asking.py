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

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

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
# Weight of a step's drafts in what is usual. Many requests' means, and while nobody is asked probes
# alone: three that surprise must be enough.
USUAL_RATE = 0.3
# Weight of the newest reply in what a token of context takes.
CONTEXT_RATE = 0.3
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
    slowly. Context beyond a round's own few tokens, a prompt that a drafter is told, costs it once:
    what replies took longer for that is `context_s` a token, and no part of D. seen: replies.
    deviation: running mean of |reply − D| in seconds. Not thread-safe.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.deviation = 0.0
        self.context_s = 0.0
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

    def seconds(self, n: int, context: int = 0) -> float:
        """D(n), and what so many tokens of context take; D(0) and D before the first reply are
        0."""
        a, b = self.line
        return a + b * n + self.context_s * context if n > 0 else 0.0

    def observe(self, n: int, seconds: float, context: int = 0) -> None:
        """Take in a reply to n drafts asked for; what is no measurement is ignored."""
        if n < 1 or not 0 <= seconds <= MAX_SECONDS:
            return
        expected = self.seconds(n)
        if context and self.seen:
            a_token_s = max(seconds - expected, 0.0) / context
            rate = CONTEXT_RATE if self.context_s else 1.0
            self.context_s += rate * (a_token_s - self.context_s)
            # What is left says little: never that another drafter's pace begins.
            seconds = max(seconds - self.context_s * context, expected / ANEW)
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


@dataclass(frozen=True, slots=True)
class Beside:
    """What may happen while drafts are under way. hidden_s: seconds of drafting that pass behind
    other work. apart_s: what it costs that the others' step is without those who are asked. most:
    how many may be asked so, those that save most; None for all."""

    hidden_s: float = 0.0
    apart_s: float = 0.0
    most: int | None = None


# Everybody waits for the drafts.
WAITING = Beside()


def askers(
    savings: Sequence[float],
    cost: DraftCost | Sequence[DraftCost],
    beside: Sequence[Beside] = (WAITING,),
    *,
    unasked: Sequence[int],
    step_s: float,
    bypassed: Sequence[bool] | None = None,
    drafter: Sequence[int] | None = None,
) -> list[int]:
    """Which of R requests to ask for drafts now: indices, increasing.

    savings [R]: mean seconds that a request's draft saves a round (`planner.saving`), NaN before
    its first. beside: what may be done meanwhile, one of which is for all R. unasked [R]: rounds
    since each was asked for, this one included. step_s > 0: of a step, for probes. bypassed [R]:
    whom the scheduler's plan leaves alone. cost: of the drafter, or of several that answer at the
    same time; then drafter [R]: whose number in `cost` drafts for each.

    The set that maximises Σ saving − max_d max(0, D_d(n_d) − hidden_s) − apart_s over what may be
    done meanwhile, n_d those of it that d drafts for; asking nobody costs nothing. With all whom
    nobody knows yet; of equal sets the quickest, then the smallest. The rest is probed together as
    often as PROBE_SHARE of step time pays for, that is every round where drafting hides behind
    other work. Uses the past only.
    """
    R = len(savings)
    if not R:
        return []
    costs = [cost] if isinstance(cost, DraftCost) else cost
    whose = [0] * R if drafter is None else drafter
    free = range(R) if bypassed is None else [i for i in range(R) if not bypassed[i]]
    new = [i for i in free if math.isnan(savings[i])]
    paying = sorted((i for i in free if savings[i] > 0), key=lambda i: -savings[i])
    least = min(_prices(one, 0, 1, way)[1] for one in costs for way in beside)
    if not new and sum(savings[i] for i in paying) <= least:
        paying = []  # not even all of them are worth one draft's time
    rooms = [R if way.most is None else way.most for way in beside]
    _, price_s, chosen = max(
        (
            _best(new, paying[: room - len(new)], savings, costs, whose, way)
            for way, room in zip(beside, rooms, strict=True)
            if room >= len(new)
        ),
        key=lambda best: best[0],
    )
    rest = set(range(R)).difference(chosen)
    if rest:
        all_s = min(
            max(_prices(one, whose.count(d), 0, way)[0] for d, one in enumerate(costs))
            for way in beside
            if way.most is None or way.most >= R
        )
        if max(unasked[i] for i in rest) >= probe_rounds(all_s - price_s, step_s):
            return list(range(R))
    return sorted(chosen)


def _best(
    new: list[int],
    paying: list[int],
    savings: Sequence[float],
    costs: Sequence[DraftCost],
    whose: Sequence[int],
    way: Beside,
) -> tuple[float, float, list[int]]:
    """(gain, price, requests): of the sets of all that are new and some that pay, who come the best
    first, the one that gains most. Seconds."""
    ranks = [[i for i in paying if whose[i] == d] for d in range(len(costs))]
    prices = [
        _prices(one, sum(whose[i] == d for i in new), len(rank), way)
        for d, (one, rank) in enumerate(zip(costs, ranks, strict=True))
    ]
    worths = [list(itertools.accumulate((savings[i] for i in r), initial=0.0)) for r in ranks]
    least = max(price[0] for price in prices)
    # Whoever answers within the longest wait of all may as well be asked.
    longest = sorted({s for price in prices for s in price if s >= least})
    within = [[bisect_right(price, s) - 1 for price in prices] for s in longest]
    gains = [
        sum(worth[n] for worth, n in zip(worths, numbers, strict=True)) - s
        for s, numbers in zip(longest, within, strict=True)
    ]
    best = gains.index(max(gains))
    asked = [i for rank, n in zip(ranks, within[best], strict=True) for i in rank[:n]]
    return gains[best], longest[best], new + asked


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


class UsualSavings:
    """What a request's draft saved lately where about as many decoded, seconds a round: by powers
    of two of R, as drafts that pay alone do not among many. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # mean, mean distance from it

    def learn(self, R: int, savings: Sequence[float]) -> None:
        """savings: running means of those of R requests whose drafts a step had, at least 1."""
        mean = sum(savings) / len(savings)
        spread = sum(abs(saving - mean) for saving in savings) / len(savings)
        known = self._seen.get(R.bit_length())
        if known is not None:
            old, apart = known
            spread = apart + USUAL_RATE * (max(spread, abs(mean - old)) - apart)
            mean = old + USUAL_RATE * (mean - old)
        self._seen[R.bit_length()] = mean, spread

    def of(self, R: int) -> float:
        """What a newcomer among R may well save: a little more than is usual, by as much as
        requests differ. NaN where nobody knows."""
        mean, spread = self._seen.get(R.bit_length(), (math.nan, 0.0))
        return mean + spread


def supposed(savings: Sequence[float], usual: float = math.nan) -> list[float]:
    """Savings [R] with newcomers, NaN, taken to be like the mean of those that are known, where
    these are as many at least, else as is `usual`. Short answers under a load at which drafts do
    not pay would else be drafted for at each beginning; what a newcomer is worth shows when it is
    asked or probed."""
    known = [saving for saving in savings if not math.isnan(saving)]
    new = usual
    if known and 2 * len(known) >= len(savings):
        new = sum(known) / len(known)
    return [new if math.isnan(saving) else saving for saving in savings]


def reach(now: float, verified: int) -> float:
    """How many draft tokens are worth asking for, of a request that had `now` and of whose draft
    `verified` tokens were verified: one more than lately, so that it grows again.

    A parallel drafter's work goes with the tokens of a block, and its first ones are as good in a
    shorter one (docs/decisions/2026-11-30-what-drafting-costs.md).
    """
    return max(verified + 1.0, now + REACH_RATE * (verified + 1.0 - now))


def block(longest: int, reached: float, drafting_s: float, step_s: float, *, probed: bool) -> int:
    """Draft tokens to ask for, of a request that is asked. longest: that there may be. reached: see
    `reach`, NaN before the first draft. drafting_s: of the drafts that are asked for with it; next
    to nothing asks for a whole one. probed: to see what a draft is worth, so whole."""
    if probed or math.isnan(reached) or drafting_s <= PROBE_SHARE * step_s:
        return longest
    return min(round(reached), longest)


def probe_rounds(probe_s: float, step_s: float) -> int:
    """Rounds from one probe of probe_s seconds to the next that keep probing within PROBE_SHARE of
    the steps' time. What a probe's tokens cost in the step is the planner's to refuse."""
    return max(1, math.ceil(probe_s / (PROBE_SHARE * step_s)))


def _prices(cost: DraftCost, first: int, more: int, beside: Beside) -> list[float]:
    """Seconds [more + 1] that drafting for `first`, `first` + 1, … takes: what nothing hides of it,
    and being apart. Nothing while nobody knows."""
    if not cost.known:
        return [0.0] * (more + 1)
    a, b = cost.line
    return [
        max(a + b * n - beside.hidden_s, 0.0) + beside.apart_s if n else 0.0
        for n in range(first, first + more + 1)
    ]
