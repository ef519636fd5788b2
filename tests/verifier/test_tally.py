"""What a verifier reports: steps, tokens, and drafts whose verdict is in, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dspark.core.reports import SURVIVAL_BINS, Report
from dspark.core.sampling import SamplingMode
from dspark.scheduler.intake import MAX_TENANTS, check_report
from dspark.verifier.tally import (
    IDLE_INTERVALS,
    MAX_DRAFTS,
    TELLINGS,
    VERDICTS_S,
    Crowd,
    FinishedDraft,
    Reporter,
    Tally,
    report_of,
    survival_histogram,
    verdict_counts,
    verdicts_of,
)

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
LOGIT = 2.0  # (2 + 4.5) / 0.6: bin 10


def scene(wrong_every: int = 4, **config: object) -> Scene:
    drafter = ScriptedDrafter(oracle(RULE, wrong_every=wrong_every, logit=LOGIT))
    clock = HandClock()
    of = Scene(toy_engine(ToyBackend(RULE, 50), drafter, verify="fixed:7", clock=clock, **config))
    of.engine.take_tally()  # begins it
    return of


def report(of: Scene) -> Report:
    tally, crowd = of.engine.take_tally()
    return report_of(tally, crowd, "v1", 3, verdicts_of(tally.drafts))


def test_a_report_adds_up_to_what_was_committed_and_verified() -> None:
    of = scene()
    answers = of.ask(
        request("a", [1, 2, 3], greedy(30), tenant="x"), request("b", [4], greedy(20), tenant="y")
    )
    told = report(of)
    assert (told.verifier, told.epoch) == ("v1", 3)
    assert told.steps == of.engine.figures.steps
    assert {t.tenant: t.tokens for t in told.tenants} == {"x": 30, "y": 20}
    for tenant, answer in zip(told.tenants, answers, strict=True):
        drafted = sum(c.speculation.drafted for c in answer.commits)
        accepted = sum(c.speculation.accepted for c in answer.commits)
        (counts,) = tenant.verdicts
        assert (counts.drafter_id, counts.mode) == ("scripted", SamplingMode.GREEDY)
        assert sum(tenant.survivals) == drafted
        assert sum(map(sum, counts.accepted)) == accepted
        # Of each round the tokens that stood and the first that fell.
        fell = sum(c.speculation.accepted < c.speculation.verified for c in answer.commits)
        assert sum(map(sum, counts.reached)) <= accepted + fell
    use = {use.drafter: use.drafted for use in told.drafters}
    assert use == {"scripted": sum(sum(t.survivals) for t in told.tenants)}
    assert of.engine.take_tally()[0].steps == 0  # said once


def test_positions_behind_a_rejection_or_a_trim_are_in_no_count() -> None:
    logits = np.full(4, LOGIT, np.float32)
    survival = np.array([0.9, 0.8, 0.7, 0.6])

    def draft(judged: int, accepted: int) -> FinishedDraft:
        return FinishedDraft(1, "", "d", SamplingMode.COUPLED, logits, survival, judged, accepted)

    (counts,) = verdict_counts([draft(2, 1), draft(3, 3), draft(0, 0)])
    assert [sum(row) for row in counts.reached] == [2, 2, 1]
    assert [sum(row) for row in counts.accepted] == [2, 1, 1]
    assert all(row[10] == sum(row) for row in counts.reached)
    assert verdict_counts([draft(0, 0)]) == ()


def test_an_answer_that_ends_inside_a_block_says_nothing_of_what_is_behind() -> None:
    of = scene(wrong_every=0)
    (answer,) = of.ask(request("a", [1, 2], greedy(4)))
    told = report(of)
    (tenant,) = told.tenants
    assert sum(map(sum, tenant.verdicts[0].reached)) <= sum(
        c.speculation.verified for c in answer.commits
    )
    assert tenant.tokens == 4


def test_drafts_are_told_when_their_verdict_is_in_and_not_before() -> None:
    of = scene()
    of.submit(request("a", [1, 2], greedy(40)))
    of.step()  # prefill: the first draft is in hand now
    first = report(of)
    (sequence,) = of.engine.running
    assert sequence.draft is not None
    assert first.seen_through == 0
    assert not any(t.survivals for t in first.tenants)
    held = sequence.draft.number
    of.step()
    second = report(of)
    assert second.seen_through == held
    assert sequence.draft is not None
    assert sequence.draft.number > second.seen_through


def test_who_is_here_is_counted_by_tenant() -> None:
    of = scene(max_sequences=1)
    of.submit(
        request("a", [1], greedy(9), tenant="x", floor_tps=5.0),
        request("b", [2], greedy(9), tenant="x", floor_tps=5.0),
        request("c", [3], greedy(9), tenant="y"),
    )
    of.step()
    told = report(of)
    assert told.queue == 2
    assert {(t.tenant, t.active, t.queued, t.floor_tps) for t in told.tenants} == {
        ("x", 1, 1, 5.0),
        ("y", 0, 1, 0.0),
    }
    assert told.free_blocks == of.engine.cache.pool.available
    of.drain()


def test_between_two_steps_the_slots_are_not_empty() -> None:
    """Those that finished have left and the next are not in: a planner that took that for an empty
    verifier would see no contest for it."""
    of = scene(wrong_every=0, max_sequences=2)
    of.submit(*(request(f"{i}", [i], greedy(8), tenant="xy"[i % 2]) for i in range(6)))
    of.step()
    counts = []
    while not of.engine.idle:
        of.step()
        told = report(of)
        counts.append((sum(t.active for t in told.tenants), told.queue))
    assert counts[0] == (2, 4)
    assert {active for active, _ in counts} == {2}
    of.step()
    assert not report(of).tenants


def test_nothing_is_kept_until_somebody_asks_and_never_without_bound() -> None:
    of = scene()
    of.ask(request("a", [1, 2], greedy(60)))
    tally, _ = of.engine.take_tally()
    assert tally.drafts.maxlen == MAX_DRAFTS
    quiet = Scene(toy_engine(ToyBackend(RULE, 50), ScriptedDrafter(oracle(RULE))))
    quiet.ask(request("a", [1, 2], greedy(60)))
    tally, _ = quiet.engine.take_tally()
    assert tally.steps == 0


@pytest.mark.parametrize(("a", "at"), [(0.0, 0), (1 / 64, 1), (0.5, 32), (0.9999, 63), (1.0, 63)])
def test_survivals_fall_into_equal_bins(a: float, at: int) -> None:
    histogram = survival_histogram([np.array([a])])
    assert len(histogram) == SURVIVAL_BINS
    assert histogram[at] == 1
    assert sum(histogram) == 1


# --- reports of many intervals


def seen(now: float, seen_through: int, *drafts: FinishedDraft) -> tuple[Tally, Crowd]:
    """What a busy engine says of an interval that ends now."""
    tally = Tally(now - 0.05, steps=1, requests=1)
    tally.drafts.extend(drafts)
    return tally, Crowd(now, seen_through, 10, Counter(x=1))


def finished(number: int) -> FinishedDraft:
    z, a = np.full(2, LOGIT, np.float32), np.array([0.9, 0.8])
    return FinishedDraft(number, "x", "d", SamplingMode.GREEDY, z, a, judged=2, accepted=1)


def verdicts_in(told: Report | None) -> int:
    assert told is not None
    return sum(sum(map(sum, v.reached)) for t in told.tenants for v in t.verdicts)


def test_verdicts_go_up_once_a_second_and_survivals_each_time() -> None:
    reporter = Reporter("v1", 3)
    told = []
    for number in range(1, 81):
        told.append(reporter.report(*seen(0.05 * number, number, finished(number))))
        reporter.heard(number)
    assert all(r is not None and sum(r.tenants[0].survivals) == 2 for r in told)
    counts = [verdicts_in(r) for r in told]
    at = [i for i, count in enumerate(counts) if count]
    assert len(at) == 4
    assert min(np.diff(at)) >= 0.95 * VERDICTS_S / 0.05
    assert sum(counts[: at[-1] + 1]) == 2 * (at[-1] + 1)  # each draft's once


def test_verdicts_are_told_under_one_name_until_a_plan_has_seen_them() -> None:
    reporter = Reporter("v1", 3)
    told = [reporter.report(*seen(1.0 + 0.05 * i, 5 + i, finished(5 + i))) for i in range(3)]
    reporter.heard(4)  # of a report before them
    told.append(reporter.report(*seen(1.2, 9, finished(9))))
    assert [r and (verdicts_in(r), r.verdicts_through, r.seen_through) for r in told] == [
        (2, 5, 5),
        (2, 5, 6),
        (2, 5, 7),
        (2, 5, 9),
    ]
    reporter.heard(6)
    last = reporter.report(*seen(1.25, 10, finished(10)))
    assert last is not None
    assert (verdicts_in(last), last.verdicts_through) == (0, 0)
    assert verdicts_in(reporter.report(*seen(2.1, 11, finished(11)))) == 10


def test_without_a_plan_verdicts_are_told_a_few_times_only() -> None:
    reporter = Reporter("v1", 3)
    told = [reporter.report(*seen(1.0 + 0.05 * i, 5 + i, finished(5 + i))) for i in range(12)]
    assert [verdicts_in(r) for r in told] == [2] * TELLINGS + [0] * (12 - TELLINGS)


def test_reports_with_verdicts_differ_in_what_they_have_seen() -> None:
    """That is how the planner tells a new one from one that it reads again."""
    reporter = Reporter("v1", 3)
    assert verdicts_in(reporter.report(*seen(1.0, 7, finished(7)))) == 2
    reporter.heard(7)
    assert verdicts_in(reporter.report(*seen(3.0, 7, finished(6)))) == 0
    assert verdicts_in(reporter.report(*seen(3.1, 8, finished(8)))) == 4


def test_of_more_tenants_than_a_report_may_name_the_busiest_are_named() -> None:
    """300 of them: some run, some wait, some have just ended."""
    names = [f"t{i:03}" for i in range(300)]
    tally = Tally(0.0, steps=2, requests=200, context=5000, tokens=dict.fromkeys(names, 3))
    tally.drafts.extend(replace(finished(i), tenant=name) for i, name in enumerate(names))
    active = Counter(dict.fromkeys(names[200:], 1))
    queued = Counter(dict.fromkeys(names[:150], 1) | {names[10]: 9})
    crowd = Crowd(1.0, 299, 10, active, queued)
    told = check_report(report_of(tally, crowd, "v1", 3, verdicts_of(tally.drafts)))
    named = {tenant.tenant for tenant in told.tenants}
    assert len(named) == MAX_TENANTS
    assert named >= {*names[200:], *names[:150]}
    assert (told.requests, told.context, told.queue) == (100.0, 2500.0, 158)
    assert sum(use.drafted for use in told.drafters) == 600


def test_an_idle_verifier_says_now_and_then_that_it_is_there() -> None:
    reporter = Reporter("v1", 3)
    idle = [
        reporter.report(Tally(0.05 * i), Crowd(0.05 * i, 0, 10)) is not None
        for i in range(4 * IDLE_INTERVALS)
    ]
    assert 4 <= sum(idle) <= 9
    assert idle[0]  # the newest state goes out before it falls silent


def test_the_last_verdicts_go_up_though_the_verifier_is_idle_by_then() -> None:
    reporter = Reporter("v1", 3)
    reporter.report(*seen(1.0, 1, finished(1)))
    reporter.heard(1)
    reporter.report(*seen(1.1, 2, finished(2)))
    told = [reporter.report(Tally(t), Crowd(t, 2, 10)) for t in np.arange(1.2, 3.0, 0.05)]
    assert [v for r in told if r is not None and (v := verdicts_in(r))] == [2] * TELLINGS
