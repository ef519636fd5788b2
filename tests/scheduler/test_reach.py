"""How long a draft is asked for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduler import block, reach
from dspark.scheduler.asking import PROBE_SHARE

LENGTHS = st.lists(st.integers(0, 8), min_size=1, max_size=60)


@given(LENGTHS)
def test_reach_lies_between_the_last_length_and_the_longest(lengths: list[int]) -> None:
    now = 9.0
    for verified in lengths:
        now = reach(now, verified)
        assert verified + 1 <= now <= 9.0


def test_it_grows_at_once_and_forgets_in_ten_rounds() -> None:
    assert reach(1.0, 3) == reach(3.0, 3) == 4.0
    now = 6.0
    for _ in range(10):
        now = reach(now, 0)
    assert round(now) == 2


@pytest.mark.parametrize(
    ("longest", "reached", "drafting_s", "probed", "tokens"),
    [
        (6, 2.6, 2 * PROBE_SHARE, False, 3),
        (6, 2.6, PROBE_SHARE, False, 6),  # it costs next to nothing
        (6, 2.6, 2 * PROBE_SHARE, True, 6),
        (6, math.nan, 2 * PROBE_SHARE, False, 6),  # the first
        (2, 2.6, 2 * PROBE_SHARE, False, 2),
    ],
)
def test_a_block_is_whole_where_it_costs_nothing_or_shows_something(
    longest: int, reached: float, drafting_s: float, probed: bool, tokens: int
) -> None:
    assert block(longest, reached, drafting_s, 1.0, probed=probed) == tokens
