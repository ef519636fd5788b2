"""T(P, R, B, context): a valid table however it was made, the same on the wire and on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import ConfigError
from dspark.scheduler import OnlineStepCost, StepCost, cost_key
from dspark.scheduler.step_cost import (
    CORRECTION_LIMIT,
    RATE,
    SURPRISE,
    corrected,
    hardware,
    hardware_name,
)

COST = StepCost((1, 2, 4, 8, 16), (1.0, 1.1, 1.1, 2.0, 3.0), 0.01, 1e-4)


@st.composite
def step_costs(draw: st.DrawFn) -> StepCost:
    tokens = draw(st.lists(st.integers(1, 300), min_size=1, max_size=9, unique=True))
    rises = draw(st.lists(st.floats(0.0, 3.0), min_size=len(tokens), max_size=len(tokens)))
    return StepCost(
        tuple(sorted(tokens)),
        tuple((1e-3 + np.cumsum(rises)).tolist()),
        draw(st.floats(0, 0.1)),
        draw(st.floats(0, 1e-3)),
    )


# --- the curve -----------------------------------------------------------------------------------


def test_linear_between_grid_points_flat_before_along_the_last_slope_beyond() -> None:
    table = StepCost.from_table({8: 3.0, 2: 1.0, 4: 2.0})
    assert table.tokens == (2, 4, 8)
    seconds = [table.seconds(0, 1, B, 0) for B in (1, 2, 3, 4, 6, 8, 12, 1000)]
    assert seconds == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 251.0], rel=1e-12)
    assert StepCost.from_table({4: 2.0}).seconds(0, 1, 9, 0) == 2.0


def test_requests_and_their_context_cost_beside_the_table() -> None:
    assert COST.seconds(0, 4, 8, 3000) == pytest.approx(2.0 + 4 * 0.01 + 3000 * 1e-4)


@given(step_costs(), st.integers(0, 50), st.integers(0, 20), st.integers(0, 400), st.data())
def test_curve_is_seconds_at_every_b_non_decreasing_and_blind_to_its_end(
    cost: StepCost, P: int, R: int, extra: int, data: st.DataObject
) -> None:
    curve = cost.curve(P, R, 1000, extra)
    assert curve.dtype == np.float64
    assert curve.shape == (extra + 1,)
    assert curve.tolist() == [cost.seconds(P, R, P + R + i, 1000) for i in range(extra + 1)]
    assert (np.diff(curve) >= -1e-12 * curve[1:]).all()
    shorter = data.draw(st.integers(0, extra))
    assert cost.curve(P, R, 1000, shorter).tobytes() == curve[: shorter + 1].tobytes()


# --- what may not be a step cost -----------------------------------------------------------------

GOOD: dict[str, Any] = json.loads(COST.to_json())
BAD: list[tuple[str, Any]] = [
    ("tokens", []),
    ("tokens", [1, 2, 4, 8]),
    ("tokens", [1, 2, 2, 8, 16]),
    ("tokens", [0, 2, 4, 8, 16]),
    ("tokens", [1, 2.5, 4, 8, 16]),
    ("tokens", [True, 2, 4, 8, 16]),
    ("tokens", 5),
    ("table_s", [1.0, 1.1, 1.1, 2.0]),
    ("table_s", [0.0, 1.1, 1.1, 2.0, 3.0]),
    ("table_s", [-1.0, 1.1, 1.1, 2.0, 3.0]),
    ("table_s", [1.0, math.nan, 1.1, 2.0, 3.0]),
    ("table_s", [1.0, 1.1, 1.1, 2.0, math.inf]),
    ("table_s", [1.0, 1.1, 1.0, 2.0, 3.0]),
    ("table_s", [1.0, 1.1, 1.1, 2.0, 10**400]),
    ("table_s", [1.0, 1.1, "1.1", 2.0, 3.0]),
    ("table_s", [True, 1.1, 1.1, 2.0, 3.0]),
    ("table_s", "fast"),
    ("per_sequence_s", -1e-9),
    ("per_sequence_s", math.nan),
    ("per_sequence_s", None),
    ("per_verified_sequence_s", -1.0),
    ("per_context_token_s", math.inf),
    ("per_context_token_s", [0.0]),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_an_impossible_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        StepCost.from_json(json.dumps(GOOD | {field: value}))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", json.dumps(GOOD | {"more": 1}), '{"tokens": [1]}']
)
def test_what_is_no_step_cost_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="step cost"):
        StepCost.from_json(text)


@given(step_costs())
def test_json_round_trip(cost: StepCost) -> None:
    assert StepCost.from_json(cost.to_json()) == cost


# --- fitting -------------------------------------------------------------------------------------


def profile(truth: StepCost, noise: float = 0.0, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    points = [
        (B - R, R, B, R * depth)
        for B in (1, 2, 4, 8, 16, 32, 64)
        for R in sorted({1, (B + 1) // 2, B})
        for depth in (64, 512, 2048)
    ]
    return [
        (*point, truth.seconds(*point) * (1 + noise * rng.standard_normal())) for point in points
    ]


STAIRS = StepCost(
    (1, 2, 4, 8, 16, 32, 64), (5e-3, 5e-3, 6e-3, 6e-3, 9e-3, 0.017, 0.033), 7e-4, 3e-7
)


def test_fit_recovers_a_synthetic_machine() -> None:
    found = StepCost.fit(profile(STAIRS))
    assert found.tokens == STAIRS.tokens
    assert found.table_s == pytest.approx(STAIRS.table_s, rel=1e-6)
    assert found.per_sequence_s == pytest.approx(7e-4, rel=1e-6)
    assert found.per_context_token_s == pytest.approx(3e-7, rel=1e-6)


def test_fit_bears_noise() -> None:
    found = StepCost.fit(profile(STAIRS, noise=0.03))
    for P, R, B, context, seconds in profile(STAIRS):
        assert found.seconds(P, R, B, context) == pytest.approx(seconds, rel=0.1)


def test_fit_pools_a_table_that_would_fall() -> None:
    found = StepCost.fit([(0, 1, 1, 0, 2.0), (0, 1, 2, 0, 1.0), (0, 1, 4, 0, 3.0)])
    low, same, high = found.table_s
    assert low == same
    assert 1.0 < low < 1.5  # relative error: nearer to the smaller
    assert high == 3.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.integers(0, 9),
            st.integers(1, 9),
            st.integers(0, 9000),
            st.floats(1e-6, 1e3),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_fit_of_anything_measured_is_a_valid_cost(samples: list[Any]) -> None:
    cost = StepCost.fit(samples)  # the constructor is strict
    assert cost.tokens == tuple(sorted({B for _, _, B, _, _ in samples}))


def test_fit_sees_no_slope_where_nothing_varies_beside_b() -> None:
    found = StepCost.fit([(0, B, B, 100 * B, 0.3 * B) for B in (1, 3, 7)])
    assert (found.per_sequence_s, found.per_context_token_s) == (0.0, 0.0)
    assert found.table_s == pytest.approx((0.3, 0.9, 2.1))


def test_fit_never_finds_a_negative_cost() -> None:
    found = StepCost.fit([(0, R, 8, 100 * R, 2.0 - 0.1 * R) for R in (1, 4, 8)])
    assert (found.per_sequence_s, found.per_context_token_s) == (0.0, 0.0)


def test_fit_never_explains_more_than_was_measured() -> None:
    """The slope seen at B = 1 would make the step at B = 2 cost four times what it took."""
    found = StepCost.fit([(0, 1, 1, 0, 1.0), (0, 1, 1, 1000, 3.0), (0, 1, 2, 10_000, 5.0)])
    assert 0.0 < found.per_context_token_s * 10_000 < 5.0


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(0, 1, 1, 0)],
        [(0, 1, 1, 0, math.nan)],
        [(0, 1, 0, 0, 1.0)],
        [(0, 1, 1.5, 0, 1.0)],
        [(0, 1, 1, 0, 0.0)],
        [(0, 1, 1, -3, 1.0)],
    ],
)
def test_fit_refuses_what_is_no_measurement(samples: Any) -> None:
    with pytest.raises(ConfigError, match="samples"):
        StepCost.fit(samples)


# --- learning from steps -------------------------------------------------------------------------


def test_correction_converges_to_a_machine_of_another_speed_and_shape() -> None:
    """Everything twice as slow, the last stair three times; 10 % noise, one hiccup in twelve."""
    truth = StepCost((1, 2, 4, 8, 16), (2.0, 2.2, 2.2, 4.0, 9.0), 0.01, 1e-4)
    rng = np.random.default_rng(1)
    online = OnlineStepCost(COST)
    for _ in range(3000):
        B = int(rng.integers(1, 17))
        seconds = truth.seconds(0, 1, B, 100) * (1 + 0.1 * rng.standard_normal())
        online.observe(0, 1, B, 100, seconds * (20.0 if rng.random() < 1 / 12 else 1.0))
    for B in (1, 2, 3, 4, 6, 8, 12, 16):
        assert online.current.seconds(0, 1, B, 100) == pytest.approx(
            truth.seconds(0, 1, B, 100), rel=0.15
        )
    assert 0.05 < online.residual < 0.5


def test_a_steady_machine_is_learnt_exactly_and_leaves_no_residual() -> None:
    online = OnlineStepCost(COST)
    online.observe(0, 2, 6, 50, 2 * COST.seconds(0, 2, 6, 50))
    assert online.residual == 1.0
    for _ in range(300):
        online.observe(0, 2, 6, 50, 2 * COST.seconds(0, 2, 6, 50))
    assert online.current.seconds(0, 2, 6, 50) == pytest.approx(2 * COST.seconds(0, 2, 6, 50))
    assert online.residual < 1e-6
    # The neighbourhood follows, less the further away: nothing is left as a cliff.
    ratio = np.array(online.current.table_s) / np.array(COST.table_s)
    assert 1.2 < ratio[0] < ratio[2]
    assert 1.2 < ratio[4] < ratio[3]


def test_older_points_give_way_to_the_newest() -> None:
    """T(2) = T(4): a faster step at 4 takes the point at 2 along, a slower one at 2 that at 4."""
    for B, seconds in ((4, 0.5), (2, 2.2)):
        after = corrected(COST, COST, 0, 0, B, 0, seconds).table_s
        change = RATE * (SURPRISE if seconds > 1.1 else -SURPRISE)
        assert after[1:3] == pytest.approx([1.1 * math.exp(change)] * 2)


def test_one_outlier_hardly_moves_the_table() -> None:
    for seconds in (1e-6, 1e6, 1e308):
        after = np.array(corrected(COST, COST, 0, 1, 4, 0, seconds).table_s)
        assert (np.abs(np.log(after / COST.table_s)) <= RATE * SURPRISE * 1.001).all()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_what_is_no_measurement_is_ignored(seconds: float) -> None:
    online = OnlineStepCost(COST)
    online.observe(0, 1, 4, 0, seconds)
    online.observe(0, 0, 0, 0, 1.0)
    assert online.current is COST
    assert online.residual == 0.0
    assert corrected(COST, COST, 0, 1, 4, 0, seconds) is COST


@given(
    step_costs(),
    st.lists(
        st.tuples(
            st.integers(0, 400), st.one_of(st.floats(), st.floats(1e-9, 1e6)), st.integers(1, 80)
        ),
        max_size=25,
    ),
)
def test_whatever_is_observed_the_cost_stays_valid_and_near_its_profile(
    cost: StepCost, steps: list[tuple[int, float, int]]
) -> None:
    online = OnlineStepCost(cost)
    for B, seconds, times in steps:
        for _ in range(times):
            online.observe(0, 1, B, 10, seconds)  # the constructor is strict
    ratio = np.array(online.current.table_s) / np.array(cost.table_s)
    assert (ratio >= (1 - 1e-9) / CORRECTION_LIMIT).all()
    assert (ratio <= (1 + 1e-9) * CORRECTION_LIMIT).all()
    assert 0.0 <= online.residual <= 1.0


# --- the cache -----------------------------------------------------------------------------------


def test_cache_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cost.json"
    COST.save(path)
    COST.save(path)
    assert StepCost.load(path) == COST
    assert [file.name for file in path.parent.iterdir()] == ["cost.json"]


def test_a_save_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    COST.save(path)

    class Unprintable(StepCost):
        def to_json(self) -> str:
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        Unprintable(COST.tokens, COST.table_s).save(path)
    assert StepCost.load(path) == COST
    assert [file.name for file in tmp_path.iterdir()] == ["cost.json"]


def test_a_reader_that_opened_the_old_file_keeps_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    COST.save(path)
    with path.open() as reader:
        StepCost.from_table({1: 1.0}).save(path)
        assert StepCost.from_json(reader.read()) == COST
    assert StepCost.load(path) == StepCost.from_table({1: 1.0})


@pytest.mark.parametrize("content", [b"", b'{"tokens": [1', b"\xff\xfe", b"{}"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cost\.json"):
        StepCost.load(path)


def test_cost_key_tells_every_part_apart() -> None:
    parts = ("cpu x 2 cores", "/models/Some Model (v2)/", "float32", "native", 2)
    others: list[tuple[Any, ...]] = [
        ("cpu x 4 cores", *parts[1:]),
        (parts[0], "/elsewhere/Some Model (v2)/", *parts[2:]),
        (*parts[:2], "int8", *parts[3:]),
        (*parts[:3], "transformers", 2),
        (*parts[:4], 1),
    ]
    keys = {cost_key(*part) for part in (parts, *others)}
    assert len(keys) == 6
    assert cost_key(*parts) == cost_key(*parts)
    assert cost_key(*parts).startswith("Some-Model-v2-float32-native-2t-")
    assert all("/" not in key and key.endswith(".json") for key in keys)


def test_hardware_is_named_by_processor_and_cores() -> None:
    cpuinfo = (
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
        "stepping\t: 1\nempty\t:\n\nprocessor\t: 1\ncpu family\t: 25\n"
    )
    assert hardware_name(cpuinfo, 2) == "AMD EPYC, cpu family 25, model 17, stepping 1, 2 cores"
    assert hardware_name("", 8, "arm64") == "arm64, 8 cores"
    assert hardware().endswith("cores")


def test_verifying_costs_each_sequence_but_the_first() -> None:
    """Queries of unequal length are padded: a jump at the first draft token, none with R = 1."""
    cost = StepCost((1, 64), (1.0, 1.0), per_verified_sequence_s=0.5)
    assert cost.curve(3, 1, 0, 2).tolist() == [1.0, 1.0, 1.0]
    assert cost.curve(3, 5, 0, 2).tolist() == [1.0, 3.0, 3.0]
    assert [cost.seconds(3, 5, B, 0) for B in (8, 9, 10)] == [1.0, 3.0, 3.0]
    assert cost.curve(8, 0, 0, 1).tolist() == [1.0, 1.0]


def test_a_fit_tells_verifying_from_sequences() -> None:
    true = StepCost((1, 5, 16), (0.02, 0.025, 0.03), 1e-3, 2e-6, 5e-4)
    shapes = [(0, 1, 1), (0, 1, 5), (0, 5, 5), (0, 4, 5), (0, 1, 16), (0, 16, 16), (0, 15, 16)]
    steps = [(P, R, B, R * context) for P, R, B in shapes for context in (100, 900)]
    found = StepCost.fit([(*step, true.seconds(*step)) for step in steps])
    assert found.per_verified_sequence_s == pytest.approx(5e-4, rel=1e-3)
    assert found.per_sequence_s == pytest.approx(1e-3, rel=1e-3)
