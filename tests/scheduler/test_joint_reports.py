"""What a report may not say: one error that names the field (design.md §4, L5)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dspark.core.errors import InvalidRequest
from dspark.core.replicas import DrafterLoad
from dspark.core.reports import (
    CONFIDENCE_BINS,
    SURVIVAL_BINS,
    DrafterUse,
    Report,
    TenantReport,
    VerdictCounts,
)
from dspark.core.sampling import SamplingMode
from dspark.scheduler.intake import check_load, check_report

ROW = (3,) * CONFIDENCE_BINS
VERDICTS = VerdictCounts("ngram", SamplingMode.GREEDY, (ROW, ROW), (ROW, (0,) * CONFIDENCE_BINS))
TENANT = TenantReport("a", 3, 1, 7, 1.5, (1,) * SURVIVAL_BINS, (VERDICTS,))
GOOD = Report(
    "v", 1, 9, 0.05, 2, 12.5, 3.0, 900.0, -0.001, 4, 1,
    (TENANT, TenantReport("", 1)), (DrafterUse("d", 30, 0.0),),
)  # fmt: skip

FIELDS: dict[str, list[Any]] = {
    "verifier": ["", "v" * 257, 7],
    "epoch": [-1, 2**63, 1.0, True],
    "seen_through": [-1, 2**63, None],
    "interval_s": [0.0, -1.0, math.nan, math.inf, 3601.0, "1"],
    "steps": [-1, 2**32, 1.5],
    "requests": [-1.0, math.nan, math.inf, 2.0**32],
    "prefill_tokens": [-1.0, math.nan, 2.0**32],
    "context": [-1.0, math.inf, True],
    "step_residual_s": [math.nan, -math.inf, 1e9],
    "free_blocks": [-1],
    "queue": [-1, 2**32],
}
TENANT_FIELDS: dict[str, list[Any]] = {
    "tenant": ["t" * 257, None],
    "active": [-1, 2**32, math.nan],
    "queued": [-1],
    "tokens": [-1, 2**40],
    "floor_tps": [-1.0, math.nan, math.inf],
}


def test_a_good_report_is_itself() -> None:
    assert check_report(GOOD) is GOOD
    bare = Report("v", 0, 0, 0.05)
    assert check_report(bare) is bare


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in FIELDS.items() for v in vs])
def test_a_bad_number_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_report(replace(GOOD, **{field: value}))
    assert error.value.field == field
    assert error.value.value is value


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, vs in TENANT_FIELDS.items() for v in vs]
)
def test_a_bad_number_of_a_tenant_is_named_with_its_place(field: str, value: Any) -> None:
    bad = replace(GOOD, tenants=(TenantReport("first"), replace(TENANT, **{field: value})))
    with pytest.raises(InvalidRequest) as error:
        check_report(bad)
    assert error.value.field == f"tenants[1].{field}"


def refused(**tenant: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        check_report(replace(GOOD, tenants=(replace(TENANT, **tenant),)), gamma=2)
    return error.value.field


@pytest.mark.parametrize("bins", [1, SURVIVAL_BINS - 1, SURVIVAL_BINS + 1])
def test_a_histogram_has_its_bins_or_none(bins: int) -> None:
    assert refused(survivals=(0,) * bins) == "tenants[0].survivals"


@pytest.mark.parametrize("count", [-1, 2**32, 1.0, math.nan, True, None])
def test_a_count_is_a_whole_number(count: Any) -> None:
    survivals = (0,) * 7 + (count,) + (0,) * (SURVIVAL_BINS - 8)
    assert refused(survivals=survivals) == "tenants[0].survivals[7]"


def test_verdict_counts_have_positions_bins_and_no_more_accepted_than_reached() -> None:
    def counts(**changes: Any) -> tuple[VerdictCounts, ...]:
        return (replace(VERDICTS, **changes),)

    at = "tenants[0].verdicts[0]."
    assert refused(verdicts=counts(drafter_id="")) == at + "drafter_id"
    assert refused(verdicts=counts(mode="greedy")) == at + "mode"
    assert refused(verdicts=counts(reached=(ROW,) * 3)) == at + "reached"
    assert refused(verdicts=counts(accepted=(ROW,))) == at + "accepted"
    assert refused(verdicts=counts(reached=(ROW, ROW[1:]))) == at + "reached[1]"
    more = ((*ROW[:4], 4, *ROW[5:]), ROW)
    assert refused(verdicts=counts(accepted=more)) == at + "accepted[0][4]"
    assert refused(verdicts=(VERDICTS,) * 65) == "tenants[0].verdicts"


def test_lists_are_bounded_and_name_nobody_twice() -> None:
    def field(**changes: Any) -> str:
        with pytest.raises(InvalidRequest) as error:
            check_report(replace(GOOD, **changes))
        return error.value.field

    assert field(tenants=tuple(TenantReport(f"t{i}") for i in range(257))) == "tenants"
    assert field(tenants=(TENANT, TENANT)) == "tenants[1].tenant"
    use = DrafterUse("d", 1, 0.0)
    assert field(drafters=(use, use)) == "drafters[1].drafter"
    assert field(drafters=(DrafterUse("d", -1, 0.0),)) == "drafters[0].drafted"
    assert field(drafters=(DrafterUse("d", 1, math.nan),)) == "drafters[0].exposed_s"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sessions", -1),
        ("queue", 1.5),
        ("tokens_per_s", math.nan),
        ("capacity_tokens_per_s", math.inf),
        ("capacity_tokens_per_s", -1.0),
    ],
)
def test_a_drafters_load_is_checked_too(field: str, value: Any) -> None:
    good = DrafterLoad(3, 1, 100.0, 500.0)
    assert check_load(good) is good
    with pytest.raises(InvalidRequest) as error:
        check_load(replace(good, **{field: value}))
    assert error.value.field == field
