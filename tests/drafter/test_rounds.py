"""What is asked leaves once: answered, or lost alone, or lost with its drafter; and silence."""

from __future__ import annotations

from dspark.core.drafts import Lost
from dspark.drafter.rounds import ROUND_S, TICKS, OpenRounds

from .wire import asking


def ticks_until_silent(rounds: OpenRounds) -> int:
    return next(n for n in range(1, 1000) if rounds.tick())


def test_a_round_is_taken_once() -> None:
    rounds = OpenRounds(0.3)
    rounds.add(asking("a", 3), 1.0)
    assert rounds.drafted("a", 2, 2.0) is None, "an older round's"
    assert rounds.drafted("b", 3, 2.0) is None, "nobody's"
    taken = rounds.drafted("a", 3, 2.0)
    assert taken is not None
    assert (taken.round, taken.at) == (3, 1.0)
    assert rounds.drafted("a", 3, 2.0) is None, "twice"
    assert len(rounds) == 0


def test_a_newer_round_takes_the_older_ones_place() -> None:
    rounds = OpenRounds(0.3)
    rounds.add(asking("a", 3), 1.0)
    rounds.add(asking("a", 4), 2.0)
    assert rounds.drafted("a", 3, 3.0) is None
    assert rounds.lose("gone") == [Lost("a", 4, "gone")]


def test_context_is_wanted_only_from_before_what_was_sent() -> None:
    """Else it is the echo of an older request, and what it wants is on its way."""
    rounds = OpenRounds(0.3)
    rounds.add(asking("a", 1, start=8), 1.0)
    assert rounds.needed("a", 8, 2.0) is None
    assert rounds.needed("b", 0, 2.0) is None
    assert rounds.needed("a", 7, 2.0) is not None
    assert rounds.needed("a", 7, 2.0) is None


def test_a_closed_session_is_not_waited_for() -> None:
    rounds = OpenRounds(0.3)
    rounds.add(asking("a"), 1.0)
    rounds.drop("a")
    rounds.drop("a")
    assert rounds.lose("gone") == []


def test_silence_is_counted_while_rounds_are_open() -> None:
    rounds = OpenRounds(0.3)
    assert not any(rounds.tick() for _ in range(100)), "nothing is to be heard"
    rounds.add(asking("a"), 1.0)
    assert ticks_until_silent(rounds) == TICKS + 1
    rounds.heard()
    rounds.add(asking("b"), 2.0)
    assert ticks_until_silent(rounds) == TICKS + 1


def test_another_round_does_not_excuse_silence() -> None:
    rounds = OpenRounds(0.3)
    rounds.add(asking("a"), 1.0)
    for _ in range(TICKS):
        assert not rounds.tick()
        rounds.add(asking("b"), 1.0)
    assert rounds.tick()


def test_a_slow_drafter_may_be_silent_for_three_times_its_reply_time() -> None:
    rounds = OpenRounds(0.3)
    rounds.add(asking("a"), 1.0)
    rounds.drafted("a", 0, 2.0)
    assert (rounds.usual_s, rounds.bound_s) == (1.0, 3.0)
    rounds.add(asking("a"), 2.0)
    assert ticks_until_silent(rounds) == 10 * TICKS + 1
    # It learns: ten replies of 0.1 s take it most of the way back.
    for n in range(10):
        rounds.add(asking("a", n), 5.0)
        rounds.drafted("a", n, 5.1)
    assert 0.1 < rounds.usual_s < 0.45


def test_a_single_round_that_nobody_answers_is_given_up() -> None:
    rounds = OpenRounds(0.3)
    rounds.add(asking("a", 1), 1.0)
    rounds.add(asking("b", 2), 3.0)
    assert rounds.late(1.0 + ROUND_S) == []
    (lost,) = rounds.late(1.5 + ROUND_S)
    assert (lost.session, lost.round) == ("a", 1)
    assert len(rounds) == 1
