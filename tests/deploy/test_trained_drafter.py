"""A trained drafter in the one-process composition: from a directory to texts that are the target's
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError, ModelError
from dspark.core.plans import CalibrationTable
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingMode, SamplingParams
from dspark.deploy.single import Loaded, TargetConfig, load
from dspark.models import load_target
from dspark.models.cache import default_cache
from dspark.models.drafters.calibration_file import save_calibration
from dspark.models.drafters.checkpoint import TargetFacts, save_checkpoint
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.targets.native.library import cached_library

from ..cli.conftest import make_checkpoint

GAMMA = 4
USUAL_CACHE = default_cache()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = TargetTensors.of(load_target(target, dtype=torch.float32, device="cpu"))
    V, D = tensors.embedding.shape
    config = DrafterConfig(
        kind="dspark",
        gamma=GAMMA,
        vocab_size=V,
        hidden_size=D,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        target_layer_ids=(0,),
        target_layers=2,
        head="vanilla",
        rank=8,
        confidence=True,
    )
    model = new_drafter(config, tensors, generator=torch.Generator().manual_seed(3))
    directory = tmp_path_factory.mktemp("drafters") / "mine"
    facts = TargetFacts("tiny", embedding_hash=tensors.embedding_hash, head_hash=tensors.head_hash)
    drafter_id = save_checkpoint(directory, model, facts)
    tables = [CalibrationTable(drafter_id, SamplingMode.GREEDY, (2.5,) * GAMMA)]
    save_calibration(directory, drafter_id, tables)
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loaded(target: Path, drafter: str, **config: Any) -> Loaded:
    engine = EngineConfig(max_step_tokens=64, kv_tokens=2048, verify="fixed:4")
    return load(TargetConfig(model=str(target), drafter=drafter, engine=engine, **config))


def said(of: Loaded) -> tuple[list[int], int]:
    """(an answer, its draft tokens)."""
    prompt = of.tokenizer.encode("the quick brown fox")
    of.engine.submit(Request("a", prompt, SamplingParams(temperature=0, max_tokens=24)))
    events = []
    while not of.engine.idle:
        events += [event for _, event in of.engine.step() if isinstance(event, Committed)]
    ids = [token for event in events for token in event.ids]
    return ids, sum(event.speculation.verified for event in events)


def test_it_drafts_and_the_text_is_the_targets(target: Path, drafter: Path) -> None:
    plain, _ = said(loaded(target, "none"))
    trained = loaded(target, str(drafter))
    assert list(trained.engine.drafters) == ["dspark"]
    ids, verified = said(trained)
    assert ids == plain
    assert verified > 0
    assert not trained.engine.desk.faults


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_beside_a_native_target_it_drafts_natively(
    target: Path, drafter: Path, dtype: str, cache: Path
) -> None:
    """In the target's precision, without a word, and the text is the target's."""
    made = cached_library(lambda _: None, USUAL_CACHE).parent  # compiled once for all tests
    (cache / "native").mkdir(parents=True)
    (cache / "native" / made.name).symlink_to(made)
    plain, _ = said(loaded(target, "none", backend="native", dtype=dtype))
    trained = loaded(target, str(drafter), backend="native", dtype=dtype)
    [source] = trained.engine.drafters.values()
    assert source.drafter.kernel.name.startswith(f"native-{dtype}-")
    ids, verified = said(trained)
    assert ids == plain
    assert verified > 0
    assert not trained.engine.desk.faults


def test_its_temperatures_are_in_use(target: Path, drafter: Path) -> None:
    engine = loaded(target, str(drafter)).engine
    card = engine.drafters["dspark"].card
    used = engine.guidance.scaling(card.drafter_id, SamplingMode.GREEDY, GAMMA)
    assert used.tolist() == [[2.5] * GAMMA, [0.0] * GAMMA]


def test_a_drafter_of_another_target_is_refused(drafter: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other")
    weights = load_target(other, dtype=torch.float32, device="cpu")
    weights.lm_head.weight.data += 1.0
    weights.save_pretrained(other)
    with pytest.raises(ModelError, match="head"):
        loaded(other, str(drafter))


@pytest.mark.parametrize("name", ["ngrm", "no-such-directory"])
def test_a_name_that_is_nothing(target: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"drafter: '{name}' is not one of: auto, ngram, none, a dir"
    ):
        loaded(target, name)
