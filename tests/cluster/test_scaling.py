"""How many replicas a pool should have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dspark.deploy.ray.scaling import ByPressure, replicas_wanted


@pytest.mark.parametrize(
    ("pressures", "now", "wanted"),
    [
        ([], 2, 2),  # nobody has told anything
        ([1.4], 1, 2),
        ([0.7], 1, 1),
        ([0.72, 0.70], 2, 2),  # near the target: stays
        ([2.8, 2.8], 2, 8),
        ([0.1, 0.1, 0.1], 3, 1),
        ([0.0], 1, 0),  # the pool's bounds are Serve's
        ([1.4], 2, 2),  # one starts, and its share of the load is on the way
    ],
)
def test_so_many_that_each_carries_the_target(
    pressures: list[float], now: int, wanted: int
) -> None:
    assert replicas_wanted(pressures, now, 0.7) == wanted


def test_more_load_never_asks_for_fewer() -> None:
    found = [replicas_wanted([load / 20] * 3, 3, 0.7) for load in range(60)]
    assert found == sorted(found)


def context(**aggregated: Any) -> Any:
    return SimpleNamespace(target_num_replicas=2, aggregated_metrics=aggregated)


def test_the_policy_reads_what_replicas_record() -> None:
    policy = ByPressure(target=0.5)
    assert policy(context(pressure={"a": 1.0, "b": 1.0})) == (4, {})
    assert policy(context()) == (2, {})
    assert policy(SimpleNamespace(target_num_replicas=2, aggregated_metrics=None)) == (2, {})
