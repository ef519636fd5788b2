"""The configuration file is strict: what it says is what is done, or an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.core.errors import ConfigError
from dspark.training.config import EAGLE_DECAY, LossSection, read_config
from dspark.training.losses import Weights

GOOD = """
target = "smollm2-135m"

[drafter]
kind = "dspark"
gamma = 6
layers = 2
head = "vanilla"
rank = 64
draft_vocab = 8192

[data]
folders = ["some/where"]

[training]
steps = 100
learning_rate = 6e-4

[run]
folder = "run"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GOOD))
    assert config.drafter.gamma == 6
    assert config.training.grad_norm == 1.0
    assert config.weights == Weights(0.1, 0.9, 1.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rank = 64", "ranks = 64", "drafter.ranks: is not a known key"),
        ("steps = 100", "", "training.steps: is missing"),
        ("steps = 100", 'steps = "100"', "training.steps: '100'"),
        ("steps = 100", "steps = 0", "training.steps: 0"),
        ("steps = 100", "steps = 100\nseed = -1", "training.seed: -1"),
        ("learning_rate = 6e-4", "learning_rate = nan", "training.learning_rate"),
        ('kind = "dspark"', 'kind = "medusa"', "drafter.kind: 'medusa'"),
        ("gamma = 6", "gamma = 0", "drafter.gamma: 0"),
        ("[run]", "[runs]", "runs: is not a known key|run: is missing"),
        ('folders = ["some/where"]', "", "give folders, or answers"),
        ('folders = ["some/where"]', 'folders = ["a"]\nanswers = "b"', "give folders, or answers"),
        ('kind = "dspark"', 'kind = "eagle3"', "drafter.layers: 2 must be 1 for eagle3"),
        ('kind = "dspark"', 'kind = "dspark"\nkind = "mtp"', "is not TOML"),
        ("[run]", "[loss]\nconfidence = 1.0\n[run]", None),
        (
            'kind = "dspark"',
            'kind = "dflash"\n[loss]\nconfidence = 1.0\n[drafter.x]',
            "x: is not a known key",
        ),
    ],
)
def test_anything_else_is_an_error_that_names_it(
    tmp_path: Path, old: str, new: str, told: str | None
) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    if told is None:
        read_config(path)
        return
    with pytest.raises(ConfigError, match=f"train.toml: .*(?:{told})"):
        read_config(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        read_config(tmp_path / "nowhere.toml")


def test_each_kind_has_the_losses_of_its_public_configuration() -> None:
    usual = LossSection()
    assert usual.weights("dflash", False) == Weights(1.0, 0.0, 0.0, 0.0, 4.0)
    eagle = usual.weights("eagle3", False)
    assert eagle == Weights(0.0, 0.0, 0.0, 1.0, EAGLE_DECAY)
    import math

    assert math.exp(-1 / EAGLE_DECAY) == pytest.approx(0.8)
    assert LossSection(ce=0.5).weights("dspark", False) == Weights(0.5, 0.9, 0.0, 0.0, 4.0)
    with pytest.raises(ConfigError, match=r"loss.confidence: 1.0 needs a confidence head"):
        LossSection(confidence=1.0).weights("dflash", False)
