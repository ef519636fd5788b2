"""Checkpoints (design.md §7): what is saved is what is loaded, in both formats; whatever is broken
is told with both values; nothing half-written is taken for whole.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.core.errors import ConfigError, ModelError
from dspark.core.plans import CalibrationTable
from dspark.core.sampling import SamplingMode
from dspark.models.drafters import NgramDrafter, NoneDrafter
from dspark.models.drafters.calibration_file import CALIBRATION, save_calibration
from dspark.models.drafters.checkpoint import (
    DrafterCheckpoint,
    TargetFacts,
    export_deepspec,
    load_checkpoint,
    save_checkpoint,
)
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.loading import load_drafter, make_drafter
from dspark.models.drafters.target_tensors import TargetTensors, tensor_hash
from dspark.models.drafters.trunk import Trunk
from dspark.models.targets.transformers import TransformersBackend

from ..tiny import FAMILIES, tiny_model
from .plain import plain_draft
from .scene import KINDS, SOME_IDS, Talk, V, config_of, tensors, tiny_drafter
from .traces import GOLDEN, NAMES

TARGET = tensors()
FACTS = TargetFacts(
    "a target",
    embedding_hash=TARGET.embedding_hash,
    head_hash=TARGET.head_hash,
    tokenizer_hash="abc",
)


def saved(place: Path, name: str = "markov", **options: Any) -> Path:
    save_checkpoint(place / name, tiny_drafter(name, TARGET), FACTS, **options)
    return place / name


def same_drafts(one: Trunk, other: Trunk) -> bool:
    talk = Talk("a", 30)
    (ids, said), (same_ids, same_said) = (
        plain_draft(model, talk.features, talk.ids[:21]) for model in (one, other)
    )
    return ids == same_ids and np.allclose(said, same_said, atol=1e-5)


# --- the public format ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_deepspec_goes_through_unchanged(name: str, tmp_path: Path) -> None:
    export_deepspec(tmp_path / name, load_checkpoint(GOLDEN / name))
    theirs = load_file(GOLDEN / name / "model.safetensors")
    ours = load_file(tmp_path / name / "model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    config, golden = (
        json.loads((place / name / "config.json").read_text()) for place in (tmp_path, GOLDEN)
    )
    # What says nothing about a drafter: special ids, its trainer's settings, who wrote it.
    free = {"bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "num_anchors"}
    free |= {"target_model_name_or_path", "transformers_version"}
    assert {k: v for k, v in golden.items() if k not in free} == {
        k: v for k, v in config.items() if k not in free
    }


@pytest.mark.parametrize("name", ["markov", "rnn", "gated", "dflash", "eagle3", "headless"])
def test_ours_goes_out_and_comes_back(name: str, tmp_path: Path) -> None:
    model = tiny_drafter(name, TARGET)
    export_deepspec(tmp_path / name, DrafterCheckpoint(model, name))
    back = load_checkpoint(tmp_path / name)
    assert back.config == model.config
    assert same_drafts(back.model, model)


def test_a_reduced_vocabulary_is_spread_over_the_whole(tmp_path: Path) -> None:
    model = tiny_drafter("reduced", TARGET)
    with pytest.raises(ModelError, match=f"has {len(SOME_IDS)} of {V} rows; give the target"):
        export_deepspec(tmp_path / "a", DrafterCheckpoint(model, ""))
    export_deepspec(tmp_path / "a", DrafterCheckpoint(model, ""), TARGET)
    back = load_checkpoint(tmp_path / "a").model
    hidden = torch.randn(3, 64)
    logits = model.base_logits(hidden)
    assert torch.allclose(back.base_logits(hidden)[:, SOME_IDS], logits, atol=1e-6)
    inner, spread = model.markov_head, back.markov_head
    for before in (3, 40, 41, 77):  # 41 and 77 are left out and share a row
        row = torch.tensor([int(model.vocabulary.index[before])])
        a, b = inner.previous(row), spread.previous(torch.tensor([before]))
        assert torch.equal(a, b)
        bias = spread.markov_w2(a)[0]
        assert torch.allclose(bias[SOME_IDS], inner.markov_w2(a)[0], atol=1e-6)
        assert not bias[41]


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("mtp", {}, "'mtp' has no DeepSpec format"),
        ("markov", {"embed_scale": 8.0}, "embed_scale: 8"),
    ],
)
def test_what_deepspec_cannot_say_is_not_exported(
    name: str, changes: dict[str, float], told: str, tmp_path: Path
) -> None:
    model = tiny_drafter(name, tensors(**changes))
    with pytest.raises(ModelError, match=told):
        export_deepspec(tmp_path / "a", DrafterCheckpoint(model, ""), TARGET)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not one of"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn' is not served"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"hidden_act": "gelu"}, "'gelu' is not served"),
        ({"block_size": None}, "block_size: None is not of type int"),
        ({"markov_head_type": "tree"}, "'tree' is not one of: none, vanilla"),
        ({"target_layer_ids": [0, 2, 5]}, r"\[0, 2, 5\] must lie in \[-1, 4\]"),
        (
            {"num_hidden_layers": 3},
            "lacks 11 tensors that its configuration asks for, first la",
        ),
        (
            {"markov_rank": 8},
            r"confidence_head.proj.weight has shape \[1, 80\] instead of \[1, 72\]",
        ),
        ({"enable_confidence_head": False}, "holds 2 tensors that its configuration does not know"),
    ],
)
def test_a_deepspec_configuration_that_does_not_fit(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / "dspark_markov", tmp_path / "a")
    edit(tmp_path / "a", **changes)
    with pytest.raises(ModelError, match=told):
        load_checkpoint(tmp_path / "a")


def edit(place: Path, **changes: Any) -> None:
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- our format ----------------------------------------------------------------------------------


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_ours_goes_through_unchanged(name: str, holds: bool, tmp_path: Path) -> None:
    model = tiny_drafter(name, TARGET)
    drafter_id = save_checkpoint(
        tmp_path / "a", model, FACTS, training={"steps": 7}, with_target_tensors=holds
    )
    back = load_checkpoint(tmp_path / "a", None if holds else TARGET)
    assert (back.config, back.drafter_id, back.target) == (model.config, drafter_id, FACTS)
    assert back.training == {"steps": 7}
    assert np.array_equal(back.model.vocabulary.ids, model.vocabulary.ids)
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.model.state_dict()[key], tensor), key
    assert back.model.projection().feature_id == model.projection().feature_id
    held = set(load_file(tmp_path / "a" / "model.safetensors"))
    assert ("lm_head.weight" in held, "embed_tokens.weight" in held) == (holds, holds)


def test_half_precision_halves_the_file_and_keeps_its_ids(tmp_path: Path) -> None:
    whole = saved(tmp_path / "32")
    half = saved(tmp_path / "16", dtype=torch.bfloat16)
    small, large = ((p / "model.safetensors").stat().st_size for p in (half, whole))
    assert small < 0.55 * large
    back = load_checkpoint(half, TARGET)
    assert back.model.norm.weight.dtype == torch.float32
    facts = json.loads((half / "config.json").read_text())
    assert back.model.projection().feature_id == facts["feature_id"]
    assert back.drafter_id != load_checkpoint(whole, TARGET).drafter_id


def test_tensors_of_the_target_are_shared_not_copied(tmp_path: Path) -> None:
    model = load_checkpoint(saved(tmp_path), TARGET).model
    assert model.embed_tokens.weight.data_ptr() == TARGET.embedding.data_ptr()
    assert model.lm_head.weight.data_ptr() == TARGET.head.data_ptr()


def test_a_target_is_the_same_in_both_precisions(tmp_path: Path) -> None:
    place = saved(tmp_path)
    half = replace(TARGET, embedding=TARGET.embedding.bfloat16(), head=TARGET.head.bfloat16())
    assert load_checkpoint(place, half).model.embed_tokens.weight.dtype == torch.float32
    assert tensor_hash(TARGET.head) != tensor_hash(TARGET.embedding)


def test_it_needs_its_target(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leaves embedding and LM head to its target 'a target'"):
        load_checkpoint(saved(tmp_path))


def test_another_target_is_refused_with_both_values(tmp_path: Path) -> None:
    place, other = saved(tmp_path), tensors(seed=5)
    with pytest.raises(ModelError) as refused:
        load_checkpoint(place, other)
    assert TARGET.embedding_hash in str(refused.value)
    assert other.embedding_hash in str(refused.value)
    wrong = {
        "vocab_size: the drafter was made for 160, the target has 150": replace(
            TARGET, embedding=TARGET.embedding[:150]
        ),
        "hidden_size: the drafter was made for 64, the target has 32": replace(
            TARGET, embedding=TARGET.embedding[:, :32]
        ),
        "target_layers: the drafter was made for 4, the target has 9": replace(TARGET, layers=9),
        "embed_scale: the drafter was made for 1.0, the target has 8.0": replace(
            TARGET, embed_scale=8.0
        ),
        "logit_softcap: the drafter was made for None, the target has 30.0": replace(
            TARGET, logit_softcap=30.0
        ),
    }
    for told, target in wrong.items():
        with pytest.raises(ModelError, match=told):
            load_checkpoint(place, target)


def _drop(held: dict[str, torch.Tensor]) -> None:
    del held["markov_head.markov_w2.weight"]


def _add(held: dict[str, torch.Tensor]) -> None:
    held["surprise"] = torch.zeros(1)


def _reshape(held: dict[str, torch.Tensor]) -> None:
    held["fc.weight"] = held["fc.weight"][:, :-1].contiguous()


def _integers(held: dict[str, torch.Tensor]) -> None:
    held["norm.weight"] = held["norm.weight"].int()


def _ids(held: dict[str, torch.Tensor]) -> None:
    held["draft_vocabulary.ids"] = held["draft_vocabulary.ids"].flip(0)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_drop, "lacks 1 tensors that its configuration asks for, first markov_head.markov_w2"),
        (_add, "holds 1 tensors that its configuration does not know, first surprise"),
        (_reshape, r"fc.weight has shape \[64, 127\] instead of \[64, 128\]"),
        (_integers, "norm.weight is torch.int32 instead of a float"),
        (_ids, "its ids must be growing"),
    ],
)
def test_tensors_that_do_not_fit(
    damage: Callable[[dict[str, torch.Tensor]], None], told: str, tmp_path: Path
) -> None:
    """Told by name, also where somebody has made the ids fit."""
    place = saved(tmp_path, "reduced")
    held = load_file(place / "model.safetensors")
    damage(held)
    save_file(held, place / "model.safetensors")
    with pytest.raises(ModelError, match="its tensors make") as refused:
        load_checkpoint(place, TARGET)
    edit(place, drafter_id=str(refused.value).split("'")[-2])
    with pytest.raises(ModelError, match=told):
        load_checkpoint(place, TARGET)


def test_parts_of_two_checkpoints_do_not_pass_for_one(tmp_path: Path) -> None:
    one = saved(tmp_path / "1")
    save_checkpoint(tmp_path / "2", tiny_drafter("markov", TARGET, seed=2), FACTS)
    shutil.copy(tmp_path / "2" / "model.safetensors", one)
    with pytest.raises(ModelError, match="is of 'dspark-"):
        load_checkpoint(one, TARGET)


@pytest.mark.parametrize("size", [0, 7, 5000])
def test_a_file_that_is_cut_short(size: int, tmp_path: Path) -> None:
    for place in (saved(tmp_path), tmp_path / "golden"):
        if not place.exists():
            shutil.copytree(GOLDEN / "dflash", place)
        file = place / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ModelError, match="damaged or cut short"):
            load_checkpoint(place, TARGET)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 2}, "is of version 2, this dspark reads 1"),
        ({"surprise": 1}, "surprise: is not a known key"),
        ({"feature_id": "0"}, "feature_id '0', its tensors make"),
        ({"target": {"name": "x"}}, "target: {'name': 'x'} must have"),
        ({"drafter": []}, r"drafter: \[\] is not an object"),
        ({"drafter": {"kind": "dspark", "surprise": 1}}, "surprise: is not a key"),
        ({"drafter": {"kind": "dspark"}}, "gamma: is missing"),
    ],
)
def test_a_configuration_that_does_not_fit(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    place = saved(tmp_path)
    edit(place, **changes)
    with pytest.raises(ModelError, match=told):
        load_checkpoint(place, TARGET)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "medusa"}, "'medusa' is not one of"),
        ({"gamma": 0}, "gamma: 0 must be at least 1"),
        ({"gamma": 65}, "gamma: 65 is above 64"),
        ({"num_kv_heads": 3}, "num_heads: 4 must be a multiple of num_kv_heads = 3"),
        ({"target_layer_ids": ()}, "must be growing, and not empty"),
        ({"target_layer_ids": (2, 0)}, "must be growing"),
        ({"target_layer_ids": (0, 3)}, r"must lie in \[-1, 2\]"),
        ({"mask_token_id": 160}, "160 is not an id of the vocabulary"),
        ({"draft_vocab_size": 161}, "161 must be in"),
        ({"rank": 0}, "rank: 0 does not go with head = 'vanilla'"),
        ({"kind": "dflash"}, "'dflash' has no sequential and no confidence head"),
        ({"head": "none", "rank": 0}, "needs a sequential head, whose W1 it reads"),
        ({"rope_theta": float("nan")}, "rope_theta: nan must be a number above 0"),
    ],
)
def test_a_configuration_that_makes_no_drafter(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(**changes)


@pytest.mark.parametrize("name", KINDS)
def test_configurations_are_plain_json(name: str) -> None:
    config = config_of(name)
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="gamma: '7' is not a int"):
        DrafterConfig.from_dict(config.to_dict() | {"gamma": "7"})
    with pytest.raises(ConfigError, match="confidence: 1 is not a bool"):
        DrafterConfig.from_dict(config.to_dict() | {"confidence": 1})


# --- writing -------------------------------------------------------------------------------------


def test_nothing_is_written_over_unasked(tmp_path: Path) -> None:
    place = saved(tmp_path)
    before = load_checkpoint(place, TARGET).drafter_id
    with pytest.raises(ModelError, match="is there already"):
        save_checkpoint(place, tiny_drafter("gated", TARGET), FACTS)
    assert load_checkpoint(place, TARGET).drafter_id == before
    after = save_checkpoint(place, tiny_drafter("gated", TARGET), FACTS, replace=True)
    assert load_checkpoint(place, TARGET).drafter_id == after != before
    assert [p.name for p in tmp_path.iterdir()] == ["markov"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As a disk that fills up: no file of this process may grow beyond `size` bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    quiet = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, quiet)


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    place = saved(tmp_path)
    before = load_checkpoint(place, TARGET).drafter_id
    with (
        largest_file(10_000),
        pytest.raises(ModelError, match="cannot be written: the disk is full"),
    ):
        save_checkpoint(place, tiny_drafter("gated", TARGET), FACTS, replace=True)
    assert load_checkpoint(place, TARGET).drafter_id == before
    assert [p.name for p in tmp_path.iterdir()] == ["markov"]


def test_what_a_killed_writer_left_is_not_in_the_way(tmp_path: Path) -> None:
    left = tmp_path / ".markov.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    load_checkpoint(saved(tmp_path), TARGET)
    assert not left.exists()


def test_a_drafter_that_was_repacked_is_not_saved(tmp_path: Path) -> None:
    model = tiny_drafter("markov", TARGET)
    ModelDrafter(DrafterCheckpoint(model, ""))
    with pytest.raises(ModelError, match="lacks"):
        save_checkpoint(tmp_path / "a", model, FACTS)
    assert not list(tmp_path.iterdir())


def test_hashes_are_needed_for_what_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="their hashes must be given"):
        save_checkpoint(tmp_path / "a", tiny_drafter("markov", TARGET))


# --- calibration ---------------------------------------------------------------------------------


def table(drafter_id: str, *temperatures: float) -> CalibrationTable:
    return CalibrationTable(drafter_id, SamplingMode.COUPLED, temperatures)


def test_calibration_lies_beside_its_checkpoint(tmp_path: Path) -> None:
    place = saved(tmp_path)
    drafter_id = load_checkpoint(place, TARGET).drafter_id
    tables = (table(drafter_id, 0.7, 1.25), replace(table(drafter_id, 2.0), mode="greedy"))
    save_calibration(place, drafter_id, tables)
    assert load_checkpoint(place, TARGET).calibration == tables
    save_calibration(place, drafter_id, tables[:1])
    drafter = load_drafter(place, TARGET)
    assert drafter.calibration == tables[:1]
    assert drafter.card.drafter_id == drafter_id


def test_calibration_of_another_drafter_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path)
    save_calibration(place, "dspark-other", [table("dspark-other", 1.0)])
    with pytest.raises(ModelError, match="is of the drafter 'dspark-other', the checkpoint is"):
        load_checkpoint(place, TARGET)
    with pytest.raises(ModelError, match="a table of 'x'"):
        save_calibration(place, "y", [table("x", 1.0)])


@pytest.mark.parametrize(
    "text", ["", "{}", '{"drafter_id": 1, "temperatures": {"warm": [1]}}', "[1]"]
)
def test_a_file_that_is_no_calibration(text: str, tmp_path: Path) -> None:
    place = saved(tmp_path)
    (place / CALIBRATION).write_text(text)
    with pytest.raises(ModelError, match="is not a calibration"):
        load_checkpoint(place, TARGET)


@pytest.mark.parametrize(
    ("temperatures", "offsets", "told"),
    [
        ((), (), "temperatures: 0 must be 1 to 64 numbers"),
        ((1.0, 0.0), (), r"temperatures\[1\]: 0.0 must be above 0 and finite"),
        ((-1.0,), (), r"temperatures\[0\]: -1.0 must be above 0"),
        ((float("nan"),), (), r"temperatures\[0\]: nan must be above 0"),
        ((float("inf"),), (), r"temperatures\[0\]: inf must be above 0"),
        ((1.0, 1.0), (0.5,), "offsets: 1 must be none or 2, as the temperatures"),
        ((1.0,), (float("nan"),), r"offsets\[0\]: nan must be finite"),
    ],
)
def test_a_table_is_of_numbers_that_scale_a_logit(
    temperatures: tuple[float, ...], offsets: tuple[float, ...], told: str, tmp_path: Path
) -> None:
    wrong = replace(table("a", *temperatures), offsets=offsets)
    with pytest.raises(ModelError, match=f"coupled: {told}"):
        save_calibration(saved(tmp_path), "a", [wrong])


# --- targets, vocabularies, names ----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_targets_tensors_are_found_in_its_checkpoint(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded, read = TargetTensors.of(model), TargetTensors.read(tmp_path)
    assert torch.equal(loaded.embedding, read.embedding)
    assert torch.equal(loaded.head, read.head)
    assert loaded.embed_scale == read.embed_scale == (8.0 if "gemma" in family else 1.0)
    assert loaded.logit_softcap == read.logit_softcap
    assert loaded.logit_softcap == (3.0 if family in ("gemma2", "gemma4") else None) or (
        family == "gemma4-experts"
    )
    assert loaded.layers == read.layers == model.config.num_hidden_layers
    with torch.inference_mode():
        embedded = model.get_input_embeddings()(torch.tensor([5]))[0]
    assert torch.allclose(embedded, loaded.embedding[5] * loaded.embed_scale)


def test_tensors_are_taken_before_a_backend_repacks(tmp_path: Path) -> None:
    model = tiny_model("llama")
    TransformersBackend(model)
    with pytest.raises(ModelError, match="take its tensors before"):
        TargetTensors.of(model)


def test_vocabularies() -> None:
    counts = np.array([5, 0, 7, 7, 1, 9])
    vocabulary = DraftVocabulary.most_frequent(counts, 3)
    assert vocabulary.ids.tolist() == [2, 3, 5]
    assert vocabulary.index.tolist() == [3, 3, 0, 1, 3, 2]
    assert (len(vocabulary), vocabulary.rows, vocabulary.is_whole) == (3, 4, False)
    whole = DraftVocabulary.whole(4)
    assert (len(whole), whole.rows, whole.is_whole) == (4, 4, True)
    for ids in ([], [2, 1], [1, 1], [-1, 2], [3, 6]):
        with pytest.raises(ConfigError, match="draft vocabulary"):
            DraftVocabulary(np.array(ids, np.int64), 6)


def test_drafters_by_name(tmp_path: Path) -> None:
    assert isinstance(make_drafter("ngram", gamma=4), NgramDrafter)
    assert isinstance(make_drafter("none", gamma=4), NoneDrafter)
    place = str(saved(tmp_path))
    with pytest.raises(ModelError, match="needs its target's tensors"):
        make_drafter(place, gamma=4)
    made = make_drafter(place, gamma=4, target=TARGET, target_id="t", tokenizer_hash="abc")
    assert isinstance(made, ModelDrafter)
    card = made.card
    assert (card.kind, card.gamma, card.vocab_size) == ("dspark", 5, V)
    assert (card.target_id, card.tokenizer_hash) == ("t", "abc")
    assert (card.layer_ids, card.feature_width) == ((0, 2), 64)
    assert card.feature_id == made.projection.feature_id
    with pytest.raises(ModelError, match="no such model"):
        make_drafter("surprise", gamma=4, target=TARGET)
    with pytest.raises(ModelError, match="the tokenizer abc, this target's is abd"):
        load_drafter(place, TARGET, tokenizer_hash="abd")
