"""A verifier under the scheduler's plans: which it follows, and where the barrier stops them.

Plans come late, twice, out of order, from a fenced epoch, for another replica: none of that may do
more than be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dspark.core.drafts import Draft
from dspark.core.errors import InvalidRequest
from dspark.core.plans import Calibration, CalibrationTable, Directions, Plan, check_plan
from dspark.core.sampling import SamplingMode, SamplingParams
from dspark.core.sequence import SequenceState
from dspark.scheduler import Policy
from dspark.verifier.batcher import Item
from dspark.verifier.drafting import survival
from dspark.verifier.guidance import Guidance
from dspark.verifier.planning import StepPlanner
from dspark.verifier.sequence import DraftInHand, Sequence

from .test_barrier import BIASED, FAIR, A, draft_of, exact_share_of_a
from .toy import (
    HandClock,
    Scene,
    ScriptedDrafter,
    ToyBackend,
    greedy,
    history_rule,
    oracle,
    request,
    still_cost,
    toy_engine,
)

ME, EPOCH = "v1", 7


def plan_of(version: int = 1, seen_through: int = 0, **directions: object) -> Plan:
    asked = {"requests": 1.0, "capacity": 2, **directions}
    return Plan(version, ME, EPOCH, seen_through, 1.0, Directions(**asked))  # type: ignore[arg-type]


def guided(clock: Callable[[], float] = lambda: 0.0) -> Guidance:
    guidance = Guidance(clock)
    guidance.registered(ME, EPOCH)
    return guidance


# --- which plans are followed


def test_a_newer_plan_replaces_an_older_one_and_nothing_else_does() -> None:
    guidance = guided()
    assert guidance.take(plan_of(2))
    assert not guidance.take(plan_of(2))
    assert not guidance.take(plan_of(1))
    assert guidance.plan is not None
    assert guidance.plan.version == 2
    assert guidance.take(plan_of(3))
    assert guidance.dropped == {"not newer": 2}


@pytest.mark.parametrize("wrong", [{"epoch": 6}, {"epoch": 8}, {"verifier": "v2"}])
def test_a_plan_for_another_life_or_replica_is_dropped(wrong: dict[str, object]) -> None:
    guidance = guided()
    assert not guidance.take(replace(plan_of(9), **wrong))  # type: ignore[arg-type]
    assert guidance.plan is None
    assert guidance.dropped == {"another epoch": 1}


def test_a_plan_holds_for_its_time_and_no_longer() -> None:
    clock = HandClock()
    guidance = guided(clock)
    guidance.take(plan_of())
    clock.now = 0.999
    assert guidance.directions(None) is not None
    clock.now = 1.0
    assert guidance.directions(None) is None
    assert guidance.plan is None


def test_a_new_life_knows_nothing_of_the_plans_of_the_old_one() -> None:
    """Also where the store has lost its counters: a lower version is followed then."""
    guidance = guided()
    guidance.take(plan_of(1000))
    guidance.registered(ME, EPOCH + 1)
    assert guidance.plan is None
    assert guidance.take(replace(plan_of(1), epoch=EPOCH + 1))


# --- the barrier


def test_numbers_are_for_steps_whose_drafts_are_all_newer() -> None:
    guidance = guided()
    guidance.take(plan_of(seen_through=5))
    assert guidance.directions(5) is None
    assert guidance.directions(6) is not None
    assert guidance.directions(None) is not None


def a_planner(guidance: Guidance, policy: str = "top-k") -> StepPlanner:
    # Seconds of Appendix A.
    cost = still_cost({1: 100.0, 2: 100.0 / 0.5, 3: 100.0 / 0.45})
    return StepPlanner(cost, Policy.parse(policy), max_tokens=16, guidance=guidance)


def planned_with(
    look: Callable[[Draft], int], honest: bool
) -> Callable[[StepPlanner, Sequence, Draft, int], object]:
    """A draft held back while the scheduler saw it: the plan's K follows from what it says, `look`.
    honest: the plan owns up to having seen it."""

    def planned(planner: StepPlanner, sequence: Sequence, draft: Draft, number: int) -> object:
        guidance = planner._guidance  # the engine's own way in needs a whole engine
        sequence.draft = DraftInHand(
            number, draft, survival(draft.confidence_logits, np.eye(2)[:, [0, 0]])
        )
        seen = number if honest else number - 1
        version = 10 * number
        guidance.take(plan_of(version, seen, capacity=look(draft)))
        item = Item(sequence, 1, decoding=True, reaches_end=True, draft_cap=2)
        return planner.plan([item])

    return planned


def knows_too_much(draft: Draft) -> int:
    """What a retrospective search of Appendix A admits: both tokens after A, none after B."""
    return 2 if draft.ids[0] == A else 0


@pytest.mark.parametrize("policy", ["top-k", "early-stop"])
def test_a_plan_that_saw_the_draft_does_not_reach_it(policy: str) -> None:
    planner = a_planner(guided(), policy)
    share = exact_share_of_a(planner, planned_with(knows_too_much, honest=True))  # type: ignore[arg-type]
    assert share == pytest.approx(FAIR, abs=1e-12)
    assert planner.guided_plans == 0


def test_that_has_power_a_plan_that_hides_what_it_saw_is_biased() -> None:
    planner = a_planner(guided())
    share = exact_share_of_a(planner, planned_with(knows_too_much, honest=False))  # type: ignore[arg-type]
    assert share == pytest.approx(BIASED, abs=1e-12)


def test_a_draft_that_is_free_of_the_barrier_may_be_older() -> None:
    guidance = guided()
    planner = a_planner(guidance)
    guidance.take(plan_of(seen_through=9, capacity=2))
    state = SequenceState(
        request("a", [A], SamplingParams(temperature=0.0)),
        eos_ids=(), max_tokens_total=100, arrival=1,
    )  # fmt: skip
    state.commit([A])
    state.computed = 1
    sequence = Sequence(state, rng=np.random.default_rng(1))
    draft = draft_of((A, A))
    sequence.draft = DraftInHand(3, draft, survival(draft.confidence_logits, np.eye(2)[:, [0, 0]]))
    item = Item(sequence, 1, decoding=True, reaches_end=True, draft_cap=2)
    planner.plan([item])
    assert planner.guided_plans == 1


# --- what the numbers do


RULE = history_rule(50)


def busy(verify: str = "top-k", **config: object) -> tuple[Scene, ScriptedDrafter]:
    drafter = ScriptedDrafter(oracle(RULE))
    engine = toy_engine(ToyBackend(RULE, 50), drafter, verify=verify, **config)
    engine.guidance.registered(ME, EPOCH)
    return Scene(engine), drafter


def lengths(of: Scene, name: str) -> list[int]:
    """Verified draft tokens of each round of a request."""
    answer = of.answers[name, 0]
    return [c.speculation.verified for c in answer.commits if c.speculation.rounds]


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_capacity_bounds_a_step(capacity: int) -> None:
    of, _ = busy()
    of.engine.guidance.take(plan_of(requests=1.0, capacity=capacity))
    of.ask(request("a", [1, 2], greedy(12)))
    assert max(lengths(of, "a"), default=0) == capacity


def test_capacity_is_for_as_many_requests_as_the_plan_was_made_for() -> None:
    of, _ = busy()
    of.engine.guidance.take(plan_of(requests=4.0, capacity=8))
    of.ask(request("a", [1, 2], greedy(24)))
    assert max(lengths(of, "a")) == 2


def test_caps_are_by_tenant() -> None:
    of, _ = busy()
    of.engine.guidance.take(plan_of(capacity=None, caps={"small": 1}))
    of.ask(
        request("a", [1, 2], greedy(16), tenant="small"),
        request("b", [3, 4], greedy(16), tenant="large"),
    )
    assert max(lengths(of, "a")) == 1
    assert max(lengths(of, "b")) > 1


def test_weights_decide_whose_tokens_come_first() -> None:
    of, _ = busy()
    of.engine.guidance.take(plan_of(requests=2.0, capacity=4, weights={"light": 0.1, "heavy": 1.0}))
    of.ask(
        request("a", [1, 2], greedy(24), tenant="light"),
        request("b", [3, 4], greedy(24), tenant="heavy"),
    )
    assert np.mean(lengths(of, "b")) > np.mean(lengths(of, "a")) + 1


def test_a_bypassed_tenant_is_asked_for_now_and_then_only() -> None:
    of, drafter = busy()
    of.engine.guidance.take(plan_of(capacity=None, caps={"hard": 0}))
    of.ask(
        request("a", [1, 2], greedy(60), tenant="hard"),
        request("b", [3, 4], greedy(60), tenant="easy"),
    )
    asked = [r.session.split("/")[0] for r in drafter.asked]
    assert asked.count("b") >= 8
    # A probe's own cost is next to nothing beside the toy's steps, so every round may probe; what
    # it may not do is verify.
    assert lengths(of, "a") == [0] * len(lengths(of, "a"))


def test_a_draft_budget_is_spent_and_fills_again() -> None:
    clock = HandClock()
    guidance = guided(clock)
    guidance.take(replace(plan_of(), ttl_s=1e9, draft_budgets={"d": 10.0}))
    assert guidance.affordable("d", 99, 7) == 10
    assert guidance.affordable("d", 99, 7) == 10, "to look costs nothing"
    guidance.spend("d", 7)
    assert guidance.affordable("d", 7, 7) == 3
    guidance.spend("d", 3)
    assert guidance.affordable("d", 7, 7) == 0
    clock.now += 0.5
    assert guidance.affordable("d", 7, 7) == 5
    clock.now += 100.0
    assert guidance.affordable("d", 99, 7) == 10
    assert guidance.affordable("another", 99, 7) == 99
    guidance.spend("another", 99)
    assert guidance.affordable("another", 99, 7) == 99


def test_a_budget_below_a_block_a_second_still_pays_for_one_in_time() -> None:
    clock = HandClock()
    guidance = guided(clock)
    guidance.take(replace(plan_of(), ttl_s=1e9, draft_budgets={"d": 2.0}))
    clock.now = 2.0
    assert guidance.affordable("d", 7, 7) < 7
    clock.now = 60.0
    assert guidance.affordable("d", 14, 7) == 7


def test_a_budget_that_is_less_than_a_block_a_step_is_used_up_all_the_same() -> None:
    """500 tokens a second are 5 a step of 10 ms, and a block has 7: what one step is short of is
    not lost. Who goes without counts as unasked."""
    clock = HandClock()
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=1))  # a token a step, whatever is drafted
    of = Scene(toy_engine(ToyBackend(RULE, 50), drafter, verify="fixed:7", clock=clock))
    of.engine.guidance.registered(ME, EPOCH)
    of.engine.guidance.take(replace(plan_of(), ttl_s=1e9, draft_budgets={"scripted": 500.0}))
    of.submit(*(request(name, [ord(name) % 50], greedy(500)) for name in "abcd"))
    by_second = []
    for _ in range(4):
        before, longest = len(drafter.asked), 0
        for _ in range(100):
            of.step()
            clock.now += 0.01
            longest = max(longest, *(s.rounds_unasked for s in of.engine.running))
        assert longest > 0
        by_second.append(sum(r.gamma for r in drafter.asked[before:]))
    assert all(490 <= tokens <= 500 + 7 for tokens in by_second[1:]), by_second


def test_a_budget_of_nothing_asks_for_nothing() -> None:
    of, drafter = busy()
    of.engine.guidance.take(replace(plan_of(), draft_budgets={"scripted": 0.0}))
    of.ask(request("a", [1, 2], greedy(12)))
    assert not drafter.asked


def test_temperatures_are_applied_as_drafts_arrive() -> None:
    of, _ = busy("threshold:0.8")
    hot = Calibration(3, (CalibrationTable("scripted", SamplingMode.GREEDY, (4.0,)),))
    of.ask(request("a", [1, 2], greedy(12)))
    assert max(lengths(of, "a")) >= 1  # σ(2) = 0.88
    of.engine.guidance.take(replace(plan_of(), calibration=hot))
    of.ask(request("b", [1, 2], greedy(12)))
    assert max(lengths(of, "b")) == 0  # σ(2 / 4) = 0.62


def test_a_calibration_outlives_its_plan_and_yields_to_a_higher_version_only() -> None:
    clock = HandClock()
    guidance = guided(clock)

    def table(version: int, t: float) -> Calibration:
        one = CalibrationTable("d", SamplingMode.COUPLED, (t, 2 * t), (0.5, -t))
        return Calibration(version, (one,))

    guidance.take(replace(plan_of(1), calibration=table(5, 3.0)))
    guidance.take(replace(plan_of(2), calibration=table(4, 9.0)))
    clock.now = 50.0
    found = guidance.scaling("d", SamplingMode.COUPLED, 3)
    assert found.tolist() == [[3.0, 6.0, 6.0], [0.5, -3.0, -3.0]]
    assert guidance.scaling("d", SamplingMode.GREEDY, 2).tolist() == [[1.0] * 2, [0.0] * 2]


def test_temperatures_of_a_checkpoint_hold_until_a_plan_has_better_ones() -> None:
    guidance = guided()
    guidance.ship([CalibrationTable("d", SamplingMode.GREEDY, (2.0,))])
    guidance.ship([CalibrationTable("e", SamplingMode.GREEDY, (5.0,))])
    assert guidance.scaling("d", SamplingMode.GREEDY, 2).tolist() == [[2.0] * 2, [0.0] * 2]
    better = Calibration(1, (CalibrationTable("d", SamplingMode.GREEDY, (3.0,)),))
    guidance.take(replace(plan_of(), calibration=better))
    assert guidance.scaling("d", SamplingMode.GREEDY, 1).tolist() == [[3.0], [0.0]]
    assert guidance.scaling("e", SamplingMode.GREEDY, 1).tolist() == [[5.0], [0.0]]


def test_priorities_weigh_beside_tenants() -> None:
    of, _ = busy()
    of.engine.guidance.take(plan_of(requests=2.0, capacity=4))
    of.ask(
        request("a", [1, 2], greedy(24), priority=-4),
        request("b", [3, 4], greedy(24), priority=4),
    )
    assert np.mean(lengths(of, "b")) > np.mean(lengths(of, "a")) + 1


# --- bad plans


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"draft_budgets": {"d": float("inf")}}, "draft_budgets"),
        ({"shares": {"a": -1.0}}, "shares"),
        ({"_directions": Directions(requests=float("nan"))}, "requests"),
        ({"_directions": Directions(1.0, weights={"a": -0.5})}, "weights"),
        (
            {"calibration": Calibration(1, (CalibrationTable("d", SamplingMode.GREEDY, (0.0,)),))},
            "temperatures[0]",
        ),
        (
            {"calibration": Calibration(1, (CalibrationTable("d", SamplingMode.GREEDY, ()),))},
            "temperatures",
        ),
    ],
)
def test_numbers_that_no_planner_makes_are_named(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        check_plan(replace(plan_of(), **wrong))  # type: ignore[arg-type]
    assert told.value.field == field


def test_a_drafter_that_costs_nothing_is_asked_every_round_whatever_it_says() -> None:
    """Its probes cost less than a hundredth of a step each time, so there is nothing to leave out;
    what is verified stays the planner's to say."""
    drafter = ScriptedDrafter(oracle(RULE, logit=-9.0))
    of = Scene(toy_engine(ToyBackend(RULE, 50), drafter, verify="early-stop"))
    of.ask(request("a", [1, 2], greedy(30)))
    rounds = [c for c in of.answers["a", 0].commits if c.speculation.rounds]
    assert all(c.speculation.drafted for c in rounds[:-1])
    assert not any(c.speculation.verified for c in rounds)
