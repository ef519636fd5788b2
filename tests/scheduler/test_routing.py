"""Which verifier and which drafter: what a request adds, where there is room, prefixes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dspark.core.drafts import DrafterCard
from dspark.core.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, Unavailable
from dspark.core.leases import LeaseRequest
from dspark.core.replicas import DrafterLoad, Replica, VerifierCard
from dspark.core.reports import DrafterUse, Report, TenantReport
from dspark.core.requests import Limits, Speculation
from dspark.scheduler import StepCost
from dspark.scheduler.fleet import DrafterState, Fleet, Pace, VerifierState
from dspark.scheduler.routing import (
    AFFINITY_LOAD,
    MAX_CANDIDATES,
    NEAR,
    USUAL_ANSWER,
    Candidate,
    claimed_tokens,
    in_time,
    route,
)

CARD = VerifierCard("m", "target", "hash", "b", Limits(1000, 4096, 65_536), 16, 32, 100)
FLAT = StepCost((1, 1024), (0.1, 0.11))
STEEP = StepCost((1, 1025), (0.1, 51.3))  # half as long again for each token


def verifiers(n: int, **fields: object) -> list[VerifierState]:
    state = VerifierState(Replica("v0", "h:1", 1), CARD, step_cost=FLAT)
    state = replace(state, **fields)  # type: ignore[arg-type]
    return [replace(state, replica=Replica(f"v{i}", f"h:{i}", 1)) for i in range(n)]


def asking(prompt: int = 100, **fields: object) -> LeaseRequest:
    request = LeaseRequest("r", 0, "g", 1, prompt, max_tokens=100)
    return replace(request, **fields)  # type: ignore[arg-type]


def reporting(R: float, tau: float = 1.0, steps: int = 10, **fields: object) -> Report:
    tenants = (TenantReport("t", tokens=round(steps * R * tau)),)
    report = Report("v", 1, 0, 1.0, steps=steps, requests=R, tenants=tenants)
    return replace(report, **fields)  # type: ignore[arg-type]


def names(candidates: Sequence[Candidate]) -> list[str]:
    return [candidate.verifier.replica_id for candidate in candidates]


def routed(
    members: Sequence[VerifierState], request: LeaseRequest | None = None, seed: int = 0
) -> list[str]:
    return names(route(Fleet(members), request or asking(), random.Random(seed)))


# --- what a request adds -------------------------------------------------------------------------


def test_pace_is_what_the_report_says_of_a_request_in_a_step() -> None:
    tenants = (TenantReport("t", tokens=60), TenantReport("u", tokens=20))
    report = reporting(4.0, context=400.0, prefill_tokens=7.0, tenants=tenants)
    # In 40 rounds: all that came, or what stood and one more.
    for drafted, drafts in ((30, 0.75), (280, 2.0)):
        told = replace(report, drafters=(DrafterUse("d", drafted, 0.0),))
        assert Pace.of(told) == Pace(tau=2.0, drafts=drafts, context=100.0, prefill=7.0)
    assert Pace.of(report).drafts == 0
    assert Pace.of(None) == Pace.of(reporting(4.0, steps=0)) == Pace.of(reporting(0.0)) == Pace()


def test_who_was_idle_is_taken_for_what_the_others_are() -> None:
    """Else a verifier whose drafts are known to pay would draw all requests, and one interval's
    luck would."""
    busy, idle = verifiers(2)
    busy = replace(busy, claimed_runs=4, report=reporting(4.0, tau=3.0, steps=3))
    fleet = Fleet([busy, idle])
    assert fleet.gain[1] == pytest.approx(fleet.gain[0], rel=0.05)
    assert fleet.rate[1] > fleet.rate[0]

    def gains(steps: int, *taus: float) -> list[float]:
        each = [replace(busy, report=reporting(4.0, tau, steps)) for tau in taus]
        return Fleet(each).gain.tolist()

    lucky = gains(3, 2.6, 3.4)
    assert lucky[0] == pytest.approx(lucky[1], rel=0.05)
    sure = gains(500, 1.0, 3.0)
    assert sure[1] > 2 * sure[0]  # what many rounds say is believed


def test_gain_is_the_difference_of_theta() -> None:
    cost = StepCost((1, 2, 3, 4, 100), (0.1, 0.1, 0.4, 0.4, 3.0), 0.01, 1e-4)
    report = reporting(2.0, tau=1.5, context=200.0)
    fleet = Fleet(verifiers(1, step_cost=cost, report=report, claimed_runs=2))
    theta = [0.0, *(1.5 * R / cost.seconds(0, R, R, 100 * R) for R in (1, 2, 3))]
    assert fleet.gain[0] == pytest.approx(theta[3] - theta[2])
    assert fleet.rate[0] == pytest.approx(theta[3] / 3)
    fleet.claim("v0", 0, -2)
    assert fleet.gain[0] == pytest.approx(theta[1])


def test_a_request_goes_where_it_adds_most() -> None:
    """v0 is idle but slow; v1 is fast and has a stair to fill; v2 is at the stair's edge."""
    stairs = StepCost((1, 4, 5, 8, 9), (0.1, 0.1, 0.2, 0.2, 0.3))
    slow = replace(verifiers(3)[0], step_cost=StepCost((1, 2), (0.5, 0.5)))
    inside, edge = (replace(v, step_cost=stairs) for v in verifiers(3)[1:])
    members = [slow, replace(inside, claimed_runs=3), replace(edge, claimed_runs=4)]
    assert routed(members) == ["v1", "v0", "v2"]


def test_runs_that_a_report_shows_count_where_leases_are_lost() -> None:
    members = verifiers(2, step_cost=STEEP)
    members[0] = replace(members[0], report=reporting(5.0, queue=2))
    assert members[0].runs == 7
    assert routed(members)[0] == "v1"


def test_a_full_verifier_comes_last_the_shorter_queue_first() -> None:
    a, b, c = verifiers(3)
    members = [
        replace(a, claimed_runs=50),
        replace(b, claimed_runs=32),
        replace(c, claimed_runs=31),
    ]
    assert routed(members) == ["v2", "v1", "v0"]


def test_one_that_was_not_profiled_is_taken_for_an_ordinary_one() -> None:
    a, b, c = verifiers(3, step_cost=STEEP)
    members = [replace(a, claimed_runs=8), replace(b, step_cost=None), c]
    first = Counter(routed(members, seed=seed)[0] for seed in range(50))
    assert "v0" not in first
    assert routed(verifiers(3, step_cost=None))  # nobody was


def test_a_floor_that_would_be_missed_comes_after_one_that_holds() -> None:
    """v0 gives everybody 5 tokens a second, however many; v1 has one request, and two get 6.7 each,
    3.3 more than one alone."""
    a, b = verifiers(2, step_cost=STEEP)
    members = [replace(a, step_cost=StepCost((1,), (0.2,))), replace(b, claimed_runs=1)]
    assert routed(members) == ["v0", "v1"]
    assert routed(members, asking(floor_tps=4.0)) == ["v0", "v1"]
    assert routed(members, asking(floor_tps=6.0)) == ["v1", "v0"]
    # Neither holds: the nearest first.
    assert routed(members, asking(floor_tps=8.0)) == ["v1", "v0"]


# --- room ----------------------------------------------------------------------------------------


def test_a_claim_is_whole_blocks_the_prompt_once() -> None:
    fleet = Fleet(verifiers(1))
    for prompt, answer, choices, claim in (
        (100, 100, 1, 208),  # 200 in blocks of 16
        (96, 16, 1, 112),
        (96, 16, 3, 96 + 3 * 16),
        (100, 16, 3, 96 + 3 * 32),  # each has its own copy of the block that is not whole
        (1, 4000, 64, 65_536),  # more than there is: all of it
    ):
        request = asking(prompt, max_tokens=answer, choices=choices)
        assert claimed_tokens(fleet, request).tolist() == [claim]
    assert claimed_tokens(fleet, asking(96, max_tokens=None)).tolist() == [96 + USUAL_ANSWER]
    assert claimed_tokens(fleet, asking(4090, max_tokens=None)).tolist() == [4096]


@given(
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 12)), min_size=1, max_size=12),
    st.integers(1, 900), st.integers(1, 600), st.integers(1, 3), st.integers(0, 2**32),
)  # fmt: skip
@settings(deadline=None)
def test_all_candidates_have_room_and_none_is_left_out(
    loads: list[tuple[int, int]], prompt: int, answer: int, choices: int, seed: int
) -> None:
    card = replace(CARD, limits=Limits(1000, 2048, 4096), max_sequences=4, max_waiting=6)
    members = [
        replace(v, card=card, claimed_tokens=tokens, claimed_runs=runs)
        for v, (tokens, runs) in zip(verifiers(len(loads)), loads, strict=True)
    ]
    request = asking(prompt, max_tokens=answer, choices=choices, prefix_hashes=(b"p",))
    claim = int(claimed_tokens(Fleet(members[:1]), request)[0])
    roomy = {
        v.replica.replica_id
        for v in members
        if v.claimed_tokens + claim <= 4096 and v.claimed_runs + choices <= 10
    }
    if not roomy:
        with pytest.raises(Overloaded, match="full"):
            routed(members, request, seed)
        return
    found = route(Fleet(members), request, random.Random(seed))
    assert all(candidate.tokens == claim for candidate in found)
    assert set(names(found)) <= roomy
    assert len(set(names(found))) == len(found) == min(len(roomy), MAX_CANDIDATES)


def test_draining_excluded_and_other_models_are_not_named() -> None:
    a, b, c, d = verifiers(4)
    members = [
        replace(a, draining=True), b, replace(c, card=replace(CARD, model="other")), d,
    ]  # fmt: skip
    assert routed(members, asking(model="m", exclude=("v1", "gone"))) == ["v3"]
    with pytest.raises(Unavailable, match="draining or has just failed"):
        routed(members, asking(model="m", exclude=("v1", "v3")))
    with pytest.raises(NotFound, match="'no'"):
        routed(members, asking(model="no"))
    with pytest.raises(InvalidRequest, match="m, other"):
        routed(members)
    with pytest.raises(Unavailable, match="registered"):
        routed([])


def test_too_long_for_every_verifier_says_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="4096"):
        routed(verifiers(2), asking(4000, max_tokens=97))
    small = replace(verifiers(1)[0], card=replace(CARD, limits=Limits(1000, 128, 65_536)))
    assert routed([small, *verifiers(2)[1:]], asking(200)) == ["v1"]


def test_claims_of_this_process_count_before_the_store_is_read_again() -> None:
    fleet = Fleet(verifiers(2, step_cost=STEEP))
    rng, first = random.Random(1), Counter[str]()
    for _ in range(20):
        best = route(fleet, asking(), rng)[0]
        first[best.verifier.replica_id] += 1
        fleet.claim(best.verifier.replica_id, best.tokens, 1)
    assert max(first.values()) - min(first.values()) <= 2
    fleet.claim("gone", 1, 1)
    fleet.claim("v0", -(10**9), -(10**9))
    assert fleet.runs[0] == fleet.claimed_tokens[0] == 0


def test_only_verifiers_that_make_the_deadline_are_kept() -> None:
    """v0 is slow, v1 has a queue, v2 makes it; the claims of this process count."""
    slow, queued, quick = verifiers(3)
    members = [
        replace(slow, step_cost=StepCost((1,), (3.0,))),
        replace(queued, claimed_runs=132 - 1, claimed_tokens=60_000),
        quick,
    ]
    fleet, request = Fleet(members), asking(deadline_s=10.0)
    candidates = route(fleet, request, random.Random(0))
    assert set(names(candidates)) == {"v0", "v1", "v2"}
    assert names(in_time(fleet, candidates, request, 256)) == ["v2"]
    assert in_time(fleet, candidates, asking(), 256) == candidates
    fleet.claim("v2", 60_000, 131)
    with pytest.raises(Overloaded, match="in the queue"):
        in_time(fleet, candidates, request, 256)
    with pytest.raises(DeadlineExceeded):
        in_time(fleet, candidates, asking(deadline_s=1.0), 256)


# --- luck ----------------------------------------------------------------------------------------


def test_equal_verifiers_are_taken_equally_often() -> None:
    fleet, rng = Fleet(verifiers(20)), random.Random(3)
    first = Counter(names(route(fleet, asking(), rng))[0] for _ in range(4000))
    assert len(first) == 20
    assert chisquare(list(first.values())).pvalue > 1e-4


def test_of_two_equals_the_less_loaded() -> None:
    """The most loaded of n never wins a draw, the least loaded every one it is in: 2/n of them."""
    members = [replace(v, claimed_tokens=1000 * i) for i, v in enumerate(verifiers(10))]
    fleet, rng = Fleet(members), random.Random(4)
    first = Counter(names(route(fleet, asking(), rng))[0] for _ in range(3000))
    assert "v9" not in first
    expected = [3000 * 2 * (9 - i) / 90 for i in range(9)]
    assert chisquare([first[f"v{i}"] for i in range(9)], expected).pvalue > 1e-4


def test_two_choices_keep_many_blind_routers_level() -> None:
    """50 routers look at the store once, then each sends 20 requests: where all would pile on the
    best, two choices load no verifier beyond twice the mean."""
    members = verifiers(50)
    load: Counter[str] = Counter()
    for seed in range(50):
        fleet, rng = Fleet(members), random.Random(seed)
        for _ in range(20):
            best = route(fleet, asking(), rng)[0]
            fleet.claim(best.verifier.replica_id, best.tokens, 1)
            load[best.verifier.replica_id] += 1
    assert max(load.values()) <= 2 * 1000 / 50


def test_a_better_one_is_not_left_to_luck() -> None:
    a, b = verifiers(2)
    worse = replace(b, step_cost=StepCost((1, 1024), (0.1 * (1 + 2 * NEAR), 0.12)))
    assert {routed([a, worse], seed=seed)[0] for seed in range(30)} == {"v0"}


# --- prefixes ------------------------------------------------------------------------------------


def with_prefix(i: int) -> LeaseRequest:
    return asking(prefix_hashes=(b"system", b"prefix-%d" % i))


def test_a_prefix_has_one_home_for_every_router() -> None:
    members = verifiers(20)
    for i in range(30):
        homes = {
            routed(order, with_prefix(i), seed)[0]
            for seed, order in enumerate([members, members[::-1], members])
        }
        assert len(homes) == 1


def test_homes_are_the_same_in_every_process() -> None:
    """Pinned: another hash would move every prefix while schedulers of two versions run."""
    assert [routed(verifiers(20), with_prefix(i))[0] for i in range(4)] == [
        "v4",
        "v12",
        "v12",
        "v18",
    ]


def test_homes_are_spread_evenly() -> None:
    fleet, rng = Fleet(verifiers(20)), random.Random(5)
    homes = Counter(names(route(fleet, with_prefix(i), rng))[0] for i in range(4000))
    assert len(homes) == 20
    assert chisquare(list(homes.values())).pvalue > 1e-4


def test_one_that_joins_or_leaves_moves_only_its_own() -> None:
    before, after = (Fleet(verifiers(n)) for n in (20, 21))
    rng = random.Random(6)
    moved = []
    for i in range(2000):
        old, new = (names(route(fleet, with_prefix(i), rng))[0] for fleet in (before, after))
        if old != new:
            moved.append(new)
    assert set(moved) == {"v20"}
    assert len(moved) == pytest.approx(2000 / 21, rel=0.4)


@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_affinity_loads_no_verifier_beyond_its_bound(n: int) -> None:
    """400 requests of one prefix, none of which ends: it would all go to one."""
    card = replace(CARD, limits=Limits(1000, 4096, 10**7), max_sequences=1000)
    fleet, rng = Fleet(verifiers(n, card=card)), random.Random(7)
    for count in range(400):
        best = route(fleet, with_prefix(0), rng)[0]
        fleet.claim(best.verifier.replica_id, best.tokens, 1)
        assert fleet.runs.max() <= AFFINITY_LOAD * (count / n + 1) + 1
    # And it stays together as far as that allows.
    assert (fleet.runs > 0).sum() <= n / AFFINITY_LOAD + 1


def test_at_low_load_a_prefix_stays_at_home() -> None:
    fleet, rng = Fleet(verifiers(10)), random.Random(8)
    homes = set()
    for _ in range(30):
        best = route(fleet, with_prefix(1), rng)[0]
        homes.add(best.verifier.replica_id)
        fleet.claim(best.verifier.replica_id, best.tokens, 1)
        fleet.claim(best.verifier.replica_id, -best.tokens, -1)
    assert len(homes) == 1


def test_a_home_where_the_request_adds_little_is_left() -> None:
    members = verifiers(10)
    home = routed(members, with_prefix(2))[0]
    i = int(home[1:])
    members[i] = replace(members[i], step_cost=StepCost((1, 1024), (0.3, 0.33)))
    assert routed(members, with_prefix(2))[0] != home
    members[i] = replace(members[i], step_cost=StepCost((1, 1024), (0.15, 0.165)))
    assert routed(members, with_prefix(2))[0] == home


def test_a_home_that_is_full_draining_or_excluded_moves_to_the_next() -> None:
    members = verifiers(10)
    home = routed(members, with_prefix(3))[0]
    i = int(home[1:])
    nexts = set()
    for fields in ({"draining": True}, {"claimed_tokens": 65_500}):
        changed = list(members)
        changed[i] = replace(members[i], **fields)  # type: ignore[arg-type]
        nexts.add(routed(changed, with_prefix(3))[0])
    nexts.add(routed(members, replace(with_prefix(3), exclude=(home,)))[0])
    assert len(nexts) == 1
    assert home not in nexts


def test_affinity_holds_when_everything_is_full_of_runs() -> None:
    members = verifiers(10, claimed_runs=40)
    assert len({routed(members, with_prefix(4), seed)[0] for seed in range(20)}) == 1


def test_without_whole_blocks_there_is_no_home() -> None:
    members = verifiers(10)
    assert len({routed(members, asking(8), seed)[0] for seed in range(20)}) > 3


# --- drafters ------------------------------------------------------------------------------------


def drafter(
    name: str, kind: str = "dspark", load: DrafterLoad | None = None, **card: object
) -> DrafterState:
    own = DrafterCard(name, kind, 7, 1000, "target", "hash")
    return DrafterState(
        Replica(name, f"d:{name}", 1),
        replace(own, **card),  # type: ignore[arg-type]
        load or DrafterLoad(capacity_tokens_per_s=1000.0),
    )


def drafter_for(
    drafters: Sequence[DrafterState], wish: str | None = None, seed: int = 0
) -> str | None:
    request = asking(speculation=Speculation(drafter=wish))
    (candidate,) = route(Fleet(verifiers(1), drafters), request, random.Random(seed))
    return candidate.drafter.replica_id if candidate.drafter else None


@pytest.mark.parametrize(
    "card", [{"target_id": "other"}, {"vocab_size": 999}, {"tokenizer_hash": "other"}]
)
def test_a_drafter_made_for_something_else_is_not_named(card: dict[str, object]) -> None:
    wrong = drafter("wrong", **card)
    assert drafter_for([wrong]) is None
    assert {drafter_for([wrong, drafter("right")], seed=seed) for seed in range(10)} == {"right"}


def test_a_drafter_that_reads_tokens_only_serves_every_target() -> None:
    assert (
        drafter_for([drafter("n", "ngram", target_id="", vocab_size=0, tokenizer_hash="")]) == "n"
    )


def test_a_wish_is_a_drafters_id_or_kind() -> None:
    pool = [drafter("a"), drafter("b"), drafter("n", "ngram")]
    assert drafter_for(pool, "b") == "b"
    assert drafter_for(pool, "ngram") == "n"
    assert {drafter_for(pool, "dspark", seed) for seed in range(20)} == {"a", "b"}
    assert {drafter_for(pool, None, seed) for seed in range(30)} == {"a", "b"}
    assert drafter_for(pool[2:]) == "n"
    assert drafter_for(pool, "none") is None
    assert drafter_for(pool, "eagle3") is None
    assert drafter_for([]) is None


def test_the_newest_version_is_named_while_it_is_not_crowded() -> None:
    """Of v1 one replica has started again since: that does not make it newer than v2."""

    def replica(name: str, version: str, epoch: int, used: float = 0.0) -> DrafterState:
        own = drafter(name, drafter_id=version, load=DrafterLoad(0, 0, used, 1000.0))
        return replace(own, replica=replace(own.replica, epoch=epoch))

    old = [replica("a", "v1", 3), replica("b", "v1", 9)]
    new = [replica("c", "v2", 5), replica("d", "v2", 6)]
    assert {drafter_for([*old, *new], seed=seed) for seed in range(20)} == {"c", "d"}
    crowded = [replica("c", "v2", 5, used=950.0), replica("d", "v2", 6, used=950.0)]
    assert {drafter_for([*old, *crowded], seed=seed) for seed in range(20)} == {"a", "b"}
    assert {drafter_for(crowded, seed=seed) for seed in range(20)} == {"c", "d"}
    assert {drafter_for([*old, *new], "v1", seed) for seed in range(20)} == {"a", "b"}


def test_a_draining_drafter_is_not_named() -> None:
    assert drafter_for([replace(drafter("a"), draining=True)]) is None


def test_waits_grow_with_queue_and_use_and_fall_with_speed() -> None:
    def wait(queue: int, used: float, capacity: float) -> float:
        return drafter("d", load=DrafterLoad(0, queue, used, capacity)).wait

    for faster, slower in pairwise(
        [wait(0, 0, 2000), wait(0, 0, 1000), wait(0, 500, 1000), wait(0, 900, 1000),
         wait(2, 900, 1000), wait(2, 10**9, 1000)]
    ):  # fmt: skip
        assert 0 < faster < slower < float("inf")
    assert 0 < wait(0, 0, 0) < float("inf")


def test_of_two_drafters_the_one_with_the_shorter_wait() -> None:
    pool = [drafter(f"d{i}", load=DrafterLoad(0, i, 0, 1000)) for i in range(5)]
    got = Counter(drafter_for(pool, seed=seed) for seed in range(1000))
    assert got.keys() == {"d0", "d1", "d2", "d3"}
    assert chisquare([got[f"d{i}"] for i in range(4)], [400, 300, 200, 100]).pvalue > 1e-4
