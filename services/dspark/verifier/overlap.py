"""Drafting beside verifying: how many groups, and how long a step waits for drafts. Pure.

A round is drafted in D seconds somewhere else and verified in T seconds here. What is *ready* can
be stepped now; of what is *under way* only an expectation is known. Loads are counted in sequences
and in verify lengths that were usual in past rounds, never in what a draft in hand says: who is in
a step may not depend on a token of it (design.md §4, L2). When a reply comes is a function of load
and of the past as well; a drafter that delays one by what it drew is an authenticated liar, and no
worse than one that lies about q.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

# What a step costs is known to a few percent: another number of groups must promise more.
CLEARLY = 0.05
# Seconds of the shortest wait: a reply that is due this instant is not asked for in a busy loop.
SHORTEST_S = 1e-4


@dataclass(frozen=True, slots=True)
class Load:
    """What a step holds. P: prefill tokens. R: decoding requests. drafts: tokens that are verified
    for them, as usual. context: tokens of KV of all."""

    P: int = 0
    R: int = 0
    drafts: float = 0.0
    context: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.P + other.P,
            self.R + other.R,
            self.drafts + other.drafts,
            self.context + other.context,
        )

    @property
    def empty(self) -> bool:
        return not (self.P or self.R)

    @property
    def plain(self) -> Load:
        """The same without drafts."""
        return replace(self, drafts=0.0)

    @property
    def decoding(self) -> Load:
        """The same without prompts."""
        return replace(self, P=0)

    def part(self, R: int) -> Load:
        """What R of its requests bring."""
        share = R / self.R if self.R else 0.0
        return Load(0, R, self.drafts * share, round(self.context * share))


# Seconds of a step; of an empty one 0.
StepSeconds = Callable[[Load], float]


@dataclass(frozen=True, slots=True)
class Work:
    """A part of a step, and the tokens that it should commit."""

    load: Load = field(default_factory=Load)
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What could be stepped now. again: of it, what is ready again as soon as it was stepped."""

    load: Load = field(default_factory=Load)
    tokens: float = 0.0
    again: Work = field(default_factory=Work)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Sequences whose drafts were asked for together. load: of the step that verifies them. tokens:
    that it should commit. remaining_s: until they are here. late: it takes longer than it ever
    should. saving_s: what they save a round, as it was when they were asked for; infinite where
    they were whatever they are worth, to learn it or because an operator said so."""

    load: Load
    tokens: float
    remaining_s: float
    late: bool = False
    saving_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """wait_s: until the next look, 0 to step now. given_up: indices of those that step plainly."""

    wait_s: float = 0.0
    given_up: tuple[int, ...] = ()


def remaining(expected_s: float, deviation_s: float, elapsed_s: float) -> tuple[float, bool]:
    """(seconds until a reply, whether it is late), asked for `elapsed_s` ago.

    Until the mean the rest of it; after that a deviation, or as long again as it is overdue. Beyond
    one deviation it is late: nothing is known then but that it takes longer than ever, so a reply
    that never comes looks further away with each look, and every wait for it ends.
    """
    if elapsed_s < expected_s:
        return max(expected_s - elapsed_s, SHORTEST_S), False
    overdue_s = elapsed_s - expected_s
    return max(overdue_s, deviation_s, SHORTEST_S), overdue_s >= deviation_s


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second by the number of groups."""

    one: float
    two: float


def rates(linked: Work, beside: Work, T: StepSeconds, D: Callable[[int], float]) -> Rates:
    """What one and two groups of R requests that are drafted elsewhere commit. beside: what is in
    every step anyway.

    Two groups of R/2: while one is verified the other is drafted. The engine is busy all the time
    if D is shorter than T, and a round takes both steps; else a group's round is its own step and
    its drafts: max(2·T(R/2), T(R/2) + D(R/2)).
    One group: all are verified, then all are drafted: T(R) + D(R). Meanwhile what is beside may be
    stepped alone, and then they wait for the longer of both.
    """
    half = linked.load.part(ceil(linked.load.R / 2))
    all_s, half_s = T(beside.load + linked.load), T(beside.load + half)
    draft_s = D(linked.load.R)
    both = linked.tokens + 2 * beside.tokens
    idle = (linked.tokens + beside.tokens) / (all_s + draft_s)
    filled = both / (all_s + max(T(beside.load), draft_s))
    return Rates(max(idle, filled), both / max(2 * half_s, half_s + D(half.R)))


def apart(some: Load, all_: Load, T: StepSeconds) -> float:
    """Seconds that a step of some takes on top of their share of one of all, both without drafts:
    what it costs to step them while the others are drafted for."""
    if not some.R:
        return 0.0
    share = some.R / all_.R  # of all it is 1, not nearly
    return max(T(some.plain) - share * T(all_.plain), 0.0)


def groups(now: int, R: int, rates: Rates) -> int:
    """1 or 2: whichever commits more, the present number unless the other clearly does."""
    if R < 2:
        return 1
    if now == 1:
        return 2 if rates.two > (1 + CLEARLY) * rates.one else 1
    return 1 if rates.one > (1 + CLEARLY) * rates.two else 2


def pays(awaited: Awaited, beside: Load, T: StepSeconds) -> bool:
    """Whether to wait on for drafts that are late rather than step their sequences plainly with
    what is ready.

    Tokens a second: with drafts they commit `tokens` by the end of δ + T, plainly R by the end of
    a step without. Of what is ready prompts are left out of both times: they are computed once,
    whatever is waited for.
    """
    load = awaited.load
    plain_s = T(beside.decoding + load.plain)
    drafts_s = T(beside + load) - T(beside + load.plain)
    return awaited.tokens * plain_s >= load.R * (awaited.remaining_s + plain_s + drafts_s)


def joining(ready: Ready, awaited: Sequence[Awaited], T: StepSeconds) -> float:
    """Seconds to let ready work stand so that others join its step; 0 to step it now.

    For W, all that should be here within δ, and S the ready work, of which A is ready again as soon
    as it was stepped (nobody drafts for it, or a drafter in this process does):
    now:  S runs while W is drafted, then W with A:  max(T(S), δ) + T(A ∪ W)
    wait: nothing runs, then all together:           δ + T(S ∪ W)
    The first commits A's tokens once more than the second; where A is empty both do the same, and
    the one that ends sooner is better. What comes after S is done anyway, δ ≥ T(S), is not waited
    for.
    """
    best, wait_s, together, tokens = 1.0, 0.0, Load(), 0.0
    ready_s = T(ready.load)
    in_turn = sorted(awaited, key=lambda a: a.remaining_s)
    for delta, those in itertools.groupby(in_turn, key=lambda a: a.remaining_s):
        if delta >= ready_s:
            break
        for one in those:
            together += one.load
            tokens += one.tokens
        now_s = ready_s + T(ready.again.load + together)
        later_s = delta + T(ready.load + together)
        # Tokens a second of waiting by those of stepping now.
        gain = (ready.tokens + tokens) * now_s / later_s
        gain /= ready.tokens + tokens + ready.again.tokens
        if gain > best:
            best, wait_s = gain, delta
    return wait_s


def loses_by_waiting(first: Awaited, then: Awaited | None, T: StepSeconds) -> bool:
    """Whether an engine with nothing ready had better not wait for the drafts that come first.

    Waiting costs their time. Stepping their sequences plainly costs what they save, and hides less
    of the wait for those that come next, who would be stepped plainly in turn if that costs less.
    """
    wait_s, give_up_s = first.remaining_s, first.saving_s
    if then is not None:
        later_s = then.remaining_s - first.remaining_s - T(first.load)
        wait_s += min(max(later_s, 0.0), then.saving_s)
        give_up_s += min(max(then.remaining_s - T(first.load.plain), 0.0), then.saving_s)
    return give_up_s < wait_s


def decide(ready: Ready, awaited: Sequence[Awaited], T: StepSeconds, *, full: bool) -> Decision:
    """What to do now with what is ready and what is under way.

    Given up are late ones that do not pay any more, and with nothing ready the next ones to come if
    they do not: until they are here the engine stands still. Those are judged by the numbers by
    which they were asked for; other means of the same past would ask for them and give them up by
    turns. Those behind them are not judged yet: what is stepped in between may hide their wait.
    Whoever gives up looks again with them ready. full: as many as a group holds are ready, so none
    could join.
    """
    if not awaited:
        return Decision()
    first, *others = sorted(range(len(awaited)), key=lambda i: awaited[i].remaining_s)
    then = awaited[others[0]] if others else None

    def gives_up(i: int) -> bool:
        one = awaited[i]
        if one.late:
            return not pays(one, ready.load, T)
        return ready.load.empty and i == first and loses_by_waiting(one, then, T)

    given_up = tuple(filter(gives_up, range(len(awaited))))
    if given_up:
        return Decision(0.0, given_up)
    if ready.load.empty:
        return Decision(awaited[first].remaining_s)
    return Decision(0.0 if full else joining(ready, awaited, T))
