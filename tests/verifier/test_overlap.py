"""The rules of drafting beside verifying, against going through what can happen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.verifier.overlap import (
    SHORTEST_S,
    Awaited,
    Decision,
    Load,
    Rates,
    Ready,
    StepSeconds,
    Work,
    apart,
    decide,
    groups,
    joining,
    pays,
    rates,
    remaining,
)

# --- any cost of a step: positive, and more for more ----------------------------------------------

GRID = np.array([1, 2, 3, 5, 8, 12, 20, 40])
increments = st.lists(st.floats(0, 0.02), min_size=len(GRID), max_size=len(GRID))
few = settings(max_examples=40)


@st.composite
def costs(draw: st.DrawFn) -> StepSeconds:
    first = draw(st.floats(0.001, 0.05))
    table = first + np.cumsum(draw(increments))

    def T(load: Load) -> float:
        B = load.P + load.R + load.drafts
        return 0.0 if load.empty else float(np.interp(B, GRID, table))

    return T


loads = st.builds(Load, R=st.integers(1, 6), drafts=st.floats(0, 12))
ready_loads = st.one_of(st.just(Load()), loads, st.builds(Load, P=st.integers(1, 10)))
awaited_ones = st.builds(
    Awaited, load=loads, tokens=st.floats(1, 40), remaining_s=st.floats(SHORTEST_S, 0.2)
)


def makespan(ready: Load, awaited: list[Awaited], T: StepSeconds, starts: float) -> float:
    """When all is done if the first step begins at `starts` with whatever is there by then, and
    another takes the rest when the first is done and the last of them is here."""
    here = [one for one in awaited if one.remaining_s <= starts]
    rest = [one for one in awaited if one.remaining_s > starts]
    done = starts + T(sum((one.load for one in here), ready))
    if not rest:
        return done
    return max(done, *(one.remaining_s for one in rest)) + T(
        sum((one.load for one in rest), Load())
    )


@few
@given(loads, awaited_ones, costs())
def test_waiting_for_one_is_decided_by_the_sooner_end(
    ready: Load, one: Awaited, T: StepSeconds
) -> None:
    now, later = (makespan(ready, [one], T, s) for s in (0.0, one.remaining_s))
    waits = joining(Ready(ready, 1.0), [one], T)
    assert waits in (0.0, one.remaining_s)
    if abs(now - later) > 1e-9:
        assert (waits > 0) == (later < now)


def committed(
    ready: Ready, those: list[Awaited], T: StepSeconds, until: float
) -> tuple[float, float]:
    """(tokens, seconds) until ready work and `those` are done, if the first step begins at `until`.
    The second one, where there is one, has what is ready again beside it."""
    load = sum((one.load for one in those), Load())
    tokens = ready.tokens + sum(one.tokens for one in those)
    if until:
        return tokens, until + T(ready.load + load)
    begins = max(T(ready.load), *(one.remaining_s for one in those))
    return tokens + ready.again.tokens, begins + T(ready.again.load + load)


@st.composite
def readies(draw: st.DrawFn) -> Ready:
    drafted, again = draw(loads), draw(st.one_of(st.just(Load()), loads)).plain
    tokens = draw(st.floats(1, 30))
    return Ready(drafted + again, tokens + again.R, Work(again, float(again.R)))


@few
@given(readies(), st.lists(awaited_ones, min_size=1, max_size=4), costs())
def test_waiting_is_for_the_best_rate_of_all_waits(
    ready: Ready, awaited: list[Awaited], T: StepSeconds
) -> None:
    """Each wait is weighed against stepping now and doing the same others after it."""

    def gain(until: float) -> float:
        those = [one for one in awaited if one.remaining_s <= until]
        (a, now_s), (b, later_s) = (committed(ready, those, T, u) for u in (0.0, until))
        return (b / later_s) / (a / now_s)

    gains = {
        one.remaining_s: gain(one.remaining_s) for one in awaited if one.remaining_s < T(ready.load)
    }
    waits = joining(ready, awaited, T)
    best = max(1.0, *gains.values()) if gains else 1.0
    assert (gains[waits] if waits else 1.0) == pytest.approx(best)


def test_what_comes_at_once_is_one_wait() -> None:
    """With the first of two alone it would pay, and the second comes with it."""
    T: StepSeconds = lambda load: 0.001 + 0.001 * load.drafts if load.R else 0.0  # noqa: E731
    ready = Ready(Load(R=1, drafts=2), 1.0)
    light, heavy = (Awaited(Load(R=1, drafts=n), 1.0, 0.0005) for n in (0, 9))
    assert joining(ready, [light], T) == 0.0005
    assert joining(ready, [light, heavy], T) == joining(ready, [heavy, light], T)


@few
@given(readies(), st.lists(awaited_ones, min_size=1, max_size=4), costs())
def test_what_comes_after_the_step_is_done_is_not_waited_for(
    ready: Ready, awaited: list[Awaited], T: StepSeconds
) -> None:
    assert joining(ready, awaited, T) < T(ready.load)


def test_plain_ones_do_not_wait_long_for_a_single_draft() -> None:
    """Fifteen are ready again at once, so one that comes late simply joins their next step."""
    T: StepSeconds = lambda load: 0.0 if load.empty else 0.03 + 0.001 * load.R  # noqa: E731
    plain = Load(R=15)
    ready = Ready(plain, 15.0, Work(plain, 15.0))
    assert joining(ready, [Awaited(Load(R=1), 3.0, 0.020)], T) == 0.0
    assert joining(ready, [Awaited(Load(R=1), 3.0, 0.001)], T) == 0.001
    alone = Ready(plain, 15.0)  # were they drafted for elsewhere, it would be a step of its own
    assert joining(alone, [Awaited(Load(R=1), 3.0, 0.020)], T) == 0.020


@few
@given(awaited_ones, ready_loads, costs())
def test_to_wait_on_pays_by_tokens_a_second(one: Awaited, beside: Load, T: StepSeconds) -> None:
    decoding_s = T(replace(beside, P=0) + one.load.plain)
    drafts_s = T(beside + one.load) - T(beside + one.load.plain)
    plain = one.load.R / decoding_s
    drafted = one.tokens / (one.remaining_s + decoding_s + drafts_s)
    if not np.isclose(plain, drafted):
        assert pays(one, beside, T) == (drafted > plain)


@few
@given(ready_loads, loads, st.floats(1, 9), st.floats(SHORTEST_S, 1), st.floats(0, 1), costs())
def test_what_was_asked_for_because_it_pays_is_not_given_up_before_it_is_late(
    ready: Load, load: Load, tokens: float, D: float, saving: float, T: StepSeconds
) -> None:
    """Whatever else the past says of its drafts: asked for and given up by turns they would never
    come. Where it does not pay any more, as its wait was hidden by what is no more, it is."""
    told = decide(Ready(ready), [Awaited(load, tokens, D, saving_s=saving)], T, full=False)
    assert bool(told.given_up) == (ready.empty and saving < D)


# --- how long is left -----------------------------------------------------------------------------


@few
@given(st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 1))
def test_what_is_left_of_a_reply(expected: float, deviation: float, elapsed: float) -> None:
    left, late = remaining(expected, deviation, elapsed)
    overdue = elapsed - expected
    if overdue < 0:
        assert (left, late) == (max(-overdue, SHORTEST_S), False)
    else:
        assert late == (overdue >= deviation)
        assert left == max(overdue, deviation, SHORTEST_S)


@few
@given(
    st.floats(0, 0.05), st.floats(0, 0.05), loads, st.floats(1, 9), costs(), ready_loads, st.data()
)
def test_every_wait_ends(
    expected: float,
    deviation: float,
    load: Load,
    each: float,
    T: StepSeconds,
    ready: Load,
    data: st.DataObject,
) -> None:
    """A reply that never comes, looked at whenever the last wait is over: after so and so many
    looks it is given up, or what is ready is stepped."""
    hopeful, saving = data.draw(st.booleans()), data.draw(st.floats(0, 1))
    elapsed = 0.0
    # Waiting pays while each · T(plain) ≥ δ + T, and then a look takes as long again.
    bound = 2 * (expected + deviation + each * T(ready + load.plain) + T(ready)) + 4 * SHORTEST_S
    for _ in range(100):
        left, late = remaining(expected, deviation, elapsed)
        one = Awaited(load, each * load.R, left, late, math.inf if hopeful else saving)
        told = decide(Ready(ready), [one], T, full=False)
        if not told.wait_s:
            break
        elapsed += told.wait_s
    assert not told.wait_s
    assert elapsed <= 2 * bound


def test_late_ones_are_judged_and_the_first_where_nothing_is_ready() -> None:
    T: StepSeconds = lambda load: 0.0 if load.empty else 0.01 + 0.001 * load.R  # noqa: E731
    quick = Awaited(Load(R=2, drafts=4), 6.0, 0.001)
    never = Awaited(Load(R=2, drafts=4), 6.0, 10.0, saving_s=0.01)
    none, some = Ready(), Ready(Load(R=3), 3.0)
    assert decide(none, [], T, full=False) == Decision()
    assert decide(none, [quick], T, full=False) == Decision(0.001)
    assert decide(none, [never], T, full=False) == Decision(0.0, (0,))
    assert decide(none, [quick, never], T, full=False) == Decision(0.001), "not its turn yet"
    assert decide(some, [never], T, full=False) == Decision(), "hidden behind what is ready"
    assert decide(some, [replace(never, late=True)], T, full=False) == Decision(0.0, (0,))
    assert decide(none, [replace(never, saving_s=math.inf)], T, full=False) == Decision(10.0)
    both = [replace(never, late=True, saving_s=math.inf), quick]
    assert decide(none, both, T, full=False) == Decision(0.0, (0,))


def rest_of_the_day(first: Awaited, then: Awaited, T: StepSeconds, *, waits: bool) -> float:
    """Seconds lost, by playing both turns: idle ones, and what is not saved. In its turn `then` is
    waited for or not, whichever loses less."""
    lost, now = 0.0, 0.0
    if waits:
        lost, now = first.remaining_s, first.remaining_s + T(first.load)
    else:
        lost, now = first.saving_s, T(first.load.plain)
    idle = max(then.remaining_s - now, 0.0)
    return lost + min(idle, then.saving_s)


@few
@given(awaited_ones, awaited_ones, st.floats(0, 0.1), st.floats(0, 0.1), costs())
def test_the_first_is_waited_for_if_both_turns_lose_less_by_it(
    one: Awaited, other: Awaited, a: float, b: float, T: StepSeconds
) -> None:
    """A wait also passes for those that come next. Two groups, each given up because the other's
    plain step is too short to hide its drafts, would never see a draft again."""
    first, then = sorted(
        (replace(one, saving_s=a), replace(other, saving_s=b)), key=lambda o: o.remaining_s
    )
    waiting, giving_up = (rest_of_the_day(first, then, T, waits=waits) for waits in (True, False))
    told = decide(Ready(), [first, then], T, full=False)
    if abs(waiting - giving_up) > 1e-9:
        assert bool(told.given_up) == (giving_up < waiting)


def test_a_full_group_waits_for_nobody() -> None:
    T: StepSeconds = lambda load: 0.0 if load.empty else 0.05  # noqa: E731
    one = Awaited(Load(R=1), 2.0, 0.001)
    ready = Ready(Load(R=4), 4.0)
    assert decide(ready, [one], T, full=False).wait_s == 0.001
    assert decide(ready, [one], T, full=True) == Decision()


# --- groups ---------------------------------------------------------------------------------------


def pipeline(sizes: list[int], T: Callable[[int], float], D: Callable[[int], float]) -> float:
    """Seconds of a round, by playing many: groups take turns at one engine, each is drafted as soon
    as it was verified."""
    ready = [0.0] * len(sizes)
    free = 0.0
    ends = []
    for turn in range(80):
        group = turn % len(sizes)
        free = max(free, ready[group]) + T(sizes[group])
        ready[group] = free + D(sizes[group])
        ends.append(free)
    rounds = 40 // len(sizes)
    return (ends[-1] - ends[-1 - rounds * len(sizes)]) / rounds


@few
@given(st.integers(2, 16), costs(), st.floats(0, 0.2), st.floats(0, 0.01))
def test_rounds_take_what_playing_them_takes(R: int, T: StepSeconds, a: float, b: float) -> None:
    each = 1.0

    def D(n: int) -> float:
        return a + b * n

    def T_of(n: int) -> float:
        return T(Load(R=n, drafts=each * n))

    tokens = 3.0 * R
    told = rates(Work(Load(R=R, drafts=each * R), tokens), Work(), T, D)
    assert told.one == pytest.approx(tokens / pipeline([R], T_of, D))
    half = -(-R // 2)
    if R % 2 == 0:
        assert told.two == pytest.approx(tokens / pipeline([half, half], T_of, D))
    else:  # the larger group's pace, or better
        assert told.two <= tokens / pipeline([half, R - half], T_of, D) + 1e-9


@few
@given(st.integers(1, 8), costs())
def test_taking_turns_costs_what_playing_it_takes(half: int, T: StepSeconds) -> None:
    """Without drafts, which come at once."""

    def round_s(*sizes: int) -> float:
        return pipeline(list(sizes), lambda n: T(Load(R=n)), lambda n: 0.0)

    group, all_ = Load(R=half, drafts=3.0 * half), Load(R=2 * half)
    longer_s = round_s(half, half) - round_s(2 * half)
    assert 2 * apart(group, all_, T) == pytest.approx(max(longer_s, 0.0), abs=1e-9)
    assert apart(all_, all_, T) == 0.0
    assert apart(Load(), all_, T) == 0.0


def test_what_is_in_every_step_fills_the_time_of_one_group() -> None:
    T: StepSeconds = lambda load: 0.0 if load.empty else 0.01 * (load.R + load.drafts)  # noqa: E731
    linked, beside = Work(Load(R=4, drafts=4), 8.0), Work(Load(R=2), 2.0)
    told = rates(linked, beside, T, lambda n: 0.02)
    # One group waits for 20 ms or steps the others for 20 ms; two do it beside each other.
    assert told.one == pytest.approx(max(10 / 0.12, 12 / 0.12))
    assert told.two == pytest.approx(12 / 0.12)
    slow = rates(linked, beside, T, lambda n: 0.05)
    assert slow.one == pytest.approx(12 / 0.15)
    assert slow.two == pytest.approx(12 / 0.12)


@few
@given(st.integers(1, 2), st.integers(0, 9), st.floats(0.01, 1), st.floats(0.01, 1))
def test_groups_follow_the_higher_rate(now: int, R: int, one: float, two: float) -> None:
    told = groups(now, R, Rates(one, two))
    if R < 2:
        assert told == 1
    elif one > 1.06 * two or two > 1.06 * one:
        assert told == (1 if one > two else 2)
    elif 0.96 < one / two < 1.04:
        assert told == now


def test_groups_do_not_flap_with_what_is_measured() -> None:
    rng = np.random.default_rng(0)
    told = [1]
    for _ in range(1000):
        one, two = 0.08 * rng.uniform(0.98, 1.02), 0.08 * rng.uniform(0.98, 1.02)
        told.append(groups(told[-1], 8, Rates(one, two)))
    assert sum(a != b for a, b in itertools.pairwise(told)) == 0
