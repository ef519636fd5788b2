"""What the planner remembers of the cluster, and what it does not take from a report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.errors import InvalidRequest
from dspark.core.reports import DrafterUse, Report, TenantReport
from dspark.scheduler.joint.outlook import (
    DRAFT_MEMORY_S,
    FORGOTTEN_AFTER,
    MAX_CELLS,
    Cluster,
    Outlook,
    VerifierView,
    observed,
)

from .toy_cluster import CHEAP, bins, report, tenant


def seen(*reports: Report, outlook: Outlook | None = None, **more: Any) -> Outlook:
    """A one-verifier cluster's reports, one after another."""
    outlook = outlook or Outlook()
    for each in reports:
        outlook = observed(outlook, Cluster({"v": VerifierView(CHEAP, 7, each)}, **more))
    return outlook


def survivals(outlook: Outlook, name: str = "a", verifier: str = "v") -> float:
    return float(outlook.survivals[outlook.rows[verifier][name]].sum())


def drafts(n: int, **more: Any) -> TenantReport:
    return TenantReport("a", 2, survivals=bins({0.9: n}) if n else (), **more)


def test_an_interval_without_drafts_does_not_make_it_forget() -> None:
    outlook = seen(report("v", [drafts(100)], 1))
    idle = [report("v", [drafts(0)], 2, interval_s=1.0) for _ in range(50)]
    assert survivals(seen(*idle, outlook=outlook)) == 100
    zeros = report("v", [replace(drafts(0), survivals=(0,) * 64)], 3)
    assert survivals(seen(zeros, outlook=outlook)) == 100


def test_older_drafts_fade_beside_newer_ones() -> None:
    outlook = seen(report("v", [drafts(100)], 1), report("v", [drafts(10)], 2, interval_s=0.5))
    assert survivals(outlook) == pytest.approx(100 * math.exp(-0.5 / DRAFT_MEMORY_S) + 10)


def test_a_clock_that_jumps_fades_no_more_than_a_second() -> None:
    outlook = seen(report("v", [drafts(100)], 1), report("v", [drafts(10)], 2, interval_s=3000.0))
    assert survivals(outlook) == pytest.approx(100 * math.exp(-1.0 / DRAFT_MEMORY_S) + 10)


def test_a_repeated_late_or_fenced_report_brings_no_drafts() -> None:
    first = report("v", [drafts(100)], 5, epoch=2)
    outlook = seen(first)
    assert survivals(seen(first, outlook=outlook)) == 100
    assert survivals(seen(report("v", [drafts(7)], 4, epoch=2), outlook=outlook)) == 100
    fenced = seen(report("v", [drafts(7)], 9, epoch=1), outlook=outlook)
    assert survivals(fenced) == 100
    assert (fenced.epoch, fenced.seen_through) == ((2,), (5,))
    late = seen(report("v", [tenant("a", 99)], 4, epoch=2, R=50.0), outlook=outlook)
    assert late.requests[0] == outlook.requests[0]
    assert late.active.tolist() == outlook.active.tolist()


def test_a_new_epoch_counts_drafts_from_the_start() -> None:
    outlook = seen(report("v", [drafts(100)], 5, epoch=1), report("v", [drafts(9)], 1, epoch=2))
    assert (outlook.epoch, outlook.seen_through) == ((2,), (1,))
    assert survivals(outlook) == pytest.approx(100 * math.exp(-1.0 / DRAFT_MEMORY_S) + 9)


def test_an_interval_without_a_step_says_nothing_of_steps() -> None:
    outlook = seen(report("v", [tenant("a", 8)], 1, prefill_tokens=4.0, context=80.0))
    idle = seen(report("v", [], 2, R=0.0, steps=0), outlook=outlook)
    assert (idle.requests[0], idle.prefill[0], idle.context[0]) == (8.0, 4.0, 80.0)
    assert idle.active.sum() == 0


def test_means_of_noisy_intervals_settle_on_their_mean() -> None:
    noise = np.random.default_rng(0).integers(1, 20, 400).tolist()
    outlook, values = Outlook(), []
    for i, R in enumerate(noise):
        outlook = seen(report("v", [tenant("a")], i, R=float(R), interval_s=0.05), outlook=outlook)
        values.append(outlook.requests[0])
    assert np.mean(values[50:]) == pytest.approx(np.mean(noise[50:]), abs=0.2)
    assert np.std(values[50:]) < 0.5 * np.std(noise)


def test_a_tenant_that_is_not_named_runs_and_waits_for_nothing_but_is_remembered() -> None:
    outlook = seen(
        report("v", [drafts(100, queued=3)], 1), report("v", [TenantReport("b", 1, 2)], 2)
    )
    row = outlook.rows["v"]
    assert outlook.active[[row["a"], row["b"]]].tolist() == [0, 1]
    assert outlook.queued[[row["a"], row["b"]]].tolist() == [0, 2]
    assert survivals(outlook) == 100
    silent = [report("v", [TenantReport("b", 1)], 3) for _ in range(FORGOTTEN_AFTER + 1)]
    assert set(seen(*silent, outlook=outlook).rows["v"]) == {"b"}


def test_names_do_not_pile_up() -> None:
    outlook = Outlook()
    for i in range(5):
        names = [TenantReport(f"{i}-{n}", 1) for n in range(200)]
        outlook = seen(report("v", names, i), outlook=outlook)
    assert len(outlook.rows["v"]) <= MAX_CELLS
    assert len(outlook.tenants) == len(outlook.rows["v"])


def test_verifiers_come_and_go_with_what_is_known_of_them() -> None:
    views = {
        name: VerifierView(CHEAP, 7, report(name, [drafts(n)]))
        for name, n in (("v", 10), ("w", 20))
    }
    both = observed(Outlook(), Cluster(views))
    none = {name: replace(view, report=None) for name, view in views.items()}
    turned = observed(both, Cluster({"x": VerifierView(CHEAP, 7), **dict(reversed(none.items()))}))
    assert turned.verifiers == ("x", "w", "v")
    assert [survivals(turned, verifier=v) for v in "vw"] == [10, 20]
    assert turned.requests.tolist() == [0.0, 2.0, 2.0]
    assert turned.epoch[0] == -1
    gone = observed(turned, Cluster({"v": none["v"]}))
    back = observed(gone, Cluster(none))
    assert back.epoch == (1, -1)


def test_the_one_before_is_left_as_it_was() -> None:
    before = seen(report("v", [drafts(100)], 1))
    copies = [before.survivals.copy(), before.active.copy(), before.requests.copy()]
    seen(report("v", [drafts(1), tenant("b", 9)], 2), outlook=before)
    assert before.survivals.tolist() == copies[0].tolist()
    assert before.active.tolist() == copies[1].tolist()
    assert before.requests.tolist() == copies[2].tolist()


def uses(**drafted: int) -> tuple[DrafterUse, ...]:
    return tuple(DrafterUse(name, n, 0.0) for name, n in drafted.items())


def test_a_verifiers_drafters_are_those_it_had_drafts_of() -> None:
    pool = {"d": 100.0, "e": 100.0}
    first = seen(report("v", [], 1, drafters=uses(d=300, e=100, own=50)), drafters=pool)
    assert set(first.links["v"]) == {"d", "e"}
    assert first.links["v"]["d"] == pytest.approx(3 * first.links["v"]["e"])
    starved = seen(report("v", [], 2, drafters=uses(d=0)), outlook=first, drafters=pool)
    assert starved.links["v"] == first.links["v"]
    gone = seen(report("v", [], 3, drafters=uses(e=5)), outlook=first, drafters={"e": 1.0})
    assert set(gone.links["v"]) == {"e"}


def test_a_budget_does_not_hide_what_would_be_asked_for() -> None:
    """Of d a fifth was granted, and what came is a fifth."""
    pool = {"d": 100.0, "e": 100.0}
    free = report("v", [], 1, drafters=uses(d=300, e=300))
    outlook = replace(seen(*[free] * 20, drafters=pool), granted={"v": {"d": 0.2}})
    bound = report("v", [], 2, drafters=uses(d=60, e=300))
    for _ in range(20):
        outlook = replace(seen(bound, outlook=outlook, drafters=pool), granted=outlook.granted)
    assert outlook.links["v"]["d"] == pytest.approx(outlook.links["v"]["e"], rel=1e-6)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("drafters['d']", {"drafters": {"d": math.nan}}),
        ("drafters['d']", {"drafters": {"d": -1.0}}),
        ("shares['a']", {"shares": {"a": 0.0}}),
        ("default_share", {"default_share": math.inf}),
        ("verifiers['v'].gamma", {"verifiers": {"v": VerifierView(CHEAP, 0)}}),
        (
            "verifiers['v'].drafters['d']",
            {"verifiers": {"v": VerifierView(CHEAP, 1, None, {"d": math.nan})}},
        ),
    ],
)
def test_a_cluster_of_impossible_numbers_names_the_field(
    field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as error:
        Cluster(**{"verifiers": {}, **fields})
    assert error.value.field == field
