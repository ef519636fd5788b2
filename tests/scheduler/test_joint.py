"""The joint plan: the best K, drafters where they gain most, never worse than each alone."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.plans import Plan, check_plan
from dspark.core.reports import DrafterUse, Report, TenantReport
from dspark.scheduler import StepCost, capacity
from dspark.scheduler.asking import PROBE_SHARE
from dspark.scheduler.intake import check_report
from dspark.scheduler.joint import (
    JointPlan,
    Objective,
    VerifierPlan,
    local_objective,
    objective,
    plan_jointly,
)
from dspark.scheduler.joint.demand import SURVIVAL
from dspark.scheduler.joint.outlook import Cluster, Outlook, VerifierView
from dspark.scheduler.joint.shares import paid

from .toy_cluster import (
    CHEAP,
    DEAR,
    GAMMA,
    PATIENT,
    bins,
    cluster,
    clusters,
    report,
    step_costs,
    tenant,
    view,
)


def planned(cluster: Cluster, smallest_gain: float = 0.05) -> JointPlan:
    return plan_jointly(cluster, Outlook(), smallest_gain)[0]


def one(view: VerifierView, smallest_gain: float = 0.0) -> VerifierPlan:
    return planned(Cluster({"v": view}), smallest_gain).verifiers["v"]


# --- capacities ----------------------------------------------------------------------------------


@settings(PATIENT, max_examples=80)
@given(step_costs(), st.integers(1, 12), st.integers(0, 40), st.data())
def test_k_is_what_the_planners_own_full_search_finds(
    cost: StepCost, R: int, P: int, data: st.DataObject
) -> None:
    """One verifier whose requests' drafts are those of the histogram: Θ as at the best K."""
    survivals = [
        np.sort(
            np.array(
                data.draw(st.lists(st.sampled_from(SURVIVAL.tolist()), min_size=3, max_size=3))
            )
        )[::-1]
        for _ in range(R)
    ]
    counts = bins({})
    for a in np.concatenate(survivals):
        counts = tuple(n + m for n, m in zip(counts, bins({float(a): 1}), strict=True))
    sent = report("v", [replace(tenant("a", R), survivals=counts)], prefill_tokens=float(P))
    mine = one(VerifierView(cost, 3, sent))
    best = capacity(survivals, cost, P, R, 0)
    ranked = np.sort(np.concatenate(survivals))[::-1]

    def theta(K: int) -> float:
        return (R + float(ranked[:K].sum())) / cost.decode_seconds(P, R, P + R + K, 0)

    assert mine.throughput == pytest.approx(theta(best), rel=1e-9)
    assert mine.directions.capacity is not None
    assert theta(mine.directions.capacity) == pytest.approx(theta(best), rel=1e-9)
    assert mine.directions.requests == R


def test_what_does_not_pay_is_bypassed() -> None:
    assert one(view(DEAR, tenant("a", 10, 0.6))).directions.capacity == 0
    assert one(view(CHEAP, tenant("a", 10, 0.9))).directions.capacity > 0  # type: ignore[operator]
    # A twentieth of Θ is less than a step cost is known to.
    slight = view(CHEAP, tenant("a", 10, 0.04))
    assert one(slight, 0.0).directions.capacity > 0  # type: ignore[operator]
    assert one(slight, 0.05).directions.capacity == 0


def test_draft_time_that_nothing_hides_counts() -> None:
    hidden = view(CHEAP, tenant("a", 10, 0.5))
    waits = (DrafterUse("d", 100, 0.1),)
    exposed = VerifierView(CHEAP, GAMMA, replace(hidden.report, drafters=waits))  # type: ignore[type-var]
    assert one(hidden).directions.capacity > 0  # type: ignore[operator]
    assert one(exposed).directions.capacity == 0


def test_a_tenant_whose_drafts_are_not_verified_is_not_drafted_for() -> None:
    """Capped at 0, and what its drafts took of a drafter is there for others."""
    mixed = view(CHEAP, tenant("good", 10, 0.9), tenant("bad", 10, 0.02), drafters={"d": 20})
    mine = one(mixed, 0.05)
    assert mine.directions.caps == {"bad": 0}
    whole = 20 * GAMMA / CHEAP.seconds(0, 20, 20 + 70, 0)
    assert planned(cluster({"v": mixed}, {"d": whole * 0.6})).full == ()
    assert planned(cluster({"v": mixed}, {"d": whole * 0.4})).full == ("d",)


def test_without_drafts_or_requests_the_verifier_plans_by_itself() -> None:
    assert one(view(CHEAP, tenant("a", 10, None))).directions.capacity is None
    idle = VerifierView(CHEAP, GAMMA, report("v", [], steps=0, R=0.0))
    assert one(idle).directions.capacity is None
    silent = one(VerifierView(CHEAP, GAMMA))
    assert silent.directions.capacity is None
    assert silent.epoch == -1
    assert planned(Cluster({})).verifiers == {}


def test_a_verifier_without_drafts_of_its_own_is_planned_by_the_tenants_elsewhere() -> None:
    known = view(CHEAP, tenant("a", 10, 0.9))
    joint = planned(cluster({"v": known, "w": view(CHEAP, tenant("a", 10, None))}))
    assert joint.verifiers["w"].directions.capacity == joint.verifiers["v"].directions.capacity


def test_a_plan_knows_the_epoch_and_the_newest_draft_that_it_was_made_from() -> None:
    sent = report("v", [tenant("a")], seen_through=42, epoch=7)
    mine = one(VerifierView(CHEAP, GAMMA, sent))
    assert (mine.epoch, mine.seen_through) == (7, 42)


# --- drafters ------------------------------------------------------------------------------------


def rivals(capacity: float) -> Cluster:
    """One drafter; at `rich` a draft token gains most."""
    return cluster(
        {
            "rich": view(CHEAP, tenant("x", 20, 0.95), drafters={"d": 20}),
            "poor": view(CHEAP, tenant("y", 20, 0.4), drafters={"d": 20}),
        },
        {"d": capacity},
    )


def test_a_full_drafter_goes_where_a_draft_token_gains_most() -> None:
    now = rivals(3500.0)
    joint, outlook = plan_jointly(now, Outlook())
    assert joint.full == ("d",)
    assert joint.verifiers["rich"].draft_budgets["d"] > 0.9 * 3500
    central = objective(now, outlook, joint)
    assert central.now == pytest.approx(joint.objective)
    assert central.now >= 1.10 * local_objective(now, outlook).now
    assert central.now >= 1.10 * local_objective(now, outlook, equally=True).now


def waiting(cluster: Cluster, seconds: float) -> Cluster:
    """The same where each round waits so long for its drafts."""
    views = {}
    for name, seen in cluster.verifiers.items():
        assert seen.report is not None
        uses = tuple(DrafterUse(drafter, 100, seconds) for drafter in seen.drafters)
        views[name] = replace(seen, report=replace(seen.report, drafters=uses))
    return replace(cluster, verifiers=views)


def test_a_part_of_a_drafter_is_kept_for_who_gains_most_and_waits() -> None:
    """It is not given what it cannot ask for yet; nor are those who make it wait."""
    patient = planned(rivals(10_000.0)).verifiers
    assert sum(v.draft_budgets["d"] for v in patient.values()) == pytest.approx(10_000, rel=1e-3)
    waits = planned(waiting(rivals(8_000.0), 0.01))
    rich, poor = (waits.verifiers[name].draft_budgets["d"] for name in ("rich", "poor"))
    assert waits.full == ("d",)
    assert rich < 6_000  # all that it asks for
    assert rich + poor == pytest.approx(6_000, rel=1e-3)
    more = planned(waiting(rivals(4_000.0), 0.01)).verifiers  # and then it may have all
    assert more["rich"].draft_budgets["d"] > 0.95 * 4_000


def test_a_verifier_that_asks_for_nothing_makes_nobody_wait() -> None:
    alone = cluster(
        {
            "rich": view(CHEAP, tenant("x", 20, 0.95), drafters={"d": 20}),
            "silent": view(CHEAP, tenant("y", 20, 0.01), drafters={"d": 20}),
        },
        {"d": 4_000.0},
    )
    assert planned(waiting(alone, 0.01)).verifiers["rich"].draft_budgets["d"] > 0.95 * 4_000
    assert planned(waiting(replace(alone, drafters={"d": 5_000.0}), 0.01)).full == ()


def test_floors_come_before_what_is_kept_free() -> None:
    both = {
        name: view(CHEAP, tenant("x", 20, 0.95, floor_tps=150.0), drafters={"d": 20})
        for name in ("v", "w")
    }
    joint = planned(waiting(cluster(both, {"d": 6_000.0}), 0.005))
    assert joint.full == ("d",)
    assert joint.floors == 1.0  # 0.94 of them with three quarters of it


def test_a_drafter_with_room_bounds_nobody() -> None:
    joint = planned(rivals(1e6))
    assert joint.full == ()
    assert all(mine.draft_budgets == {} for mine in joint.verifiers.values())
    unmeasured = planned(rivals(0.0))
    assert unmeasured.full == ()


def test_who_gets_no_drafter_is_probed_with_a_hundredth() -> None:
    """Of the full rate: what it would ask for, never asleep and never much."""
    joint = planned(rivals(1000.0))
    probes = joint.verifiers["poor"].draft_budgets["d"]
    whole = 20 * GAMMA / CHEAP.seconds(0, 20, 20, 0)
    assert 0 < probes <= PROBE_SHARE * whole * (1 + 1e-9)
    assert sum(mine.draft_budgets["d"] for mine in joint.verifiers.values()) <= 1000.0 * (1 + 1e-9)


def test_a_starved_verifier_stays_planned_for() -> None:
    """Its reports hold nearly no drafts; the plan neither forgets it nor flaps."""
    now = rivals(3500.0)
    joint, outlook = plan_jointly(now, Outlook())
    first = {name: mine.draft_budgets["d"] for name, mine in joint.verifiers.items()}
    for i in range(2, 60):
        views = {}
        for name, view_ in now.verifiers.items():
            assert view_.report is not None
            budget = joint.verifiers[name].draft_budgets["d"]
            drafted = round(budget * 0.5)
            whole = view_.report.tenants[0].survivals
            part = tuple(round(n * drafted / sum(whole)) for n in whole)
            tenants = (replace(view_.report.tenants[0], survivals=part),)
            uses = (DrafterUse("d", drafted, 0.0),)
            sent = replace(
                view_.report, seen_through=i, interval_s=0.5, tenants=tenants, drafters=uses
            )
            views[name] = VerifierView(CHEAP, GAMMA, sent)  # drafters: as it reports
        joint, outlook = plan_jointly(replace(now, verifiers=views), outlook)
        assert joint.full == ("d",)
        for name, mine in joint.verifiers.items():
            assert mine.draft_budgets["d"] == pytest.approx(first[name], rel=0.1)


def test_equal_verifiers_share_a_drafter_without_loss() -> None:
    now = cluster(
        {n: view(CHEAP, tenant("x", 20, 0.9), drafters={"d": 20}) for n in "vw"}, {"d": 3000.0}
    )
    joint, outlook = plan_jointly(now, Outlook())
    assert joint.objective >= 0.99 * local_objective(now, outlook).now


def test_equal_parts_of_a_drafter_are_taken_where_stairs_make_them_the_better_split() -> None:
    """Eighths of a verifier's requests are too coarse for steps as steep as these."""
    stairs = StepCost(
        (1, 8, 9, 32, 33, 128, 129, 512), (20e-3,) * 2 + (30e-3,) * 2 + (50e-3,) * 2 + (0.1,) * 2
    )
    now = cluster(
        {
            "few": view(stairs, tenant("x", 2, 0.9), drafters={"d": 2}),
            "many": view(stairs, tenant("y", 20, 0.9), drafters={"d": 20}),
        },
        {"d": 1000.0},
    )
    joint, outlook = plan_jointly(now, Outlook())
    equal = local_objective(now, outlook, equally=True).now
    assert local_objective(now, outlook).now < 0.95 * equal
    assert joint.objective >= equal * (1 - 1e-9)


# --- any cluster ---------------------------------------------------------------------------------


@settings(PATIENT, max_examples=60)
@given(clusters())
def test_no_bound_is_broken(cluster: Cluster) -> None:
    joint = planned(cluster)
    given_out = dict.fromkeys(cluster.drafters, 0.0)
    for name, mine in joint.verifiers.items():
        directions, view_ = mine.directions, cluster.verifiers[name]
        R = directions.requests
        assert directions.capacity is not None
        assert 0 <= directions.capacity <= math.ceil(R * view_.gamma)
        assert set(directions.caps.values()) <= {0}
        assert 0.0 <= mine.drafted <= 1.0
        plain = R / view_.step_cost.seconds(0, int(R), int(R), 0)
        assert mine.throughput >= plain * (1 - 1e-9)
        if mine.shares:
            assert sum(mine.shares.values()) == pytest.approx(1.0)
        for drafter, tokens in mine.draft_budgets.items():
            assert drafter in view_.drafters
            given_out[drafter] += tokens
        mark = (mine.epoch, mine.seen_through)
        check_plan(Plan(1, name, *mark, 1.0, directions, mine.draft_budgets, mine.shares))
    for drafter, tokens in given_out.items():
        assert tokens <= cluster.drafters[drafter] * (1 + 1e-6) + 1e-6
        if drafter not in joint.full:
            assert tokens == 0
    assert joint.objective == pytest.approx(sum(m.throughput for m in joint.verifiers.values()))


def keeping_own_shares(joint: JointPlan) -> JointPlan:
    """The same plan without shares, so that each verifier keeps the tenants' by itself."""
    plans = {name: replace(mine, shares={}) for name, mine in joint.verifiers.items()}
    return replace(joint, verifiers=plans)


def paid_of_due(cluster: Cluster, plan: Objective, own: Objective) -> float:
    """Of what a plan brings the tenants that wait, what is within their shares of what own shares
    make."""
    sigma = np.array([cluster.shares[name] for name in plan.tokens])
    due = sigma / sigma.sum() * sum(own.tokens.values())
    return paid(np.array(list(plan.tokens.values())), due)


@settings(PATIENT, max_examples=60)
@given(clusters(), st.booleans())
def test_central_is_never_a_hundredth_below_local(cluster: Cluster, equally: bool) -> None:
    """In tokens of the requests that run now, whatever comes by shares later. And in shares, with
    what each verifier has of the drafters left as it is: that follows the mix of requests, plan by
    plan, while local parts that did worse for the present one may happen to suit the one to come.

    Where a tenant cannot fill its share of a verifier, others have the rest, and verifiers that
    keep shares by themselves make up for it nowhere. More tokens than the plan's are no better
    then, as long as tenants have less of what is due to them over the whole cluster.
    """
    joint, outlook = plan_jointly(cluster, Outlook())
    central = objective(cluster, outlook, joint)
    local = local_objective(cluster, outlook, equally=equally)
    assert central.now >= 0.99 * local.now
    own = objective(cluster, outlook, keeping_own_shares(joint))
    if not joint.full:
        assert own == local
    fair, fair_anyway = (paid_of_due(cluster, plan, own) for plan in (central, own))
    assert fair >= 0.99 * fair_anyway
    assert central.settled >= 0.99 * own.settled or fair > fair_anyway


def test_shares_are_worth_what_a_tenants_requests_can_fill() -> None:
    """At `w` b is due three quarters, but has two requests, running or waiting, of eleven. With
    more of b's drafts would pay there, and local plans were credited with that."""
    flat = StepCost((1, 2), (0.0625, 0.0625))
    dearer = replace(flat, per_verified_sequence_s=0.001)
    now = cluster(
        {
            "v": view(flat, tenant("a", 1, 0.5), tenant("b", 1, 0.5)),
            "w": view(dearer, tenant("a", 10, 0.5, 1), tenant("b", 1, 0.75, 1), drafters={"d": 1}),
        },
        {"d": 99.0},
        {"a": 1.0, "b": 3.0},
    )
    joint, outlook = plan_jointly(now, Outlook())
    central, local = objective(now, outlook, joint), local_objective(now, outlook)
    assert central.settled == pytest.approx(local.settled)
    assert central.tokens == pytest.approx(local.tokens)
    assert local.settled == pytest.approx(local.now)


def test_shares_are_kept_across_verifiers_where_others_would_make_more_of_them() -> None:
    """Hard has one request at `v` and cannot have half of it. Easy's drafts would bring more at `w`
    too, but easy has the rest of `v`."""
    now = cluster(
        {
            "v": view(CHEAP, tenant("hard", 1, 0.05), tenant("easy", 10, 0.9, 10)),
            "w": view(CHEAP, tenant("hard", 10, 0.05, 20), tenant("easy", 10, 0.9, 20)),
        },
        None,
        {"hard": 1.0, "easy": 1.0},
    )
    joint, outlook = plan_jointly(now, Outlook())
    central, local = objective(now, outlook, joint), local_objective(now, outlook)
    assert local.settled > central.settled
    assert central.tokens["easy"] > central.tokens["hard"] > 1.1 * local.tokens["hard"]
    assert joint.verifiers["w"].shares["hard"] > 0.9


@st.composite
def wild_reports(draw: st.DrawFn, name: str) -> Report:
    """Whatever `check_report` lets in."""
    count = st.sampled_from([0, 1, 7, 2**32 - 1])
    mean = st.sampled_from([0.0, 1e-9, 0.3, 5.0, 1e4, 2.0**31])
    tenants = [
        TenantReport(
            t,
            draw(count),
            draw(count),
            draw(count),
            draw(st.sampled_from([0.0, 1e-9, 50.0, 1e9])),
            draw(st.sampled_from([(), (0,) * 64, (2**32 - 1,) * 64, bins({0.9: 5})])),
        )
        for t in draw(st.sets(st.sampled_from("abc")))
    ]
    uses = tuple(
        DrafterUse(d, draw(count), draw(st.sampled_from([0.0, 3600.0])))
        for d in draw(st.sets(st.sampled_from("de")))
    )
    return Report(
        name,
        draw(st.integers(0, 2)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([1e-6, 0.05, 3600.0])),
        draw(count),
        draw(mean),
        draw(mean),
        draw(mean),
        0.0,
        0,
        0,
        tuple(tenants),
        uses,
    )


@settings(PATIENT, max_examples=40)
@given(st.data(), st.sampled_from([0.0, 1e-3, 500.0, 1e9]))
def test_whatever_a_report_may_say_can_be_planned_with(data: st.DataObject, rate: float) -> None:
    outlook = Outlook()
    for _ in range(3):
        names = data.draw(st.sets(st.sampled_from("uvw"), min_size=1))
        views = {
            name: VerifierView(
                data.draw(step_costs()), 7, check_report(data.draw(wild_reports(name)))
            )
            for name in sorted(names)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            joint, outlook = plan_jointly(Cluster(views, {"d": rate, "e": rate}), outlook)
        assert math.isfinite(joint.objective)
        for name, mine in joint.verifiers.items():
            mark = (mine.epoch, mine.seen_through)
            check_plan(Plan(1, name, *mark, 1.0, mine.directions, mine.draft_budgets, mine.shares))


def test_two_tenants_on_unequal_verifiers_are_worth_a_tenth_more_together() -> None:
    """Easy's drafts stand, hard's do not; at `dear` no draft pays. Alone, each serves 1 : 3."""
    tenants = [tenant("easy", 10, 0.95, 50), tenant("hard", 10, 0.02, 50)]
    now = cluster(
        {"cheap": view(CHEAP, *tenants), "dear": view(DEAR, *tenants)},
        None,
        {"easy": 1.0, "hard": 3.0},
    )
    joint, outlook = plan_jointly(now, Outlook())
    central, local = objective(now, outlook, joint), local_objective(now, outlook)
    assert central.settled >= 1.10 * local.settled
    assert joint.verifiers["cheap"].shares["easy"] > 0.25 > joint.verifiers["dear"].shares["easy"]


def test_tenants_that_do_not_wait_keep_their_share_and_others_get_the_rest() -> None:
    tenants = [tenant("a", 5, 0.9, 9), tenant("b", 5, 0.9, 9), tenant("calm", 5, 0.9)]
    shares = planned(cluster({"v": view(CHEAP, *tenants)}, None, {"a": 3.0})).verifiers["v"].shares
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "calm": 0.2}, abs=0.01)


def test_nobody_is_told_shares_where_only_one_waits() -> None:
    tenants = [tenant("a", 5, 0.9, 9), tenant("b", 5, 0.9)]
    assert planned(cluster({"v": view(CHEAP, *tenants)})).verifiers["v"].shares == {}


def test_shares_lean_to_the_tenant_that_was_served_too_little() -> None:
    """Whatever the reason, and by no more than a factor of two to each side."""
    tenants = [tenant("a", 5, 0.9, 9, tokens=500), tenant("b", 5, 0.9, 9, tokens=500)]
    outlook, shares = Outlook(), []
    for i in range(1, 60):
        sent = {n: view(CHEAP, *tenants, name=n, seen_through=i) for n in "vw"}
        joint, outlook = plan_jointly(cluster(sent, None, {"a": 3.0, "b": 1.0}), outlook)
        shares.append(joint.verifiers["v"].shares["a"])
    assert shares[0] == pytest.approx(0.75, abs=0.02)
    assert shares == sorted(shares)
    assert 0.85 < shares[-1] < 3 * 4 / (3 * 4 + 1) + 0.01
    rested = [replace(t, queued=0) for t in tenants]
    for i in range(60, 200):
        sent = {n: view(CHEAP, *rested, name=n, seen_through=i) for n in "vw"}
        joint, outlook = plan_jointly(cluster(sent, None, {"a": 3.0, "b": 1.0}), outlook)
    assert max(map(abs, outlook.lean.values())) < 0.01


def test_a_tenant_that_nobody_knows_has_the_default_share() -> None:
    tenants = [tenant("a", 5, 0.9, 9), tenant("stranger", 5, 0.9, 9)]
    now = replace(cluster({"v": view(CHEAP, *tenants)}, None, {"a": 3.0}), default_share=1.0)
    assert planned(now).verifiers["v"].shares == pytest.approx(
        {"a": 0.75, "stranger": 0.25}, abs=0.01
    )


def test_budgets_are_of_the_pools_drafters_only() -> None:
    """By replica id. What a verifier drafts by itself, under whatever name, nobody else wants; nor
    is a verifier that never had a draft of the pool given a budget there."""
    mixed = (DrafterUse("d", 1000, 0.0), DrafterUse("ngram", 500, 0.0))
    sent = {
        name: VerifierView(CHEAP, GAMMA, report(name, [tenant("t", 20)], drafters=uses))
        for name, uses in (("v", mixed), ("w", mixed[1:]))
    }
    joint = planned(cluster(sent, {"d": 100.0}))
    assert joint.full == ("d",)
    assert set(joint.verifiers["v"].draft_budgets) == {"d"}
    assert joint.verifiers["w"].draft_budgets == {}
    assert joint.verifiers["w"].directions.capacity


@settings(PATIENT, max_examples=20)
@given(clusters())
def test_the_same_reports_make_the_same_plan(cluster: Cluster) -> None:
    first, outlook = plan_jointly(cluster, Outlook())
    assert plan_jointly(cluster, Outlook())[0] == first
    again = plan_jointly(cluster, outlook)[0]
    assert again == plan_jointly(cluster, outlook)[0]
