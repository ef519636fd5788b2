"""The paper's presets: fitted to MTP-1, frozen, and compared with what the paper says."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark.scheduler.simulation import PAPER, Figures, anchors, config_of, preset_names
from dspark.scheduler.simulation.presets import CURVES, DOMAINS

from .simulated import configured, one, simulated

FIT = Path(__file__).parents[3] / "benchmarks" / "fit_presets.py"


@pytest.mark.parametrize("name", preset_names())
def test_curves_are_what_the_mtp1_points_alone_give(name: str) -> None:
    script = runpy.run_path(str(FIT))
    means = {kind: script["acceptance"](np.mean(tau), 7) for kind, tau in script["TABLE1"].items()}
    assert means == pytest.approx({kind: mean for kind, mean, _ in DOMAINS}, abs=1e-4)
    tau = 3 / sum(1 / (1 + p) for p in means.values())
    curve, errors = script["fit"](*script["points"](PAPER[name], tau))
    frozen = CURVES[name]
    for B in (1, 10, 100, 1000):
        assert frozen.seconds(B) == pytest.approx(curve.seconds(B), rel=1e-3)
    assert np.sqrt(np.mean(errors**2)) < (0.01 if name == "v4-flash" else 0.05)


@pytest.mark.parametrize(("name", "tolerance"), [("v4-flash", 0.04), ("v4-pro", 0.12)])
def test_the_baseline_is_the_papers(name: str, tolerance: float) -> None:
    """Simulated MTP-1 at three loads of Figure 8, within the fit's own error and sampling."""
    config = config_of(
        {
            "preset": name,
            "duration_s": 16.0,
            "sweep": {"users": [25, 100, 200]},
            "arms": [{"name": "mtp-1", "policy": "fixed:1", "draft_share": 0.0}],
        }
    )
    said = dict(PAPER[name].mtp1_load)
    for figures in simulated(config):
        assert figures.throughput == pytest.approx(said[figures.value], rel=tolerance)
        assert figures.budget == pytest.approx(2.0, abs=0.02)


def test_a_step_cost_follows_its_curve() -> None:
    for curve in CURVES.values():
        cost = curve.step_cost()
        for B in (1, 3, 17, 100, 777, 3000):
            assert cost.seconds(0, B, B, 0) == pytest.approx(curve.seconds(B), rel=1e-3)


def test_anchors_are_read_off_curves() -> None:
    """Two straight lines: ours has twice the tokens at each speed, budgets of 4."""
    some = one(configured(policies=["none"], arrivals={"users": 1, "answer": 5}, duration_s=1.0))
    points: list[Figures] = []
    for users in (5, 10, 40, 200):
        speed = 200 - 0.8 * users
        for arm, factor in (("mtp-1", 1), ("dspark", 2)):
            n = users * factor
            points.append(
                replace(
                    some, arm=arm, setting="users", value=float(n), throughput=n * speed, budget=4.0
                )
            )
    found = {anchor.name: anchor for anchor in anchors(PAPER["v4-flash"], points)}
    at_80 = found["throughput at 80 tok/s/user"]
    assert (at_80.said, at_80.found) == (0.51, pytest.approx(1.0))
    assert at_80.error == pytest.approx(0.49)
    assert found["budget at 50 requests"].found == pytest.approx(4.0)
    assert found["tok/s/user at 10600 tok/s/GPU"].found is None  # neither curve goes so far
    assert anchors(PAPER["v4-flash"], points[::2]) == []
