"""Two workers on Ray Train give the loss of one. A cluster starts for it: `pytest -m slow`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.core.errors import ConfigError
from dspark.training.curve import read_curve
from dspark.training.errors import DataError
from dspark.training.training_run import Watch, train

from .test_trainer import config, data, load, target

__all__ = ["data", "target"]  # fixtures


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_on_ray_give_the_loss_of_one(target: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'dspark[train]'")
    from dspark.training.ray_workers import train_on_ray

    alone, together = tmp_path / "alone", tmp_path / "together"
    expected = train(config(target, data, alone))
    train_on_ray(config(target, data, together), 2, threads=1, stop_at=5)
    lines: list[str] = []
    steps: list[int] = []
    held_out: dict[int, Any] = {}
    watch = Watch(
        line=lines.append,
        step=lambda report: steps.append(report.step),
        held_out=held_out.__setitem__,
    )
    found = train_on_ray(config(target, data, together), 2, threads=1, watch=watch)
    assert lines == ["going on after step 4 of 12"]
    assert steps == [*range(5, 13)]
    assert sorted(held_out) == [6, 12]
    assert held_out[12] == found.held_out
    assert found.step == expected.step == 12
    assert found.held_out["tau"] == pytest.approx(expected.held_out["tau"], abs=0.05)
    ours, theirs = read_curve(together), read_curve(alone)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        if one["kind"] == "train":
            assert one["block_tokens"] == other["block_tokens"]
    difference = [
        float((one - other).abs().mean())
        for one, other in zip(
            load(together, target).values(), load(alone, target).values(), strict=True
        )
    ]
    assert torch.tensor(difference).max() < 1e-4

    with pytest.raises(DataError, match=r"training.anchors = 4, now it is 3"):
        train_on_ray(config(target, data, together, training={"anchors": 3}), 2, threads=1)


def test_more_workers_than_answers_a_step_are_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    from dspark.training.ray_workers import train_on_ray

    with pytest.raises(ConfigError, match=r"training.sequences: 3 .* not enough for 4 workers"):
        train_on_ray(config(target, data, tmp_path), 4)
