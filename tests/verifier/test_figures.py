"""What an engine learns of its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dspark.core.drafts import DraftRequest

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


class Watched(StillCost):
    seconds = 0.0

    def observe(self, P: int, R: int, B: int, context: int, seconds: float) -> None:
        self.seconds += seconds


class Slow(ScriptedDrafter):
    """A drafter that lets some time pass first."""

    def __init__(self, passes: Callable[[], object]) -> None:
        super().__init__(oracle(RULE), gamma=3)
        self._passes = passes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Any]:
        self._passes()
        return super().propose(requests)


def burn() -> None:
    until = time.perf_counter() + 2e-3
    while time.perf_counter() < until:
        pass


def test_a_step_costs_all_that_it_takes_but_drafting() -> None:
    """This model takes next to no time: the rest of a step is what the engine does around it, of
    which preparing the drafter's requests is a quarter."""
    engine = toy_engine(ToyBackend(RULE, V), Slow(burn), verify="fixed:3", clock=time.perf_counter)
    engine.planner.cost = cost = Watched(still_cost().profiled)
    Scene(engine).ask(*(request(str(i), (1, 2, i), greedy(60)) for i in range(8)))
    figures = engine.figures
    assert figures.draft_s > 10 * 2e-3
    rest_s = figures.step_s - figures.draft_s
    assert 0.5 * rest_s < cost.seconds <= rest_s


def test_asking_a_drafter_here_costs_all_that_passes_meanwhile() -> None:
    clock = HandClock()

    def pass_by() -> None:
        clock.now += 0.25

    engine = toy_engine(ToyBackend(RULE, V), Slow(pass_by), verify="fixed:3", clock=clock)
    Scene(engine).ask(request("a", (1, 2, 3), greedy(60)))
    source = engine.drafters["scripted"]
    assert source.cost.seconds(1) == pytest.approx(0.25)
    assert engine.desk.exposed_s["scripted"] == pytest.approx(0.25 * len(source.drafter.asked))
