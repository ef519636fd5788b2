"""Floors first: weights, capacity and drafters go to requests below their floor, then Θ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.scheduler import Policy, StepCost, plan
from dspark.scheduler.joint import JointPlan, VerifierPlan, plan_jointly
from dspark.scheduler.joint.demand import SURVIVAL
from dspark.scheduler.joint.outlook import Cluster, Outlook

from .toy_cluster import CHEAP, GAMMA, PATIENT, bins, cluster, step_costs, tenant, view

TOP_K = Policy.parse("top-k")

# Each draft token costs a 40th of the plain step: of mixed drafts only the better are verified.
SLOPED = StepCost((20, 160), (0.02, 0.09))


def rates(
    mine: VerifierPlan, cost: StepCost, active: dict[str, int], confidence: dict[str, float]
) -> dict[str, float]:
    """Tokens a second of one request of each tenant, if the verifier's own planner fills the plan's
    K with live drafts like those reported."""
    names = [name for name, n in active.items() for _ in range(n)]
    survivals = []
    for name in names:
        exact = confidence[name] ** np.arange(1, GAMMA + 1)
        at = 63 - np.minimum((exact * 64).astype(int), 63)
        survivals.append(SURVIVAL[at])
    R, directions = len(names), mine.directions
    weights = [directions.weights.get(name, 1.0) for name in names]
    caps = [directions.caps.get(name, GAMMA) for name in names]
    lengths = plan(survivals, cost, 0, R, 0, TOP_K, directions.capacity, caps, weights)
    seconds = cost.seconds(0, R, R + int(lengths.sum()), 0)
    made = dict.fromkeys(active, 0.0)
    for name, a, n in zip(names, survivals, lengths, strict=True):
        made[name] += (1 + float(a[:n].sum())) / active[name] / seconds
    return made


ACTIVE = {"good": 10, "poor": 10}
CONFIDENCE = {"good": 0.9, "poor": 0.6}


def planned(floor_tps: float, good_floor: float = 0.0) -> JointPlan:
    tenants = [
        tenant("good", 10, CONFIDENCE["good"], floor_tps=good_floor),
        tenant("poor", 10, CONFIDENCE["poor"], floor_tps=floor_tps),
    ]
    return plan_jointly(cluster({"v": view(SLOPED, *tenants)}), Outlook(), 0.0)[0]


def test_without_floors_there_are_no_weights() -> None:
    joint = planned(0.0)
    assert joint.verifiers["v"].directions.weights == {}
    assert joint.floors == 1.0


def test_a_floor_that_is_kept_anyway_changes_nothing() -> None:
    free = planned(0.0).verifiers["v"]
    assert planned(1.0).verifiers["v"].directions == free.directions


def test_a_floor_is_reached_before_theta_is_maximised() -> None:
    free = planned(0.0)
    before = rates(free.verifiers["v"], SLOPED, ACTIVE, CONFIDENCE)["poor"]
    floor = before * 1.3
    joint = planned(floor)
    after = rates(joint.verifiers["v"], SLOPED, ACTIVE, CONFIDENCE)["poor"]
    assert joint.verifiers["v"].directions.weights.keys() == {"poor"}
    assert joint.verifiers["v"].directions.weights["poor"] > 1
    # Within what histograms of 16 bins can tell.
    assert after >= floor * 0.97
    assert joint.floors == 1.0
    assert joint.objective <= free.objective


def test_floors_that_cannot_all_be_reached_are_missed_alike_and_it_says_so() -> None:
    joint = planned(500.0, good_floor=500.0)
    assert joint.floors < 0.2
    got = rates(joint.verifiers["v"], SLOPED, ACTIVE, CONFIDENCE)
    free = rates(planned(0.0).verifiers["v"], SLOPED, ACTIVE, CONFIDENCE)
    assert free["good"] > 2 * free["poor"]
    # Their drafts are ten alike each, so a weight moves ten tokens at once: no nearer than that.
    assert got["good"] < 1.75 * got["poor"]
    assert got["poor"] > 1.5 * free["poor"]
    assert joint.verifiers["v"].floors == pytest.approx(joint.floors)


def test_a_full_drafter_serves_the_floor_first() -> None:
    """Drafts gain more at a, but b's requests fall below their floor without."""
    a = view(CHEAP, tenant("x", 20, 0.95), drafters={"d": 20})
    b_free = view(CHEAP, tenant("y", 20, 0.6), drafters={"d": 20})
    b_floor = view(CHEAP, tenant("y", 20, 0.6, floor_tps=70.0), drafters={"d": 20})

    def of_b(b: object) -> tuple[float, VerifierPlan]:
        joint = plan_jointly(cluster({"a": a, "b": b}, {"d": 4500.0}), Outlook(), 0.0)[0]  # type: ignore[dict-item]
        assert joint.full == ("d",)
        return joint.verifiers["b"].draft_budgets["d"], joint.verifiers["b"]

    free, mine = of_b(b_free)
    plain = 20 / CHEAP.seconds(0, 20, 20, 0)
    assert mine.throughput / 20 < 70.0
    needed, mine = of_b(b_floor)
    assert plain / 20 < 70.0
    assert needed > 2 * free
    assert mine.throughput / 20 >= 70.0 * 0.97
    assert mine.floors >= 1.0


def test_floors_raise_a_tenants_share_where_all_wait() -> None:
    def share(floor_tps: float) -> tuple[float, float]:
        views = {
            name: view(CHEAP, tenant("x", 10, 0.5, 9), tenant("y", 10, 0.5, 9, floor_tps=floor_tps))
            for name in ("v", "w")
        }
        joint, _ = plan_jointly(cluster(views, None, {"x": 3.0, "y": 1.0}), Outlook())
        return joint.verifiers["v"].shares["y"], joint.floors

    assert share(0.0)[0] == pytest.approx(0.25, abs=0.01)
    raised, floors = share(45.0)
    assert raised == pytest.approx(20 * 45.0 / (2 * 1800), rel=0.2)
    assert floors == 1.0


@settings(PATIENT, max_examples=40)
@given(step_costs(), st.integers(1, 10), st.integers(1, 10), st.floats(0.1, 200.0), st.data())
def test_weights_only_help_who_has_a_floor(
    cost: StepCost, x: int, y: int, floor_tps: float, data: st.DataObject
) -> None:
    """And cost Θ; a floor that is kept anyway changes nothing."""
    confidence = [data.draw(st.floats(0.1, 0.98)) for _ in range(2)]
    of = ({"x": x, "y": y}, dict(zip("xy", confidence, strict=True)))

    def plan_with(floor: float) -> JointPlan:
        tenants = (
            tenant("x", x, confidence[0], floor_tps=floor),
            tenant("y", y, confidence[1]),
        )
        return plan_jointly(cluster({"v": view(cost, *tenants)}), Outlook(), 0.0)[0]

    free, floored = plan_with(0.0), plan_with(floor_tps)
    weights = floored.verifiers["v"].directions.weights
    assert set(weights) <= {"x"}
    assert all(1.0 <= w <= 64.0 for w in weights.values())
    assert floored.objective <= free.objective * (1 + 1e-9)
    if not weights:
        assert floored.objective >= 0.95 * free.objective
    if rates(free.verifiers["v"], cost, *of)["x"] >= floor_tps * (1 + 1e-6):
        assert floored.verifiers["v"].directions == free.verifiers["v"].directions


def test_bins_of_the_tests_are_those_of_the_planner() -> None:
    assert sum(bins({0.5: 3, 1.0: 1})) == 4
    assert SURVIVAL[63 - bins({0.5: 1}).index(1)] == pytest.approx(0.5, abs=1 / 128)
    assert isinstance(cluster({}), Cluster)
