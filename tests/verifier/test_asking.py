"""For how many draft tokens an engine asks, and what it learns of its own pace."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

import pytest

from dspark.verifier.planning import PLAIN_EVERY

from .toy import (
    HandClock,
    Scene,
    ScriptedDrafter,
    SlowDrafter,
    ToyBackend,
    WatchedCost,
    greedy,
    history_rule,
    oracle,
    request,
    still_cost,
    toy_engine,
)

V = 48
RULE = history_rule(V, seed=8, loop=11)
# Three tokens cost what one does, more cost more than they are worth.
FLAT_AT_FIRST = {1: 10.0, 3: 10.0, 64: 620.0}


def slow(clock: HandClock, seconds: float, gamma: int) -> SlowDrafter:
    def pass_by() -> None:
        clock.now += seconds

    return SlowDrafter(oracle(RULE), pass_by, gamma=gamma)


# --- how long a draft ----------------------------------------------------------------------------


def asked(seconds: float, verify: str) -> list[int]:
    """Draft tokens of each request to a drafter that takes so long, for a long answer."""
    clock = HandClock()
    drafter = slow(clock, seconds, gamma=7)
    backend = ToyBackend(RULE, V)
    engine = toy_engine(backend, drafter, verify=verify, table=FLAT_AT_FIRST, clock=clock)
    Scene(engine).ask(request("a", (1, 2, 3), greedy(120)))
    return [one.gamma for one in drafter.asked]


def test_no_more_is_asked_for_than_is_verified() -> None:
    lengths = asked(0.5, "early-stop")
    assert lengths[0] == 7, "nothing is known yet"
    assert set(lengths[25:-3]) == {3}, "two are verified; one more, so that it can grow"


def test_drafts_that_cost_nothing_are_whole() -> None:
    assert set(asked(0.05, "early-stop")[:-8]) == {7}


@pytest.mark.parametrize(("verify", "tokens"), [("fixed:2", 2), ("threshold:0.9", 7)])
def test_a_policy_that_weighs_nothing_is_taken_at_its_word(verify: str, tokens: int) -> None:
    assert set(asked(0.5, verify)[:-8]) == {tokens}


# --- what a step costs ---------------------------------------------------------------------------


def watched(drafter: Any, **more: Any) -> Any:
    engine = toy_engine(ToyBackend(RULE, V), drafter, **more)
    engine.planner.cost = WatchedCost(still_cost().profiled)
    return engine


@pytest.mark.parametrize(("verify", "rarely"), [("early-stop", True), ("fixed:2", False)])
def test_now_and_then_a_step_shows_what_plain_decoding_costs(verify: str, rarely: bool) -> None:
    engine = watched(ScriptedDrafter(oracle(RULE), gamma=2), verify=verify)
    Scene(engine).ask(request("a", (1, 2, 3), greedy(600)))
    drafted = [B > P + R for P, R, B, _ in engine.planner.cost.steps]
    in_a_row = [len(list(steps)) for any_drafts, steps in groupby(drafted) if any_drafts]
    assert (max(in_a_row) == PLAIN_EVERY) is rarely
    assert sum(drafted) > 0.95 * len(drafted)


def burn() -> None:
    until = time.perf_counter() + 2e-3
    while time.perf_counter() < until:
        pass


def test_a_step_costs_all_that_it_takes_but_drafting() -> None:
    """This model takes next to no time: the rest of a step is what the engine does around it, of
    which preparing the drafter's requests is a quarter."""
    drafter = SlowDrafter(oracle(RULE), burn, gamma=3)
    engine = watched(drafter, verify="fixed:3", clock=time.perf_counter)
    Scene(engine).ask(*(request(str(i), (1, 2, i), greedy(60)) for i in range(8)))
    figures = engine.figures
    assert figures.draft_s > 10 * 2e-3
    rest_s = figures.step_s - figures.draft_s
    assert 0.5 * rest_s < sum(seconds for *_, seconds in engine.planner.cost.steps) <= rest_s


def test_asking_a_drafter_here_costs_all_that_passes_meanwhile() -> None:
    clock = HandClock()
    drafter = slow(clock, 0.25, gamma=3)
    engine = toy_engine(ToyBackend(RULE, V), drafter, verify="fixed:3", clock=clock)
    Scene(engine).ask(request("a", (1, 2, 3), greedy(60)))
    assert engine.drafters["scripted"].cost.seconds(1) == pytest.approx(0.25)
    assert engine.desk.exposed_s["scripted"] == pytest.approx(0.25 * len(drafter.asked))


# --- prompts -------------------------------------------------------------------------------------


def test_while_a_batch_fills_a_token_is_worth_what_it_will_be_when_it_is_full() -> None:
    """Two drafts beside a prompt take 4 s; a token takes 10 s alone, and 1.25 s among eight."""
    backend = ToyBackend(RULE, V)
    engine = toy_engine(
        backend,
        ScriptedDrafter(oracle(RULE), gamma=2),
        table={1: 10.0, 8: 10.0, 64: 122.0},
        max_sequences=8,
        prefill_chunk=8,
    )
    scene = Scene(engine)
    scene.submit(request("first", (1, 2, 3), greedy(90)))
    scene.step(10)
    answer = scene.answers["first", 0]
    assert all(commit.speculation.verified == 2 for commit in answer.commits[1:])
    scene.submit(*(request(f"{i}", [i + 5] * 33, greedy(4)) for i in range(7)))
    beside = [commit for step in range(8) for _, commit in scene.step()]
    assert sum(s.state.uncomputed > 1 for s in engine.running) > 4, "prompts are still computed"
    assert len(beside) >= 8
    assert not any(commit.speculation.verified for commit in beside)


# --- short answers -------------------------------------------------------------------------------


def test_short_answers_are_drafted_for_only_while_that_pays() -> None:
    """Waves of newcomers, of whom nobody stays long enough to be probed by its own count."""
    clock, logit = HandClock(), -4.0

    def script(history: tuple[int, ...], request: Any) -> Any:
        return oracle(RULE, logit=logit)(history, request)

    drafter = SlowDrafter(script, lambda: setattr(clock, "now", clock.now + 8.0), gamma=3)
    table = {1: 10.0, 64: 73.0}
    engine = toy_engine(
        ToyBackend(RULE, V), drafter, table=table, clock=clock, max_sequences=8, max_waiting=64
    )
    scene = Scene(engine)

    def waves(first: int, count: int) -> list[int]:
        """Requests asked for in each."""
        made = []
        for wave in range(first, first + count):
            before = len(drafter.asked)
            scene.ask(*(request(f"{wave}-{i}", (1, wave % V, i), greedy(8)) for i in range(8)))
            made.append(len(drafter.asked) - before)
        return made

    poor = waves(0, 20)
    assert poor[0] > 0, "nobody knows yet"
    rest = poor[5:]
    assert sum(made > 0 for made in rest) <= 5, "a wave is not asked for because it is new"
    assert sum(rest) > 0, "but now and then to see again"
    logit = 4.0
    good = waves(20, 40)
    assert min(good[-5:]) >= 8, "and when it pays it goes on"
