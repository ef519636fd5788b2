"""How long a draft is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduler import blocks, reach
from dspark.scheduler.asking import PROBE_SHARE

LENGTHS = st.lists(st.integers(0, 8), min_size=1, max_size=60)


@given(LENGTHS)
def test_reach_lies_between_the_last_length_and_the_longest(lengths: list[int]) -> None:
    now = 9.0
    for verified in lengths:
        now = float(reach(now, verified))
        assert verified + 1 <= now <= 9.0


def test_it_grows_at_once_and_forgets_in_ten_rounds() -> None:
    assert reach([1.0, 3.0], [3, 3]).tolist() == [4.0, 4.0]
    now = np.array(6.0)
    for _ in range(10):
        now = reach(now, 0)
    assert np.rint(now) == 2


def test_a_block_is_whole_where_it_costs_nothing_or_shows_something() -> None:
    dear, cheap = 2 * PROBE_SHARE, PROBE_SHARE
    asked = blocks(
        longest=[6, 6, 6, 6, 2],
        reaches=[2.6, 2.6, 2.6, np.nan, 2.6],
        probed=[False, False, True, False, False],
        seconds=[dear, cheap, dear, dear, dear],
        step_s=1.0,
    )
    assert asked.tolist() == [3, 6, 6, 6, 2]


@pytest.mark.parametrize("values", [[], ()])
def test_nobody_is_asked_for_nothing(values: list[float]) -> None:
    assert blocks(values, values, values, values, 1.0).shape == (0,)
