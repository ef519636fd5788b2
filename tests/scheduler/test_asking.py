"""Who asks for drafts: the joint rule, what it learns D from, and what must not lock it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduler import (
    WAITING,
    Beside,
    DraftCost,
    UsualSavings,
    afforded,
    askers,
    probe_rounds,
    supposed,
)
from dspark.scheduler.asking import PROBE_SHARE, WARM

UNKNOWN = math.nan


def learnt(a: float, b: float, n: int = 8) -> DraftCost:
    """A drafter that has long answered in a + b·n."""
    cost = DraftCost()
    for i in range(100):
        m = 1 + i % (2 * n)
        cost.observe(m, a + b * m)
    return cost


def ask(
    savings: Sequence[float],
    cost: DraftCost | Sequence[DraftCost],
    beside: Sequence[Beside] = (WAITING,),
    *,
    unasked: Sequence[int] | None = None,
    step_s: float = 1e-9,
    bypassed: Sequence[bool] | None = None,
    drafter: Sequence[int] | None = None,
) -> list[int]:
    since = [1] * len(savings) if unasked is None else unasked
    chosen = askers(
        savings, cost, beside, unasked=since, step_s=step_s, bypassed=bypassed, drafter=drafter
    )
    return [int(i) for i in chosen]


# --- the rule ------------------------------------------------------------------------------------

LINES = st.tuples(st.floats(0, 0.05), st.floats(1e-4, 0.02))
SAVINGS = st.lists(st.one_of(st.floats(-0.02, 0.05), st.just(UNKNOWN)), min_size=1, max_size=7)


WAYS = st.builds(
    Beside, st.floats(0, 0.05), st.floats(0, 0.01), st.one_of(st.none(), st.integers(1, 7))
)


@given(SAVINGS, st.lists(LINES, min_size=1, max_size=3), st.lists(WAYS, max_size=2), st.data())
def test_no_other_set_is_worth_more(
    savings: list[float],
    lines: list[tuple[float, float]],
    ways: list[Beside],
    data: st.DataObject,
) -> None:
    """Brute force over all subsets and ways to spend the time, of one drafter or several that
    answer at the same time; with several nobody is kept out by number."""
    R = len(savings)
    costs = [learnt(a, b) for a, b in lines]
    whose = data.draw(st.lists(st.integers(0, len(costs) - 1), min_size=R, max_size=R))
    alone = data.draw(st.lists(st.booleans(), min_size=R, max_size=R))
    sure = {i for i in range(R) if math.isnan(savings[i]) and not alone[i]}
    if len(costs) > 1:
        ways = [replace(way, most=None) for way in ways]
    beside = [WAITING, *ways]

    def price(asked: set[int], way: Beside) -> float:
        if way.most is not None and len(asked) > way.most:
            return math.inf
        drafting_s = [
            cost.seconds(sum(whose[i] == d for i in asked)) for d, cost in enumerate(costs)
        ]
        return max(0.0, max(drafting_s) - way.hidden_s) + way.apart_s

    def worth(chosen: Sequence[int]) -> float:
        asked = sure | set(chosen)
        least = min(price(asked, way) for way in beside) if asked else 0.0
        return sum(savings[i] for i in chosen) - least

    free = [i for i in range(R) if i not in sure and not alone[i]]
    best = max(
        worth(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n)
    )
    chosen = ask(savings, costs, beside, bypassed=alone, drafter=whose, unasked=[0] * R)
    assert sure <= set(chosen)
    assert not any(alone[i] for i in chosen)
    assert worth([i for i in chosen if i not in sure]) == pytest.approx(best, abs=1e-12)


def test_a_wait_that_is_shared_is_paid_once() -> None:
    """16 that save 1 ms each ask a drafter that takes 10 ms for any number; 8 of them do not."""
    cost = learnt(0.010, 1e-6)
    assert ask([0.001] * 16, cost) == list(range(16))
    assert ask([0.001] * 8, cost) == []


def test_one_that_pays_takes_along_whoever_pays_for_himself() -> None:
    cost = learnt(0.010, 0.001)
    assert ask([0.0005, 0.0015, 0.012, -1.0], cost) == [1, 2]
    assert ask([0.0005, 0.0015, 0.011, -1.0], cost) == [1, 2]
    assert ask([0.0005, 0.0015, 0.009, -1.0], cost) == []


def test_what_other_work_hides_costs_nothing() -> None:
    cost = learnt(0.010, 0.001)
    assert ask([1e-6] * 5, cost, [Beside(0.015)]) == [0, 1, 2, 3, 4]
    assert ask([1e-6] * 5, cost, [Beside(0.0135)]) == [0, 1, 2]


def test_hidden_drafts_have_to_pay_for_being_in_no_step_with_the_others() -> None:
    """Half of eight, while the other half is stepped; or all, if waiting costs less."""
    halves = [WAITING, Beside(0.02, 0.003, most=4)]
    assert ask([0.0010] * 8, learnt(0.010, 1e-6), halves) == [0, 1, 2, 3]
    assert ask([0.0007] * 8, learnt(0.010, 1e-6), halves) == []
    assert ask([0.0020] * 8, learnt(0.010, 1e-6), halves) == list(range(8))


def test_who_answers_within_the_longest_wait_is_asked_too() -> None:
    """The second drafter's requests do not pay its time, but it passes while the first drafts."""
    costs = [learnt(0.010, 0.0), learnt(0.005, 0.001)]
    assert ask([0.02, 1e-6, 1e-6], costs, drafter=[0, 1, 1]) == [0, 1, 2]
    assert ask([0.002, 1e-6, 1e-6], costs, drafter=[0, 1, 1]) == []


def test_whom_nobody_knows_is_asked_and_others_may_join() -> None:
    cost = learnt(0.010, 0.001)
    assert ask([UNKNOWN, 0.002, 0.0005], cost) == [0, 1]
    assert ask([UNKNOWN, 0.002], cost, bypassed=[True, False]) == []


def test_a_newcomer_is_taken_to_be_like_the_others() -> None:
    assert supposed([UNKNOWN, 0.002, 0.004]) == [0.003, 0.002, 0.004]
    assert supposed([UNKNOWN, 0.002]) == [0.002, 0.002]
    cost = learnt(0.010, 0.001)
    assert ask(supposed([UNKNOWN, -0.001, -0.002]), cost) == []
    assert ask(supposed([UNKNOWN, 0.02, 0.02]), cost) == [0, 1, 2]


def test_where_most_are_new_they_are_asked() -> None:
    for savings in ([UNKNOWN], [UNKNOWN, UNKNOWN, 0.002], []):
        assert np.array_equal(supposed(savings), savings, equal_nan=True)


def test_where_most_are_new_they_are_as_is_usual_among_so_many() -> None:
    usual = UsualSavings()
    assert np.isnan(usual.of(16)), "nobody knows"
    usual.learn(16, [0.0001] * 16)
    usual.learn(1, [0.004])
    cost = learnt(0.003, 0.0002)
    assert ask(supposed([UNKNOWN] * 16, usual.of(16)), cost) == [], "a burst of newcomers"
    assert ask(supposed([UNKNOWN], usual.of(1)), cost) == [0]
    assert usual.of(31) == usual.of(16), "about as many"
    assert np.isnan(usual.of(32))


def test_a_newcomer_may_be_better_than_usual_where_requests_differ() -> None:
    alike, mixed = UsualSavings(), UsualSavings()
    for _ in range(50):
        alike.learn(4, [0.001] * 4)
        mixed.learn(4, [0.0, 0.002, 0.0, 0.002])
    assert alike.of(4) == pytest.approx(0.001)
    assert mixed.of(4) == pytest.approx(0.002)
    for _ in range(50):
        mixed.learn(4, [-0.001] * 4)
    assert mixed.of(4) < 0, "what was usual is forgotten"


def test_nobody_is_fine() -> None:
    assert ask([], learnt(0.01, 0.001)) == []
    assert ask([], []) == []


@given(st.lists(st.floats(-0.01, 0.0), min_size=1, max_size=12), LINES, st.floats(0.001, 0.1))
def test_probes_cost_at_most_their_share(
    savings: list[float], line: tuple[float, float], step_s: float
) -> None:
    cost = learnt(*line)
    R = len(savings)
    every = probe_rounds(cost.seconds(R), step_s)
    rounds = min(5 * every, 500)
    unasked, spent, last = np.ones(R, np.int64), 0.0, 0
    for now in range(1, rounds + 1):
        chosen = askers(savings, cost, unasked=unasked, step_s=step_s)
        spent += cost.seconds(len(chosen))
        last = now if len(chosen) else last
        unasked += 1
        unasked[chosen] = 1
    assert spent <= PROBE_SHARE * rounds * step_s * (1 + 1e-9)
    assert rounds - last < every, "probes are due by then"


def test_hidden_drafts_are_probed_every_round() -> None:
    cost = learnt(0.010, 0.001)
    assert ask([-1.0] * 4, cost, [Beside(0.02)], step_s=0.02) == [0, 1, 2, 3]
    assert probe_rounds(0.0, 0.1) == 1


# --- nothing keeps everybody out for good --------------------------------------------------------


def served(
    cost: DraftCost,
    takes: Callable[[int], float],
    savings: Sequence[float],
    rounds: int,
    step_s: float = 0.03,
) -> list[int]:
    """How many ask, round after round, of a drafter that takes so long for n."""
    unasked, counts = np.ones(len(savings), np.int64), []
    for _ in range(rounds):
        chosen = askers(savings, cost, unasked=unasked, step_s=step_s)
        cost.observe(len(chosen), takes(len(chosen)))
        unasked += 1
        unasked[chosen] = 1
        counts.append(len(chosen))
    return counts


def test_until_the_cost_is_known_everybody_asks() -> None:
    assert served(DraftCost(), lambda n: 9.0, [-1.0] * 3, WARM + 1) == [3] * WARM + [0]


def test_a_first_reply_that_warms_up_is_not_what_drafts_cost() -> None:
    """Compiling, loading, a whole prompt's features: 100 times what a draft takes afterwards."""
    replies = itertools.chain([1.0], itertools.repeat(0.010))
    counts = served(DraftCost(), lambda n: next(replies), [0.001] * 16, 60)
    assert counts == [16] * 60


def test_few_askers_do_not_make_many_look_dear() -> None:
    """Long nobody but two asked; the many learn by a probe that it takes them no longer."""
    cost = learnt(0.010, 1e-5, n=1)
    for _ in range(5000):
        cost.observe(2, 0.01002)
    assert cost.seconds(16) > 0.05, "else this shows nothing"
    counts = served(cost, lambda n: 0.010 + 1e-5 * n, [0.001] * 16, 400)
    assert counts[-100:] == [16] * 100
    assert 0 in counts


def test_what_many_cost_is_remembered_while_few_ask() -> None:
    cost = DraftCost()
    for i in range(40):
        cost.observe(4 if i % 2 else 16, 0.010 + 1e-4 * (4 if i % 2 else 16))
    for _ in range(30):
        cost.observe(4, 0.0104)
    assert cost.seconds(16) == pytest.approx(0.0116, rel=0.1)


def test_a_drafter_that_was_slow_for_a_while_is_known_again() -> None:
    cost = learnt(0.010, 1e-5)
    for _ in range(100):
        cost.observe(16, 0.4)
    assert cost.seconds(16) > 0.3, "else this shows nothing"
    counts = served(cost, lambda n: 0.0102, [0.001] * 16, 3000)
    # One probe, at the pace of what was believed: 0.4 s a hundredth of steps of 30 ms.
    assert counts.index(16) <= probe_rounds(0.41, 0.03)
    assert counts[-1000:] == [16] * 1000


def test_those_left_out_are_probed_together() -> None:
    """Else each would measure a step that it alone lengthens, and a wait that nobody shares."""
    cost = learnt(0.010, 1e-5)
    due = probe_rounds(cost.seconds(6), 0.02)
    assert ask([0.0] * 6, cost, step_s=0.02, unasked=[1, 2, 3, 4, 5, due - 1]) == []
    assert ask([0.0] * 6, cost, step_s=0.02, unasked=[1, 2, 3, 4, 5, due]) == list(range(6))


def test_drafts_that_pay_while_many_ask_are_not_given_up() -> None:
    """What locked the engine into plain decoding: as fewer ask each pays more, so fewer ask."""
    savings = np.linspace(0.0005, 0.0015, 16).tolist()
    counts = served(DraftCost(), lambda n: 0.010 + 1e-5 * n, savings, 300)
    assert min(counts) >= 8
    assert min(counts[20:]) >= 15  # within what a reply more or less can tell


# --- what D is learnt from -----------------------------------------------------------------------


@given(st.floats(0, 0.1), st.floats(0, 0.01), st.lists(st.integers(1, 64), min_size=300))
def test_a_line_is_learnt(a: float, b: float, asked: list[int]) -> None:
    cost = DraftCost()
    for n in asked:
        cost.observe(n, a + b * n)
    n = round(float(np.mean(asked[-20:])))
    assert cost.seconds(n) == pytest.approx(a + b * n, rel=0.35, abs=1e-3)
    cost = DraftCost()
    for i in range(300):
        n = 1 + 7 * i % 64
        cost.observe(n, a + b * n)
    for n in (8, 32, 64):
        assert cost.seconds(n) == pytest.approx(a + b * n, rel=0.15, abs=2e-3)


@given(
    st.lists(
        st.tuples(
            st.integers(-2, 10**6),
            st.floats(allow_nan=True, allow_infinity=True),
            st.just(0) | st.integers(0, 10**6),
        ),
        max_size=60,
    )
)
def test_whatever_it_is_told_it_stays_a_cost(told: list[tuple[int, float, int]]) -> None:
    cost = DraftCost()
    for n, seconds, context in told:
        cost.observe(n, seconds, context)
        assert np.isfinite(cost.context_s)
        assert cost.context_s >= 0
        a, b = cost.line
        assert a >= 0
        assert b >= 0
        assert cost.deviation >= 0
        curve = [cost.seconds(n) for n in range(10)]
        assert curve[0] == 0
        assert np.isfinite(curve).all()
        assert (np.diff(curve) >= 0).all()


def test_what_a_prompt_takes_once_is_no_part_of_what_drafts_take() -> None:
    """Every fourth batch has a newcomer in it, whose prompt of 200 tokens takes 10 ms."""
    cost = DraftCost()
    for i in range(200):
        context = 0 if i % 4 else 200
        cost.observe(2, 0.002 + 5e-5 * context, context)
    assert cost.seconds(2) == pytest.approx(0.002, rel=0.05)
    assert cost.seconds(2, 100) == pytest.approx(0.007, rel=0.05)
    cost.observe(2, 0.0, 200)
    assert cost.seconds(2) > 0.0015, "a prompt that is there at once starts nothing anew"


def test_before_the_first_reply_drafts_cost_nothing() -> None:
    cost = DraftCost()
    assert (cost.seconds(5), cost.deviation, cost.known) == (0.0, 0.0, False)


def test_the_first_reply_is_believed_as_it_is() -> None:
    cost = DraftCost()
    cost.observe(4, 0.02)
    assert cost.seconds(4) == pytest.approx(0.02)
    assert cost.deviation == pytest.approx(0.01)


def test_a_hiccup_moves_little() -> None:
    cost = learnt(0.010, 0.001)
    before = cost.seconds(8)
    cost.observe(8, 30.0)
    assert before < cost.seconds(8) < 1.2 * before


def test_a_slower_drafter_is_known_in_tens_of_replies() -> None:
    cost = learnt(0.010, 0.001)
    for _ in range(25):
        cost.observe(8, 0.18)
    assert cost.seconds(8) > 0.09
    for _ in range(40):
        cost.observe(8, 0.18)
    assert cost.seconds(8) == pytest.approx(0.18, rel=0.1)


def test_a_faster_drafter_is_known_at_once() -> None:
    cost = learnt(0.100, 0.01)
    cost.observe(8, 0.018)
    assert cost.seconds(8) == pytest.approx(0.018)


def test_the_deviation_is_of_the_replies() -> None:
    cost = DraftCost()
    rng = np.random.default_rng(7)
    for _ in range(500):
        cost.observe(8, 0.02 + float(rng.uniform(-0.004, 0.004)))
    assert cost.deviation == pytest.approx(0.002, rel=0.5)
    assert cost.seconds(8) == pytest.approx(0.02, rel=0.1)


# --- a budget that is short ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [(0, []), (6, []), (7, [2]), (13, [2]), (14, [1, 2]), (15, [1, 2]), (16, [0, 1, 2])],
)
def test_a_budget_goes_to_those_that_save_most_and_is_saved_for_them(
    tokens: int, chosen: list[int]
) -> None:
    """The last one's block is short, and waits for its turn all the same."""
    asked = afforded([2, 7, 7, 1], [0.1, 0.2, UNKNOWN, 0.0], tokens)
    assert asked.tolist() == chosen
