"""For how many draft tokens an engine asks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

from dspark.core.drafts import DraftRequest
from dspark.verifier.planning import PLAIN_EVERY

from .toy import (
    HandClock,
    Scene,
    ScriptedDrafter,
    StillCost,
    ToyBackend,
    greedy,
    history_rule,
    oracle,
    request,
    still_cost,
    toy_engine,
)

V = 48
RULE = history_rule(V, seed=8, loop=11)
# A second a token: with one request a draft token pays if it stands for sure, with 0.9 s beside it.
STEEP = {1: 1.0, 64: 64.0}
FLAT_AT_FIRST = {1: 10.0, 3: 10.0, 64: 620.0}


class Priced(ScriptedDrafter):
    """A drafter that takes some of a clock's seconds each time."""

    def __init__(self, clock: HandClock, seconds: float) -> None:
        super().__init__(oracle(RULE), gamma=7)
        self._clock, self._seconds = clock, seconds

    def propose(self, requests: Sequence[DraftRequest]) -> list[Any]:
        self._clock.now += self._seconds
        return super().propose(requests)


def asked(seconds: float, verify: str, table: dict[int, float] = FLAT_AT_FIRST) -> list[int]:
    """Draft tokens of each request to the drafter, for a long answer."""
    clock = HandClock()
    drafter = Priced(clock, seconds)
    engine = toy_engine(ToyBackend(RULE, V), drafter, verify=verify, table=table, clock=clock)
    Scene(engine).ask(request("a", (1, 2, 3), greedy(120)))
    return [one.gamma for one in drafter.asked]


def test_no_more_is_asked_for_than_is_verified() -> None:
    """Three tokens cost what one does, more cost more than they are worth: two are verified."""
    lengths = asked(0.5, "early-stop")
    assert lengths[0] == 7, "nothing is known yet"
    assert set(lengths[25:-3]) == {3}, "one more than is verified, so that it can grow"


def test_drafts_that_cost_nothing_are_whole() -> None:
    assert set(asked(0.05, "early-stop")[:-8]) == {7}


class Seen(StillCost):
    def __init__(self) -> None:
        super().__init__(still_cost().profiled)
        self.drafted: list[bool] = []

    def observe(self, P: int, R: int, B: int, context: int, seconds: float) -> None:
        self.drafted.append(B > P + R)


@pytest.mark.parametrize(("verify", "rarely"), [("early-stop", True), ("fixed:2", False)])
def test_now_and_then_a_step_shows_what_plain_decoding_costs(verify: str, rarely: bool) -> None:
    engine = toy_engine(ToyBackend(RULE, V), ScriptedDrafter(oracle(RULE), gamma=2), verify=verify)
    engine.planner.cost = cost = Seen()
    Scene(engine).ask(request("a", (1, 2, 3), greedy(600)))
    in_a_row = [len(list(steps)) for drafted, steps in groupby(cost.drafted) if drafted]
    assert (max(in_a_row) == PLAIN_EVERY) is rarely
    assert sum(cost.drafted) > 0.95 * len(cost.drafted)


@pytest.mark.parametrize(("verify", "tokens"), [("fixed:2", 2), ("threshold:0.9", 7)])
def test_a_policy_that_weighs_nothing_is_taken_at_its_word(verify: str, tokens: int) -> None:
    assert set(asked(0.5, verify)[:-8]) == {tokens}
