"""Who may come in: what is refused at once, with which error, and what never is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import DeadlineExceeded, Overloaded
from dspark.core.leases import LeaseRequest
from dspark.core.replicas import Replica, VerifierCard
from dspark.core.reports import Report, TenantReport
from dspark.core.requests import Limits
from dspark.scheduler import StepCost
from dspark.scheduler.admission import (
    OPTIMISM,
    RESERVE,
    check_deadline,
    check_room,
    estimate,
)
from dspark.scheduler.fleet import VerifierState

CARD = VerifierCard("m", "t", "h", "b", Limits(1000, 8192, 65_536), 16, 4, 100)
# 0.1 s a step, and 1 ms for every token.
COST = StepCost((1, 1001), (0.1, 1.1))
VERIFIER = VerifierState(Replica("v"), CARD, step_cost=COST)
CHUNK = 256


def asking(
    prompt: int = 256, answer: int | None = 100, deadline: float | None = None
) -> LeaseRequest:
    return LeaseRequest("r", 0, "g", 1, prompt, max_tokens=answer, deadline_s=deadline)


def reporting(R: float, tau: float = 1.0, queue: int = 0) -> Report:
    """10 steps of R requests that committed tau tokens each."""
    tenants = (TenantReport("t", tokens=round(10 * R * tau)),)
    return Report("v", 1, 0, 1.0, steps=10, requests=R, queue=queue, tenants=tenants)


def test_an_idle_verifier_prefills_and_decodes_at_once() -> None:
    found = estimate(VERIFIER, asking(600, 100), CHUNK)
    assert found is not None
    assert found.wait_s == 0
    assert found.prefill_s == pytest.approx(3 * COST.seconds(256, 0, 256, 0))
    assert found.decode_s == pytest.approx(100 * COST.seconds(0, 1, 1, 0))
    assert found.total_s == found.prefill_s + found.decode_s


def test_a_prompt_that_may_be_cached_is_taken_for_one_chunk() -> None:
    """It is known for late only if it is late with all of it cached."""
    long, named = asking(8000, 1, 1.0), (b"block",)
    with pytest.raises(DeadlineExceeded):
        check_deadline(VERIFIER, long, CHUNK)
    check_deadline(VERIFIER, replace(long, prefix_hashes=named), CHUNK)
    found = estimate(VERIFIER, replace(long, prefix_hashes=named), CHUNK)
    assert found is not None
    assert found.prefill_s == pytest.approx(COST.seconds(256, 0, 256, 0))


def test_drafts_that_stand_make_it_faster_and_company_slower() -> None:
    seconds = [
        estimate(replace(VERIFIER, claimed_runs=R, report=report), asking(), CHUNK)
        for R, report in ((1, reporting(1, tau=3.0)), (0, None), (3, reporting(3)))
    ]
    decode = [found.decode_s for found in seconds if found]
    assert decode[0] < decode[1] < decode[2]
    assert decode[0] == pytest.approx(100 / 3 * COST.seconds(0, 2, 2, 0))


def test_those_that_wait_are_waited_for() -> None:
    """4 run and 2 wait, 1,000 tokens claimed each; so does the new one, which makes 3."""
    busy = replace(VERIFIER, claimed_runs=6, claimed_tokens=6000, report=reporting(4, queue=2))
    found = estimate(busy, asking(), CHUNK)
    assert found is not None
    assert found.wait_s == pytest.approx(3 * 1000 * COST.seconds(0, 4, 4, 0) / 4)


def test_a_bound_that_is_not_told_counts_as_one_token() -> None:
    found = estimate(VERIFIER, asking(answer=None), CHUNK)
    assert found is not None
    assert found.decode_s == pytest.approx(COST.seconds(0, 1, 1, 0))


def test_without_a_step_cost_nothing_is_known_and_nothing_refused() -> None:
    blind = replace(VERIFIER, step_cost=None)
    assert estimate(blind, asking(), CHUNK) is None
    check_deadline(blind, asking(deadline=0.001), CHUNK)


def test_late_on_an_idle_verifier_too_is_the_callers_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"idle verifier.*deadline is in 1\.0 s"):
        check_deadline(VERIFIER, asking(deadline=1.0), CHUNK)
    with pytest.raises(DeadlineExceeded, match="passed"):
        check_deadline(VERIFIER, asking(deadline=0.0), CHUNK)


def test_late_because_of_others_is_overload_and_says_when_to_come_again() -> None:
    busy = replace(VERIFIER, claimed_runs=30, claimed_tokens=30_000, report=reporting(4, queue=26))
    check_deadline(VERIFIER, asking(deadline=20.0), CHUNK)
    with pytest.raises(Overloaded, match="in the queue") as refused:
        check_deadline(busy, asking(deadline=20.0), CHUNK)
    found = estimate(busy, asking(), CHUNK)
    assert found is not None
    assert refused.value.retry_after_s == pytest.approx(OPTIMISM * found.total_s - 20.0)


@given(
    st.integers(0, 40), st.integers(1, 2000), st.integers(1, 500), st.floats(1.0, 5.0),
    st.floats(0.001, 100.0),
)  # fmt: skip
def test_refused_is_only_what_is_late_at_twice_the_speed(
    runs: int, prompt: int, answer: int, tau: float, deadline: float
) -> None:
    verifier = replace(
        VERIFIER, claimed_runs=runs, claimed_tokens=200 * runs, report=reporting(min(runs, 4), tau)
    )
    request = asking(prompt, answer, deadline)
    found = estimate(verifier, request, CHUNK)
    assert found is not None
    try:
        check_deadline(verifier, request, CHUNK)
    except (Overloaded, DeadlineExceeded):
        assert found.total_s > deadline / OPTIMISM
    else:
        assert found.total_s <= deadline / OPTIMISM * (1 + 1e-9)
    check_deadline(verifier, replace(request, deadline_s=None), CHUNK)


def test_a_tenant_alone_fills_all_but_the_reserve() -> None:
    held: dict[str, int] = {}
    while True:
        try:
            check_room("a", 100, held, 10_000, {})
        except Overloaded:
            break
        held["a"] = held.get("a", 0) + 100
    assert held["a"] == (1 - RESERVE) * 10_000


def test_one_that_comes_later_finds_room_and_the_first_does_not_take_it_back() -> None:
    held = {"a": 9000}
    check_room("b", 500, held, 10_000, {})
    held["b"] = 500
    with pytest.raises(Overloaded, match="share"):
        check_room("a", 100, held, 10_000, {})
    held["a"] -= 1000  # some of a's are over
    check_room("b", 500, held, 10_000, {})
    held["a"] -= 500
    check_room("a", 100, held, 10_000, {})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.2, 1.0, 3.0])
def test_when_all_want_the_room_it_is_divided_by_share(seed: int, share: float) -> None:
    """Two tenants ask all the time, leases end in any order: at the end each holds its part."""
    rng = random.Random(seed)
    shares = {"a": share, "b": 1.0}
    leases: list[str] = ["a"] * 90
    for _ in range(4000):
        for tenant in rng.sample("ab", 2):
            held = {name: 10 * leases.count(name) for name in "ab"}
            try:
                check_room(tenant, 10, held, 1000, shares)
            except Overloaded:
                continue
            if len(leases) < 100:
                leases.append(tenant)
        if rng.random() < 0.7:
            leases.pop(rng.randrange(len(leases)))
    part = share / (1 + share)
    assert leases.count("a") / len(leases) == pytest.approx(part, abs=RESERVE + 0.05)


def test_a_request_larger_than_its_tenants_share_is_served_when_it_holds_nothing() -> None:
    check_room("a", 9_900, {}, 10_000, {})
    check_room("a", 9_900, {"b": 50}, 10_000, {"a": 1.0, "b": 9.0})
