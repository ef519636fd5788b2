"""`dspark bench sweep`: what it counts, who is compared with whom, and how good an oracle is."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.cli.bench import sweep_report
from dspark.cli.bench.engine_load import Part, Work, closed_loop, heads, requests
from dspark.cli.bench.load import Answered, Slice, Usage
from dspark.cli.bench.pareto import Point, frontier, matched, per_user_at, throughput_at
from dspark.cli.bench.regret import KnownRound, KnownStep, Play, Score, oracle, regret, score
from dspark.cli.bench.replay import Recording, play, record, search
from dspark.cli.bench.stats import paired_ratio
from dspark.cli.bench.sweep import arm_config, parse_policies
from dspark.cli.bench.sweeping import Pace, SweepCell, SweepPlan, duration, expected_s, sweep
from dspark.core.config import EngineConfig
from dspark.core.drafts import Drafter
from dspark.core.errors import InvalidRequest
from dspark.core.requests import Committed
from dspark.deploy.single import TargetConfig
from dspark.models import load_target
from dspark.models.drafters.checkpoint import TargetFacts, save_checkpoint
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.scheduler import StepCost
from dspark.verifier.engine import Engine

from ..verifier.toy import (
    HandClock,
    Rule,
    ScriptedDrafter,
    ToyBackend,
    history_rule,
    target_only,
    toy_engine,
)
from ..verifier.toy import (
    oracle as knowing,
)
from .conftest import DSPARK, Ran

VOCABULARY = 60
FLAT = StepCost.from_table({1: 1.0})
LINEAR = StepCost.from_table({1: 1.0, 512: 512.0})


def known(
    accepted: int, drafted: int = 3, *, request: str = "a", survive: float = 0.9
) -> KnownRound:
    survival = survive ** np.arange(1.0, drafted + 1)
    return KnownRound(request, 10, survival, accepted)


def steps_of(*accepted: Sequence[int], drafted: int = 3) -> list[KnownStep]:
    """Steps of so many requests; the same requests all along."""
    return [
        KnownStep(0, tuple(known(n, drafted, request=f"r{r}") for r, n in enumerate(each)))
        for each in accepted
    ]


# --- the oracle ----------------------------------------------------------------------------------


def test_an_oracle_by_hand() -> None:
    """T is 1, 1.5 and 1.6 s. All of a block of two that stands, nothing of one that falls:
    4 tokens in 2.6 s; who always verifies two has 4 in 3.2 s, who never does 2 in 2 s."""
    cost = StepCost.from_table({1: 1.0, 2: 1.5, 3: 1.6})
    steps = steps_of([2], [0], drafted=2)
    best = oracle(steps, cost, 0.0)
    assert (best.tokens, best.seconds) == (4, pytest.approx(2.6))
    always = score(steps, [Play((2,), 1)] * 2, cost, 0.0)
    assert (always.tokens, always.seconds) == (4, pytest.approx(3.2))
    assert regret(always, best) == pytest.approx(1 - 2.6 / 3.2)
    never = score(steps, [Play((0,), 0)] * 2, cost, 0.0)
    assert regret(never, best) == pytest.approx(1 - 2.6 / 4)


def test_the_best_of_a_whole_is_not_the_best_of_each_step() -> None:
    """Alone, the second step is better with its token (2 in 1.9 s) than without (1 in 1 s). But a
    second is worth more than that: eight tokens come in two in the first step."""
    steps = [*steps_of([7], drafted=7), *steps_of([1], drafted=1)]
    cost = StepCost.from_table({1: 1.0, 2: 1.9, 8: 2.0})
    best = oracle(steps, cost, 0.0)
    assert (best.tokens, best.seconds) == (9, pytest.approx(3.0))


def test_a_draft_that_costs_more_than_it_brings_is_not_asked_for() -> None:
    steps = steps_of([1, 3])
    assert oracle(steps, FLAT, 0.0).tokens == 6
    dear = oracle(steps, FLAT, 1.0)  # 2 in 1 s, 5 in 2 s (the longest run), 6 in 3 s
    assert (dear.tokens, dear.seconds) == (5, pytest.approx(2.0))


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[KnownStep], StepCost, float]:
    rounds = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(
        lambda pair: known(min(pair), max(pair))
    )
    step = st.builds(
        KnownStep, st.sampled_from([0, 5]), st.lists(rounds, min_size=1, max_size=2).map(tuple)
    )
    rises = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), min_size=10, max_size=10))
    table = dict(enumerate(1.0 + np.cumsum(rises), start=1))
    slopes = draw(st.tuples(*[st.sampled_from([0.0, 0.01, 0.3])] * 3))
    cost = StepCost(tuple(table), tuple(table.values()), *slopes)
    return (
        draw(st.lists(step, min_size=1, max_size=3)),
        cost,
        draw(st.sampled_from([0.0, 0.2, 1.0])),
    )


@settings(max_examples=100, deadline=None)
@given(instances())
def test_no_lengths_at_all_beat_the_oracle(
    instance: tuple[list[KnownStep], StepCost, float],
) -> None:
    steps, cost, draft_s = instance
    each = [
        [
            Play(lengths, sum(length > 0 for length in lengths))
            for lengths in itertools.product(*(range(len(k.survival) + 1) for k in step.rounds))
        ]
        for step in steps
    ]
    rates = [score(steps, plays, cost, draft_s).rate for plays in itertools.product(*each)]
    best = oracle(steps, cost, draft_s)
    assert best.rate == pytest.approx(max(rates))
    assert 0 <= regret(Score(best.tokens, 2 * best.seconds), best) < 1


# --- what the planner plays ----------------------------------------------------------------------


def lengths(plays: Sequence[Play]) -> list[tuple[int, ...]]:
    return [each.lengths for each in plays]


def test_policies_play_by_their_rules() -> None:
    steps = steps_of([1, 0], [2, 0], drafted=3)
    assert play(steps, "none", FLAT, 512, 0.0) == [Play((0, 0), 0)] * 2
    assert play(steps, "fixed:2", FLAT, 512, 0.0) == [Play((2, 2), 2)] * 2
    assert lengths(play(steps, "fixed:3", FLAT, 5, 0.0)) == [(2, 1)] * 2, "B is bounded"
    for policy in ("early-stop", "top-k"):
        assert lengths(play(steps, policy, FLAT, 512, 0.0)) == [(3, 3)] * 2
        assert lengths(play(steps, policy, LINEAR, 512, 0.0)) == [(0, 0)] * 2
    assert lengths(play(steps, "threshold:0.8", FLAT, 512, 0.0)) == [(2, 2)] * 2  # .9, .81, .73


def test_a_search_by_survivals_alone() -> None:
    """τ/T is 1/1, 1.9/2.5 and 2.71/2.6 s with 0 to 2 tokens, then 3.44/5: past a dip, to two, by a
    gain of 4 % that the planner leaves alone."""
    cost = StepCost.from_table({1: 1.0, 2: 2.5, 3: 2.6, 4: 5.0})
    steps = steps_of([0], [3])
    assert search(steps, cost, 512) == [Play((2,), 1)] * 2
    assert lengths(play(steps, "early-stop", cost, 512, 0.0))[0] == (0,)
    assert lengths(search(steps_of([3, 0]), FLAT, 5)) == [(2, 1)], "B is bounded"


def test_prefill_beside_it_counts_into_the_step() -> None:
    """Where a step of 100 tokens is flat and one of 2 is not, drafts ride along with a prompt."""
    cost = StepCost.from_table({1: 1.0, 2: 2.0, 90: 90.0, 512: 90.0})
    alone, beside = KnownStep(0, (known(3),)), KnownStep(100, (known(3),))
    assert lengths(play([beside, alone], "early-stop", cost, 512, 0.0)) == [(3,), (0,)]


def test_drafts_that_never_pay_are_asked_for_only_to_probe() -> None:
    steps = steps_of(*[[0]] * 200)
    played = play(steps, "early-stop", LINEAR, 512, draft_s=0.2)
    asked = [each.asked for each in played]
    assert asked[0] == 1, "nothing is known yet"
    assert 2 <= sum(asked) <= 11, "0.2 s each, 1 % of 200 s"
    assert sum(each.asked for each in play(steps, "fixed:1", LINEAR, 512, 0.2)) == 200


# --- what is written down ------------------------------------------------------------------------


def rule() -> Rule:
    return history_rule(VOCABULARY, seed=3)


def drafting_engine(
    verify: str, *, wrong_every: int = 0, table: dict[int, float] | None = None, **config: Any
) -> Engine:
    drafter = ScriptedDrafter(knowing(rule(), wrong_every=wrong_every), gamma=4)
    backend = ToyBackend(rule(), VOCABULARY)
    return toy_engine(backend, drafter, verify=verify, gamma=4, table=table, **config)


@pytest.mark.parametrize("verify", ["fixed:4", "threshold:0.8"])
def test_accepted_is_what_the_text_says_however_much_was_verified(verify: str) -> None:
    """A token drafted for a place that five divides is wrong, and only such a one."""
    engine = drafting_engine(verify, wrong_every=5)
    prompts: list[tuple[int, ...]] = [(1, 2), (3,), (5, 6, 7, 8), (9,) * 5]
    recording = record(engine, requests(prompts, range(10, 14), 20, "x"), users=2)
    rounds = [known for step in recording.steps for known in step.rounds]
    assert len(rounds) > 15
    for one in rounds:
        places = range(one.context + 1, one.context + 1 + len(one.survival))
        stand = list(itertools.takewhile(lambda place: place % 5, places))
        assert one.accepted == len(stand)
    assert {len(one.survival) for one in rounds} >= {4, 1}, "short before the end of an answer"
    assert max(len(step.rounds) for step in recording.steps) == 2
    assert recording.draft_s > 0


def test_prompts_are_recorded_beside_what_is_decoded() -> None:
    engine = drafting_engine("fixed:1", wrong_every=5)
    prompts: list[tuple[int, ...]] = [(1, 2), (3,), (5, 6, 7, 8), (9,) * 5]
    recording = record(engine, requests(prompts, range(10, 14), 20, "x"), users=2)
    assert [(s.prefill, len(s.rounds)) for s in recording.steps if s.prefill] == [(5, 1), (6, 1)]


def test_steps_after_a_user_went_idle_are_not_recorded() -> None:
    engine = drafting_engine("fixed:1", wrong_every=5)
    recording = record(engine, requests([(1, 2), (3, 4), (5, 6)], range(10, 13), 20, "x"), users=2)
    rounds = sum(len(step.rounds) for step in recording.steps)
    assert {len(step.rounds) for step in recording.steps} == {2}
    assert rounds < engine.figures.speculation.rounds


def test_drafts_are_cut_as_the_step_has_room() -> None:
    engine = drafting_engine("fixed:4", max_step_tokens=5, max_sequences=2)
    recording = record(engine, requests([(1,), (2,)], [10, 11], 12, "x"), users=2)
    both = [step for step in recording.steps if len(step.rounds) == 2]
    assert [len(one.survival) for one in both[0].rounds] == [3, 0]


@pytest.mark.parametrize("policy", ["fixed:2", "early-stop", "top-k"])
@pytest.mark.parametrize("table", [None, {1: 100.0, 4: 100.0, 5: 400.0, 512: 9000.0}])
def test_a_policy_plays_as_its_engine_did(policy: str, table: dict[int, float] | None) -> None:
    """The recording of an engine's own run, played by its own policy: the same draft tokens."""
    engine = drafting_engine(policy, table=table)
    recording = record(engine, requests([(1, 2), (3, 4)], [10, 11], 25, "x"), users=2)
    cost = StepCost.from_table(table or {1: 100.0})
    played = play(recording.steps, policy, cost, 512, recording.draft_s)
    done = engine.figures.speculation
    assert done.verified > 0
    assert sum(sum(each.lengths) for each in played) == done.verified
    assert sum(each.asked for each in played) == done.rounds
    scored = score(recording.steps, played, cost, 0.0)
    assert scored.tokens == done.rounds + done.accepted


# --- load on an engine ---------------------------------------------------------------------------


class Ticking(ToyBackend):
    """A step of B tokens takes B seconds on the clock."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__(rule(), VOCABULARY)
        self._clock = clock

    def forward(self, batch: RaggedBatch) -> StepOutput:
        self._clock.now += len(batch.token_ids)
        return super().forward(batch)


def plain_engine(clock: HandClock, *drafters: Drafter, **config: Any) -> Engine:
    return toy_engine(Ticking(clock), *drafters, clock=clock, **config)


def test_a_slice_by_hand() -> None:
    """Two prompts of 3 in a step of 6 s, then two steps of 2 s; and the same again."""
    clock = HandClock()
    asked = requests([(1, 2)] * 4, range(10, 14), 3, "x")
    part = closed_loop(plain_engine(clock), asked, 2, clock=clock)
    assert (part.slice.seconds, part.slice.counted_s) == (20, 20)
    assert part.slice.throughput == 12 / 20
    assert [answer.arrivals for answer in part.slice.answers[:2]] == [((6, 1), (8, 1), (10, 1))] * 2
    assert sweep_report.per_user(part) == 1 / 2
    assert part.work.steps == 6
    assert (part.work.prefill_tokens, part.work.rounds) == (12, 8)
    assert (part.work.mean_verify_length, part.work.accepted_length) == (0.0, 1.0)


def test_nothing_is_counted_once_a_user_is_idle() -> None:
    clock = HandClock()
    asked = requests([(1, 2)] * 3, range(10, 13), 3, "x")
    part = closed_loop(plain_engine(clock), asked, 2, clock=clock)
    assert (part.slice.seconds, part.slice.counted_s) == (15, 10)
    assert part.slice.throughput == 6 / 10
    assert (part.work.steps, part.work.rounds) == (3, 4)
    assert len(part.slice.answers) == 3, "but everybody is answered"


def test_draft_tokens_are_counted() -> None:
    drafter = ScriptedDrafter(knowing(rule()), gamma=4)
    clock = HandClock()
    engine = plain_engine(clock, drafter, verify="fixed:3", gamma=4)
    part = closed_loop(engine, requests([(1, 2)], [10], 9, "x"), 1, clock=clock)
    # 1 token with the prompt, then 1 + 3 twice.
    assert (part.work.rounds, part.work.verified, part.work.accepted) == (2, 6, 6)
    assert part.work.drafted == 6, "no more than are verified"
    assert (part.work.mean_verify_length, part.work.accepted_length) == (3.0, 4.0)
    (answer,) = part.slice.answers
    assert answer.usage == Usage(3, 9, rounds=2, accepted=6)


def test_engines_that_share_a_kv_cache_do_not_read_each_others_texts() -> None:
    """In turns over one backend, as policies are; every text is what the target alone says."""
    backend = ToyBackend(rule(), VOCABULARY)
    made: list[Engine] = [
        toy_engine(backend, ScriptedDrafter(knowing(rule(), wrong_every=3)), verify=verify)
        for verify in ("none", "fixed:2", "early-stop")
    ]
    texts: dict[str, list[int]] = {}

    def listen(events: Sequence[Any], _busy: bool) -> None:
        for (name, _), event in events:
            if isinstance(event, Committed):
                texts.setdefault(name, []).extend(event.ids)

    for turn, engine in enumerate([*made, *made[::-1]]):
        firsts = range(10 + 4 * (turn // 3), 14 + 4 * (turn // 3))
        asked = requests([(7, 8, 9)] * 4, firsts, 20, f"turn {turn}")
        closed_loop(engine, asked, 2, after_step=listen)
        for request in asked:
            assert texts[request.request_id] == target_only(rule(), request.prompt_ids, 20)


def test_an_answer_from_the_prefix_cache_is_noticed() -> None:
    clock = HandClock()
    engine = plain_engine(clock)
    closed_loop(engine, requests([(1,) * 20], [10], 2, "x"), 1, clock=clock)
    with pytest.raises(AssertionError, match="prefix cache"):
        closed_loop(engine, requests([(1,) * 20], [10], 2, "y"), 1, clock=clock)


def test_an_answer_that_has_no_room_is_refused() -> None:
    engine = plain_engine(HandClock(), kv_tokens=32)
    with pytest.raises(InvalidRequest, match="max_tokens: 30 is above the room left"):
        closed_loop(engine, requests([(1,) * 10], [10], 30, "x"), 1)


def test_prompts_begin_with_ordinary_tokens() -> None:
    assert heads(300, [7, 299]) == [6, *range(8, 299)]


# --- turns ---------------------------------------------------------------------------------------


def toy_plan(concurrency: Sequence[int] = (1, 2), rounds: int = 2) -> SweepPlan:
    return SweepPlan([(1, 2), (3, 4)], range(10, 50), concurrency, rounds, 3, per_round=3)


def test_no_two_prompts_of_an_engine_begin_alike() -> None:
    plan = toy_plan((2,), rounds=3)
    asked = [*plan.warming(2), *itertools.chain(*(plan.asked(2, "t", turn) for turn in range(3)))]
    assert len({request.prompt_ids[0] for request in asked}) == len(asked) == 4 + 9
    assert [request.prompt_ids[1:] for request in plan.asked(2, "t", 1)] == [(3, 4), (1, 2), (3, 4)]
    with pytest.raises(
        InvalidRequest, match="rounds: 13 is too many: 43 prompts at 2 at once, and"
    ):
        toy_plan((2,), rounds=13)


def swept(plan: SweepPlan, deadline: float = float("inf")) -> tuple[list[SweepCell], list[str]]:
    clock, cells, log = HandClock(), list[SweepCell](), list[str]()

    def make(name: str) -> Callable[[], Engine]:
        def engine() -> Engine:
            log.append(name)
            return plain_engine(clock)

        return engine

    pace = Pace(plan, 2, LINEAR, deadline, clock=clock)
    try:
        sweep({name: make(name) for name in "ab"}, make("recorder"), plan, pace, cells, log.append)
    except TimeoutError:
        log.append("timeout")
    return cells, log


def test_policies_take_turns_on_engines_made_anew_for_each_load() -> None:
    cells, log = swept(toy_plan())
    made = [word for word in log if " " not in word]
    assert made == ["a", "b", "recorder"] * 2
    for cell in cells:
        assert [list(row) for row in cell.rounds] == [["a", "b"]] * 2
        first, second = [{n: p.slice.answers[0].due for n, p in row.items()} for row in cell.rounds]
        assert first["a"] < first["b"] < second["b"] < second["a"]
        for row in cell.rounds:
            asked = [[a.usage.prompt_tokens for a in part.slice.answers] for part in row.values()]
            assert asked[0] == asked[1]
    said = [word for word in log if "round" in word]
    assert re.fullmatch(r"1 at once, round 1 of 2: a 0\.6, b 0\.6 tokens/s; \d+:\d\d left", said[0])
    assert said[-1].endswith("0:00 left")


def test_a_time_limit_keeps_the_rounds_that_have_ended() -> None:
    whole, _ = swept(toy_plan((1,)))
    ended = max(a.ended for p in whole[0].rounds[-1].values() for a in p.slice.answers)
    cells, log = swept(toy_plan(), deadline=ended - 1)
    assert log[-1] == "timeout"
    assert [len(cell.rounds) for cell in cells] == [1]


def test_time_left_goes_by_what_each_piece_should_take() -> None:
    plan, clock = toy_plan((1,)), HandClock()
    told: list[tuple[int, int]] = []
    pace = Pace(plan, 2, LINEAR, clock=clock, advance=lambda *done: told.append(done))
    # Prompts of 2 s; 4 answers of 3 s to warm up an engine, 3 in a turn, of which there are 5.
    warm, turn = expected_s(LINEAR, 2, 4, 3, 1), expected_s(LINEAR, 2, 3, 3, 1)
    assert (warm, turn) == (20, 15)
    assert pace.left_s == 3 * warm + 5 * turn == 135
    clock.now += 30
    pace.did(1, 3, 3)
    assert told == [(15, 135)]
    assert pace.left_s == pytest.approx(2 * 120), "it goes half as fast as expected"


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 61, 3599.6, 7325)] == ["0:00", "1:01", "1:00:00", "2:02:05"]


# --- figures -------------------------------------------------------------------------------------


def part(tokens_per_s: float, tpot_s: float, work: Work | None = None) -> Part:
    """One answer of 101 tokens, the first at once; counted until it ends."""
    arrivals = ((0.0, 1), (100 * tpot_s, 100))
    answer = Answered(100 * tpot_s - 101 / tokens_per_s, arrivals, Usage(5, 101))
    seconds = 101 / tokens_per_s
    return Part(Slice((answer,), seconds, seconds, 0.0), work or Work(steps=10, rounds=10))


def test_ratios_and_the_best_fixed_policy() -> None:
    speeds = {"none": [10, 12], "fixed:1": [11, 14], "fixed:5": [12, 15], "top-k": [13, 15]}
    cell = SweepCell(
        4, None, [{n: part(s[i], 1 / s[i]) for n, s in speeds.items()} for i in (0, 1)]
    )
    (found,) = sweep_report.results([cell, SweepCell(8)], FLAT, 512)
    assert found["load"] == {"kind": "closed", "concurrency": 4}
    assert found["best_fixed"] == "fixed:5"
    speed = {n: [row[n].slice.throughput for row in cell.rounds] for n in speeds}
    for name, rivals in {
        "none": ["best_fixed", "fixed:1"],
        "fixed:1": ["none", "best_fixed"],
        "fixed:5": ["none", "fixed:1"],
        "top-k": ["none", "best_fixed", "fixed:1"],
    }.items():
        assert list(found["ratios"][name]) == rivals
        for rival, ratio in found["ratios"][name].items():
            expected = paired_ratio(speed[name], speed[rival.replace("best_fixed", "fixed:5")])
            assert ratio["throughput"]["ratio"] == expected.ratio
            assert (ratio["throughput"]["low"], ratio["throughput"]["pairs"]) == (expected.low, 2)
    assert found["regret"] is None


def test_figures_of_a_policy_sum_its_rounds() -> None:
    one = Work(4, 30, 10, 50, 40, 20, forward_s=2.0, draft_s=0.4)
    two = Work(6, 10, 10, 50, 20, 10, forward_s=3.0, draft_s=0.6)
    parts = [part(10, 0.1, one), part(10, 0.1, two)]
    found = sweep_report.figures(parts)
    assert (found["steps"], found["verify_rounds"]) == (10, 20)
    assert (found["drafted"], found["verified"], found["accepted"]) == (100, 60, 30)
    assert (found["mean_verify_length"], found["accepted_length"]) == (3.0, 2.5)
    assert (found["forward_s"], found["draft_s"]) == (0.5, 0.1)
    assert (found["decoding_a_step"], found["prefill_tokens_a_step"]) == (2, 4)
    assert found["step_s"] == pytest.approx(sum(p.slice.counted_s for p in parts) / 10)


def test_regret_is_of_the_recorded_rounds() -> None:
    """Flat cost: who verifies all is the oracle's equal, who verifies none misses three in four."""
    recording = Recording(tuple(steps_of([3, 3], [3, 3])), draft_s=0.0)
    row = {name: part(10, 0.1) for name in ("none", "fixed:1", "early-stop")}
    (found,) = sweep_report.results([SweepCell(2, recording, [row])], FLAT, 512)
    regrets = {name: p["regret"] for name, p in found["regret"]["policies"].items()}
    assert regrets == {"none": 0.75, "fixed:1": 0.5, "early-stop": 0.0}
    assert found["regret"]["oracle"] == {"tokens_per_s": 8.0, "verified": 12}
    assert found["regret"]["by_survival"]["regret"] == 0.0
    assert (found["regret"]["rounds"], found["regret"]["acceptable"]) == (4, 12)


# --- curves --------------------------------------------------------------------------------------


def test_a_curve_by_hand() -> None:
    points = [Point(30, 30), Point(20, 80), Point(18, 70), Point(10, 100)]
    curve = frontier(points)
    assert curve == [Point(10, 100), Point(20, 80), Point(30, 30)], "18 is slower than 20, and less"
    assert throughput_at(curve, 25) == 55
    assert throughput_at(curve, 5) == 100, "whoever wants less may have more"
    assert throughput_at(curve, 31) is None
    assert per_user_at(curve, 90) == 15
    assert per_user_at(curve, 20) == 30
    assert per_user_at(curve, 101) is None


def test_arms_are_compared_where_the_other_stands() -> None:
    baseline = [Point(30, 30), Point(18, 60), Point(10, 100)]
    twice = [Point(60, 60), Point(36, 120), Point(20, 200)]
    found = matched([twice, twice], [baseline, baseline])
    assert [(m.per_user, m.throughput) for m in found] == [(30, 30), (18, 60), (10, 100)]
    # At 30 a user: between 36 and 20 there are 120 + 80 · 6/16 = 150, five times as many.
    assert [m.more_throughput.ratio for m in found if m.more_throughput] == pytest.approx(
        [5, 200 / 60, 2]
    )
    # At 100 in all: between 60 and 36 a user, 60 - 24 · 40/60 = 44.
    assert [m.more_per_user.ratio for m in found if m.more_per_user] == pytest.approx(
        [2, 60 / 18, 4.4]
    )
    once = matched([[Point(20, 50)], [Point(40, 50)]], [baseline, baseline])
    assert once[0].more_throughput is None, "it got there in one round only"
    slow = matched([[Point(20, 50)]] * 2, [baseline, baseline])
    assert [m.more_throughput is None for m in slow] == [True, False, False]
    assert [m.more_per_user is None for m in slow] == [False, True, True]


def test_a_baseline_that_is_beaten_by_itself_stands_on_its_own_curve() -> None:
    """At 20 a user it has a setting with 80 in all, so its worse one is no measure."""
    baseline = [Point(20, 80), Point(18, 40)]
    (_, worse) = matched([baseline], [baseline])
    assert worse.more_throughput is not None
    assert worse.more_throughput.ratio == 1


# --- the command ---------------------------------------------------------------------------------


def test_policies_are_read_strictly() -> None:
    assert parse_policies("none,fixed:5,top-k,threshold:.5", "ngram", 7) == [
        *("none", "fixed:5", "top-k", "threshold:0.5"),
    ]
    for text, drafter, gamma, told in (
        ("best", "ngram", 7, "verify"),
        ("fixed:9", "ngram", 7, "more than 7 draft tokens"),
        ("none,top-k,top-k", "ngram", 7, "twice"),
        ("none,top-k", "none", 7, "needs a drafter"),
        ("none,early-stop", "ngram", 0, "needs a drafter"),
        ("", "ngram", 7, "verify"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            parse_policies(text, drafter, gamma)


def test_each_policy_has_its_best_engine() -> None:
    config = TargetConfig(drafter="ngram", engine=EngineConfig(gamma=7))
    assert arm_config(config, "none").drafter == "none"
    fixed = arm_config(config, "fixed:1")
    assert (fixed.drafter, fixed.engine.verify, fixed.engine.gamma) == ("ngram", "fixed:1", 1)
    free = arm_config(config, "top-k")
    assert (free.engine.verify, free.engine.gamma) == ("top-k", 7)


SMALL = ("--max-tokens", 12, "--rounds", 2, "--requests", 3)


@pytest.fixture
def bench(dspark: Callable[..., Ran], checkpoint: Path) -> Callable[..., Ran]:
    return lambda *arguments: dspark("bench", "sweep", "--model", checkpoint, *arguments)


def test_a_sweep_of_a_real_engine(bench: Callable[..., Ran], tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    policies = ["none", "fixed:1", "fixed:3", "early-stop", "top-k"]
    ran = bench(
        *SMALL, "--policies", ",".join(policies), "--concurrency", "1,2", "--gamma", 4,
        "--json", "--plot", picture,
    )  # fmt: skip
    told = ran.answer
    assert (told["rounds"], told["max_tokens"], told["cut_short"]) == (2, 12, None)
    assert told["step_cost"]["tokens"][0] == 1
    assert "hardware" in told["machine"]
    assert [row["load"]["concurrency"] for row in told["results"]] == [1, 2]
    for row in told["results"]:
        assert list(row["arms"]) == policies
        for name, arm in row["arms"].items():
            assert (arm["requests"], arm["completion_tokens"]) == (6, 72)
            assert arm["drafted"] >= arm["verified"] >= arm["accepted"]
            assert arm["accepted_length"] == pytest.approx(
                1 + arm["accepted"] / arm["verify_rounds"]
            )
            assert 0 < arm["forward_s"] < arm["step_s"]
            assert 0 <= row["regret"]["policies"][name]["regret"] < 1
        arms = row["arms"]
        assert (arms["none"]["drafted"], arms["none"]["accepted_length"]) == (0, 1.0)
        assert arms["fixed:1"]["drafted"] == arms["fixed:1"]["verified"], "no more than it verifies"
        assert arms["fixed:1"]["mean_verify_length"] <= 1
        assert arms["fixed:3"]["accepted"] > 0, "the tiny model repeats itself"
        assert row["ratios"]["top-k"]["none"]["throughput"]["pairs"] == 2
        assert row["regret"]["oracle"]["verified"] <= row["regret"]["acceptable"]
    assert list(told["pareto"]) == ["none", "fixed:3", "early-stop", "top-k"]
    assert [point["concurrency"] for point in told["pareto"]["top-k"]] == [1, 2]
    assert "2 at once, round 2 of 2" in ran.err
    assert "verified a round" in picture.read_text()


@pytest.fixture
def trained(checkpoint: Path, tmp_path: Path) -> Path:
    """A dspark drafter of four tokens; it has learnt nothing."""
    tensors = TargetTensors.of(load_target(checkpoint, dtype=torch.float32, device="cpu"))
    vocab_size, width = tensors.embedding.shape
    config = DrafterConfig(
        kind="dspark",
        gamma=4,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        target_layer_ids=(0,),
        target_layers=2,
        head="vanilla",
        rank=8,
        confidence=True,
    )
    model = new_drafter(config, tensors, generator=torch.Generator().manual_seed(3))
    facts = TargetFacts("tiny", embedding_hash=tensors.embedding_hash, head_hash=tensors.head_hash)
    save_checkpoint(tmp_path / "mine", model, facts)
    return tmp_path / "mine"


def test_a_sweep_of_a_trained_drafter(bench: Callable[..., Ran], trained: Path) -> None:
    asked = ("--drafter", trained, *SMALL, "--concurrency", "2", "--json")
    (row,) = bench(*asked, "--policies", "none,fixed:4,early-stop").answer["results"]
    assert row["arms"]["none"]["draft_s"] == 0
    assert row["arms"]["fixed:4"]["mean_verify_length"] > 2, "four, less at an answer's end"
    assert row["arms"]["fixed:4"]["draft_s"] > 0
    assert row["regret"]["draft_s"] > 0
    assert row["regret"]["policies"]["none"]["asked"] == 0
    ran = bench(*asked, "--policies", "none,fixed:5")
    assert ran.status == 2
    assert "'fixed:5' wants more than 4 draft tokens a round" in ran.err


def test_a_table_says_it_to_people(bench: Callable[..., Ran]) -> None:
    ran = bench(*SMALL, "--policies", "none,fixed:1,top-k", "--concurrency", "2")
    assert ran.status == 0, ran.err
    for words in (
        "closed loop, 2 at once",
        "× best fixed (fixed:1)",
        "a full search by survivals:",
        "against fixed:1",
    ):
        assert words in ran.out
    assert re.search(r"│ top-k +│ +\d+\.\d │ +\d+\.\d │ +\d\.\d\d │ +\d\.\d\d │", ran.out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--concurrency", "0"), "concurrency"),
        (("--concurrency", "1,x"), "concurrency"),
        (("--policies", "fixed:8"), "policies"),
        (("--policies", "fast"), "fast"),
        (("--drafter", "none"), "needs a drafter"),
        (("--max-tokens", "1"), "max-tokens"),
        (("--rounds", "100", "--concurrency", "64"), "rounds"),
        (("--max-tokens", "5000", "--concurrency", "1"), "max_tokens"),
        (("--plot", "picture.docx"), "plot"),
        (("--plot", "nowhere/picture.png"), "plot"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    bench: Callable[..., Ran], arguments: tuple[str, ...], told: str
) -> None:
    ran = bench(*arguments)
    last = ran.err.splitlines()[-1]
    assert (ran.status, ran.out) == (2, "")
    assert last.startswith("dspark: ")
    assert told in last


def test_a_time_limit_that_is_over_at_once(bench: Callable[..., Ran]) -> None:
    ran = bench(
        "--time-limit", 1, "--max-tokens", 500, "--requests", 200, "--rounds", 1,
        "--concurrency", "1",
    )  # fmt: skip
    assert ran.status == 0
    assert "nothing was measured yet" in ran.err
    assert "cut short by the time limit" in ran.err


def test_ctrl_c_prints_what_is_done(cache: Path, checkpoint: Path) -> None:
    """The second load would take minutes."""
    arguments = ("--policies", "none,top-k", "--concurrency", "1,2", "--rounds", "1",
                 "--max-tokens", "200", "--requests", "1", "--json")  # fmt: skip
    with subprocess.Popen(
        [DSPARK, "bench", "sweep", "--model", checkpoint, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DSPARK_CACHE": str(cache)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            seen += line
            if "2 at once: warming up" in line:
                process.send_signal(signal.SIGINT)
                break
        told = json.loads(process.stdout.read())
        seen += process.stderr.read()
    assert process.returncode == 130
    assert "cut short by Ctrl-C" in seen
    assert told["cut_short"] == "Ctrl-C"
    assert [row["load"]["concurrency"] for row in told["results"]] == [1]
