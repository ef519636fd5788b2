"""What waits for a pass: in order within a session, in turn between verifiers, within bounds; and
context that comes in pieces is the context that would have come at once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.drafts import Draft, NeedContext
from dspark.core.errors import ConfigError
from dspark.drafter.batching import BatchingConfig, Context, Job, Line, Reply, interleave, no_draft

from .wire import ToyDrafter, asking

D = 3


def line(number: int = 1, **config: Any) -> Line:
    def put(_: Sequence[Reply]) -> None:
        raise AssertionError("a line does not speak by itself")

    return Line(number, BatchingConfig(**config), put)


def take_all(of: Line) -> list[Job]:
    taken = []
    while jobs := of.first_jobs():
        of.take(jobs[0])
        taken.append(jobs[0])
    return taken


def rows(start: int, count: int) -> np.ndarray[Any, Any]:
    """Features that say where they belong."""
    at = np.arange(start, start + count, dtype=np.float32)
    return np.repeat(at[:, None], D, axis=1)


@given(st.lists(st.integers(1, 6), max_size=6), st.integers(0, 5), st.booleans())
def test_context_in_pieces_is_context_at_once(
    sizes: list[int], rest: int, with_features: bool
) -> None:
    """Whatever the pieces, the drafter is told every id, and every feature of a position before the
    anchor at its own place, without a gap."""
    mine, toy, start = line(), ToyDrafter(), 0
    for size in sizes:
        features = rows(start, size) if with_features else None
        assert mine.context(Context("s", start, tuple(range(start, start + size)), features), 0.0)
        start += size
    anchor = start + rest
    features = rows(start, rest) if with_features else None
    mine.ask(asking("s", 1, range(start, anchor + 1), start, features=features), 0.0)
    replies = toy.propose([job.request for job in take_all(mine)])
    assert all(isinstance(reply, Draft) for reply in replies)
    assert toy.held["1:s"] == list(range(anchor + 1))
    if with_features:
        told = np.array(toy.features["1:s"], np.float32).reshape(-1, D)
        np.testing.assert_array_equal(told, rows(0, anchor))


def test_context_that_is_taken_in_is_not_kept() -> None:
    """A session remembers one position of it, and not the array that it came in."""
    mine, features = line(), rows(0, 1000)
    kept = weakref.ref(features)
    mine.context(Context("s", 0, tuple(range(1000)), features), 0.0)
    take_all(mine)
    del features
    gc.collect()
    assert kept() is None


def test_context_that_is_told_again_begins_anew() -> None:
    mine = line()
    mine.context(Context("s", 0, (1, 2, 3), rows(0, 3)), 0.0)
    mine.ask(asking("s", 1, (1, 9), 0, features=rows(0, 1)), 0.0)
    job = take_all(mine)[-1]
    assert (job.request.start, job.request.tokens) == (0, (1, 9))


def test_a_newer_round_takes_the_place_of_the_one_that_waits() -> None:
    """What the older brings is kept only where the newer builds on it."""
    mine = line()
    mine.ask(asking("a", 1, (1, 2, 3), 0), 0.0)
    mine.ask(asking("b", 1), 0.0)
    mine.ask(asking("a", 2, (1, 2, 3, 4), 0), 0.0)
    (b, a) = take_all(mine)
    assert (a.request.round, a.wanted, b.session) == (2, True, "b")
    mine.ask(asking("a", 3, (5, 6), 4), 0.0)
    mine.ask(asking("a", 4, (6, 7), 5), 0.0)
    older, newer = take_all(mine)
    assert (older.request.round, older.request.gamma, older.wanted) == (3, 0, False)
    assert (newer.request.round, newer.wanted) == (4, True)


def test_only_the_newest_round_is_answered() -> None:
    mine = line()
    mine.ask(asking("a", 1), 0.0)
    (older,) = take_all(mine)  # it is in a pass when the next one comes
    mine.ask(asking("a", 2), 0.0)
    (newer,) = take_all(mine)
    assert mine.settle(older, no_draft("1:a", 1)) is None
    assert mine.settle(newer, NeedContext("1:a", 0)) == NeedContext("a", 0)
    assert mine.settle(newer, no_draft("1:a", 2)) is None, "answered twice"


def test_context_is_answered_only_where_nobody_else_will_say_it() -> None:
    mine = line()
    mine.context(Context("a", 5, (1,), None), 0.0)
    (alone,) = take_all(mine)
    assert mine.settle(alone, NeedContext("1:a", 0)) == NeedContext("a", 0)
    assert mine.settle(alone, no_draft("1:a", 0)) is None
    mine.ask(asking("a", 1, (1, 2), 6), 0.0)
    assert mine.settle(alone, NeedContext("1:a", 0)) is None


def test_a_closed_session_takes_what_waits_with_it() -> None:
    mine = line()
    mine.ask(asking("a", 1), 0.0)
    mine.ask(asking("b", 1), 0.0)
    assert mine.forget("a") == "1:a"
    assert mine.forget("a") is None
    assert [job.session for job in take_all(mine)] == ["b"]
    assert (mine.sessions, mine.waiting) == (1, 0)


def test_a_full_line_takes_no_more() -> None:
    mine = line(max_queue=2)
    assert mine.ask(asking("a"), 0.0)
    assert mine.context(Context("b", 0, (1,), None), 0.0)
    assert not mine.ask(asking("c"), 0.0)
    assert not mine.context(Context("c", 0, (1,), None), 0.0)
    assert mine.ask(asking("a", 1), 0.0), "it takes the older one's place"
    take_all(mine)
    assert mine.ask(asking("c"), 0.0)
    heavy = line(max_queue_bytes=100)
    assert heavy.ask(asking("a", tokens=range(20)), 0.0)
    assert not heavy.ask(asking("b", tokens=range(20)), 0.0)
    take_all(heavy)
    assert heavy.ask(asking("b", tokens=range(20)), 0.0)


def test_the_oldest_session_goes_first_but_none_that_waits() -> None:
    mine = line(max_sessions=2)
    mine.ask(asking("owed"), 0.0)
    for session in "abc":
        mine.context(Context(session, 0, (1,), None), 0.0)
    assert mine.overflow() == ["1:a", "1:b"]
    assert (mine.sessions, mine.overflow()) == (2, [])


def test_verifiers_take_turns() -> None:
    """However much one of them asks, another's request is in the same pass."""
    many, few = line(1), line(2)
    for i in range(10):
        many.ask(asking(str(i)), 0.0)
    few.ask(asking("x"), 0.0)
    batch = interleave([many.first_jobs(), few.first_jobs()], 4)
    assert [job.request.session for job in batch] == ["1:0", "2:x", "1:1", "1:2"]
    assert interleave([], 4) == interleave([[]], 4) == []


def test_a_pass_has_a_session_once() -> None:
    mine = line()
    mine.context(Context("a", 0, (1, 2), None), 0.0)
    mine.ask(asking("a", 1, (3,), 2), 0.0)
    mine.ask(asking("b", 1), 0.0)
    assert [job.session for job in mine.first_jobs()] == ["a", "b"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", 0),
        ("max_queue", 0),
        ("max_queue_bytes", 0),
        ("max_sessions", 0),
        ("window_s", -0.1),
        ("window_s", 1.5),
        ("window_s", float("nan")),
    ],
)
def test_bounds_are_checked(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}: {value}"):
        BatchingConfig(**{field: value})
