"""Who comes in when more wait than can run: tenants by their shares, counted in tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark.core.plans import Directions, Plan
from dspark.core.requests import Request

from .toy import (
    HandClock,
    Scene,
    ScriptedDrafter,
    ToyBackend,
    greedy,
    history_rule,
    oracle,
    request,
    toy_engine,
)

RULE = history_rule(50)


def saturated(shares: dict[str, float], **config: object) -> Scene:
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=4))
    of = Scene(
        toy_engine(ToyBackend(RULE, 50), drafter, max_sequences=4, max_waiting=4096, **config)
    )
    of.engine.guidance.configured_shares = shares
    return of


def asked(tenant: str, number: int, tokens: int, prompt: int = 4, **rest: object) -> Request:
    ids = [number % 50, *range(prompt - 1)]
    return request(f"{tenant}{number}", ids, greedy(tokens), tenant=tenant, **rest)


def tokens_of(of: Scene) -> dict[str, int]:
    """Prompt and answer tokens of finished requests, by tenant."""
    served: dict[str, int] = {}
    for (name, _), answer in of.answers.items():
        if answer.finished is not None:
            usage = answer.finished.usage
            tenant = name.rstrip("0123456789")
            served[tenant] = served.get(tenant, 0) + usage.prompt_tokens + usage.completion_tokens
    return served


@pytest.mark.parametrize("long", [1, 15])
def test_tokens_go_three_to_one_whatever_the_answers_are_long(long: int) -> None:
    """The tenant with the small share may ask for 15 times as much in one go: it does not help."""
    of = saturated({"big": 3.0, "small": 1.0})
    for number in range(600):
        of.submit(asked("big", number, 4))
        of.submit(asked("small", number, 4 * long))
    while sum(tokens_of(of).values()) < 4000:
        of.step()
    served = tokens_of(of)
    assert served["big"] / served["small"] == pytest.approx(3.0, rel=0.1)


def test_a_plans_shares_replace_the_configured_ones_while_it_holds() -> None:
    clock = HandClock()
    of = saturated({"a": 1.0, "b": 1.0}, clock=clock)
    of.engine.guidance.registered("v", 1)
    of.engine.guidance.take(Plan(1, "v", 1, 0, 60.0, Directions(4.0), shares={"a": 0.2, "b": 0.8}))
    for number in range(900):
        of.submit(asked("a", number, 4), asked("b", number, 4))
    while sum(tokens_of(of).values()) < 3000:
        of.step()
    first = tokens_of(of)
    assert first["b"] / first["a"] == pytest.approx(4.0, rel=0.1)
    clock.now = 61.0
    while sum(tokens_of(of).values()) < 6000:
        of.step()
    second = tokens_of(of)
    assert (second["b"] - first["b"]) / (second["a"] - first["a"]) == pytest.approx(1.0, rel=0.1)


def test_who_is_alone_gets_everything_and_owes_nothing_for_it() -> None:
    of = saturated({"a": 1.0, "b": 1.0})
    for number in range(50):
        of.submit(asked("a", number, 8))
    of.drain()
    for number in range(50, 250):
        of.submit(asked("a", number, 8), asked("b", number, 8))
    before = tokens_of(of)["a"]
    while sum(tokens_of(of).values()) < before + 1500:
        of.step()
    served = tokens_of(of)
    assert (served["a"] - before) / served["b"] == pytest.approx(1.0, rel=0.1)


def test_priority_is_inside_a_tenant() -> None:
    """Nobody gets past another tenant's share by calling everything urgent."""
    of = saturated({"loud": 1.0, "quiet": 1.0})
    for number in range(300):
        of.submit(asked("loud", number, 8, priority=100), asked("quiet", number, 8))
    while sum(tokens_of(of).values()) < 1500:
        of.step()
    served = tokens_of(of)
    assert served["loud"] / served["quiet"] == pytest.approx(1.0, rel=0.1)


def test_higher_priority_first_then_earlier_arrival() -> None:
    of = saturated({}, prefill_chunk=64)
    for number, priority in enumerate((0, 0, 2, 1, 2)):
        of.submit(asked("t", number, 3, priority=priority))
    order: list[str] = []
    while not of.engine.idle:
        of.step()
        order += [s.state.request.request_id for s in of.engine.running if
                  s.state.request.request_id not in order]  # fmt: skip
    assert order == ["t2", "t4", "t3", "t0", "t1"]


def test_one_that_is_preempted_or_paused_is_charged_once() -> None:
    """A pool too small for all, pauses at random: what was served is still shared evenly."""
    rng = np.random.default_rng(3)
    of = saturated({"a": 1.0, "b": 1.0}, kv_tokens=160)
    for number in range(300):
        of.submit(asked("a", number, 30, prompt=9), asked("b", number, 30, prompt=9))
    paused: set[str] = set()
    while sum(tokens_of(of).values()) < 6000:
        running = [s.state.request.request_id for s in of.engine.running]
        for name in rng.choice(running, 1).tolist() if running and rng.random() < 0.2 else []:
            paused ^= {name}
            of.engine.pause(name, 0, name in paused)
        if len(paused) > 2:
            for name in paused:
                of.engine.pause(name, 0, False)
            paused.clear()
        of.step()
    assert of.engine.preemptions > 10
    served = tokens_of(of)
    assert served["a"] / served["b"] == pytest.approx(1.0, rel=0.1)
    of.engine.check_integrity()


def test_a_held_back_prompt_keeps_its_place() -> None:
    """Copies of a running prompt wait for its blocks; who comes behind them goes past, and they are
    next."""
    of = saturated({}, prefill_chunk=16)
    long = [*range(40)]
    of.submit(*(replace(request(f"copy{i}", long, greedy(4)), tenant="t") for i in range(3)))
    of.submit(replace(request("other", [49, 48], greedy(4)), tenant="t"))
    of.drain()
    assert all(answer.finished is not None for answer in of.answers.values())
    cached = [of.answers[f"copy{i}", 0].finished.usage.cached_tokens for i in range(3)]  # type: ignore[union-attr]
    assert cached[0] == 0
    assert min(cached[1:]) >= 32
