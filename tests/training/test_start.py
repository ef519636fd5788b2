"""What a run begins with: its vocabulary, its first weights, its sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.core.errors import ConfigError
from dspark.models.drafters.checkpoint import save_checkpoint
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.targets.transformers import TransformersBackend
from dspark.training.config import (
    DataSection,
    DrafterSection,
    RunSection,
    TrainConfig,
    TrainingSection,
)
from dspark.training.draft_vocabulary import choose_vocabulary
from dspark.training.examples import Layout, Target
from dspark.training.initial import begin_as
from dspark.training.prompts import Prompt
from dspark.training.reading import Reader, Text
from dspark.training.sources import TextSource
from dspark.training.start import Data, TargetModel, first_drafter, usual_layers
from dspark.training.topk import top_k, top_probabilities
from dspark.training.warm_start import warm_start

from ..models.tiny import VOCABULARY, tiny_model
from .scene import example, layout

KINDS = ["dspark", "dflash", "eagle3", "mtp"]


def save(family: str, folder: Path) -> Path:
    tiny_model(family).save_pretrained(folder)
    return folder


def shape(kind: str, folder: Path) -> DrafterConfig:
    tensors = TargetTensors.read(folder)
    return DrafterConfig(
        kind=kind,
        gamma=3 if kind != "mtp" else 1,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        target_layer_ids=(0, 2),
        target_layers=4,
        mask_token_id=0,
        head="vanilla" if kind == "dspark" else "none",
        rank=4 if kind == "dspark" else 0,
        confidence=kind == "dspark",
        embed_scale=tensors.embed_scale,
        logit_softcap=tensors.logit_softcap,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_drafter_begins_as_its_target_s_last_layer(
    tmp_path: Path, kind: str, family: str
) -> None:
    folder = save(family, tmp_path)
    drafter = new_drafter(shape(kind, folder), TargetTensors.read(folder))
    examples = [example(4, 9, seed=i, like=layout((0, 2))) for i in range(2)]
    warm_start(drafter, folder, examples)
    last = tiny_model(family).model.layers[3]
    ours = drafter.get_submodule("layers.0")
    for name in ("mlp.up_proj", "self_attn.o_proj", "input_layernorm", "post_attention_layernorm"):
        assert torch.equal(ours.get_submodule(name).weight, last.get_submodule(name).weight)
    query = ours.get_submodule("self_attn.q_proj").weight[:, -64:]
    assert torch.equal(query, last.self_attn.q_proj.weight)
    assert torch.equal(drafter.norm.weight, tiny_model(family).model.norm.weight)
    # Context is the last layer that is read.
    features = torch.randn(3, 128)
    norm = drafter.feature_norm()
    read = features[:, 64:]
    assert torch.allclose(drafter.project(features), read if norm is None else norm(read))
    if family == "qwen3":
        own = ours.get_submodule("self_attn.q_norm").weight
        assert torch.equal(own, last.self_attn.q_norm.weight)


def test_norms_that_a_target_lacks_keep_the_size_of_its_queries(tmp_path: Path) -> None:
    """A Llama has none: after them a query is as large, on average, as it is in the target."""
    folder = save("llama", tmp_path)
    drafter = new_drafter(shape("dspark", folder), TargetTensors.read(folder))
    one = example(4, 200, like=layout((0, 2)))
    warm_start(drafter, folder, [one])
    attention = drafter.get_submodule("layers.0.self_attn")
    x = drafter.get_submodule("layers.0.input_layernorm")(one.features[:-1, 64:].float())
    query = attention.get_submodule("q_proj")(x).unflatten(-1, (4, 16))
    normed = attention.get_submodule("q_norm")(query)
    sizes = [float(rows.detach().norm(dim=-1).mean()) for rows in (normed, query)]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


def test_layers_of_another_form_are_refused(tmp_path: Path) -> None:
    folder = save("gemma2", tmp_path)
    drafter = new_drafter(shape("dspark", folder), TargetTensors.read(folder))
    with pytest.raises(ConfigError, match="Gemma's have further norms"):
        warm_start(drafter, folder, [example(like=layout((0, 2)))])
    other = save("llama", tmp_path / "llama")
    narrow = new_drafter(
        DrafterConfig(
            **{
                **shape("dspark", other).to_dict(),
                "intermediate_size": 32,
                "target_layer_ids": (2,),
            }
        ),
        TargetTensors.read(other),
    )
    with pytest.raises(ConfigError, match=r"gate_proj.*\[32, 64\].*\[96, 64\]"):
        warm_start(narrow, other, [example(like=layout((2,)))])


def test_the_vocabulary_is_what_answers_and_the_target_use() -> None:
    made = [example(5, 40, seed=i) for i in range(4)]
    chosen = choose_vocabulary(made, 30, VOCABULARY, keep=[7, 9])
    mass = np.zeros(VOCABULARY)
    for one in made:
        for i, token in enumerate(one.token_ids[5:].tolist()):
            mass[token] += 1
            ids, p = one.target.top_ids[i].tolist(), one.target.top_p[i].tolist()
            for j, q in zip(ids, p, strict=True):
                mass[j] += q
    assert chosen.coverage == pytest.approx(mass[chosen.vocabulary.ids].sum() / mass.sum())
    assert {7, 9} <= set(chosen.vocabulary.ids.tolist())
    others = sorted(set(chosen.vocabulary.ids.tolist()) - {7, 9})
    best = [int(i) for i in np.argsort(-mass, kind="stable") if i not in (7, 9)][: len(others)]
    assert mass[others].sum() == pytest.approx(mass[best].sum(), abs=0.01)
    assert choose_vocabulary(made, VOCABULARY, VOCABULARY).coverage == pytest.approx(1.0)


class CountingReader(Reader):
    """texts: how many the target has read."""

    texts = 0

    def read(self, texts: Sequence[Text]) -> list[tuple[torch.Tensor, Target]]:
        self.texts += len(texts)
        return super().read(texts)


@pytest.mark.parametrize("warm", [True, False])
def test_given_answers_are_not_read_for_their_ids(tmp_path: Path, warm: bool) -> None:
    """Before the first step the target reads the few answers that size norms, not all of them."""
    folder = save("llama", tmp_path)
    answers = [(i, i, 10 + i % 30, 40, 40) for i in range(1, 31)]
    prompts = [Prompt(i, (5, 6), answer_ids=ids) for i, ids in enumerate(answers, 1)]
    backend = TransformersBackend(tiny_model("llama"), block_size=4)
    reader = CountingReader(backend, Layout((0, 2), 64, 12))
    data = Data(TextSource(prompts, reader), [*range(30)], [], {})
    config = TrainConfig(
        target=str(folder),
        drafter=DrafterSection(gamma=3, layers=1, rank=4, draft_vocab=20, warm_start=warm),
        data=DataSection(answers="lines.jsonl"),
        training=TrainingSection(steps=1),
        run=RunSection(folder="run"),
    )
    drafter, coverage = first_drafter(config, data, TargetModel.find(str(folder)))
    assert reader.texts == (8 if warm else 0)
    said = Counter(token for ids in answers for token in ids)
    end = TargetModel.find(str(folder)).sizes.eos_token_id
    kept = set(drafter.vocabulary.ids.tolist())
    assert 40 in kept
    others = sorted(kept - {end})
    assert sum(said[i] for i in others) == sum(n for _, n in said.most_common(len(others)))
    assert coverage == pytest.approx(sum(said[i] for i in kept) / said.total())
    # What training reads is whole.
    (read,) = data.source.examples([3])
    assert read.features.shape == (7, 128)
    assert read.target.top_p.shape == (5, 12)
    assert float((read.target.top_p.sum(-1) + read.target.tail).mean()) == pytest.approx(1.0)


def test_a_run_begins_as_another_drafter(tmp_path: Path) -> None:
    """With a draft vocabulary of its own: rows go with their ids."""
    folder = save("llama", tmp_path / "target")
    target = TargetModel.find(str(folder))
    facts = replace(shape("dspark", folder), draft_vocab_size=6)
    given = new_drafter(
        facts,
        target.tensors,
        DraftVocabulary(np.array([3, 5, 7, 11, 13, 17]), VOCABULARY),
        generator=torch.Generator().manual_seed(1),
    )
    assert given.markov_head is not None
    save_checkpoint(tmp_path / "given", given, target.facts({}), training={})
    ids = np.array([5, 6, 13, 20])
    own = new_drafter(
        replace(facts, draft_vocab_size=4, gamma=2),
        target.tensors,
        DraftVocabulary(ids, VOCABULARY),
    )
    begin_as(own, tmp_path / "given", target.tensors)
    assert own.markov_head is not None
    before, after = own.markov_head.markov_w1.weight, own.markov_head.markov_w2.weight
    old_before, old_after = given.markov_head.markov_w1.weight, given.markov_head.markov_w2.weight
    assert torch.equal(before, old_before[[1, 6, 4, 6, 6]])
    assert torch.equal(after[[0, 2]], old_after[[1, 4]])
    assert not after[[1, 3]].any()
    theirs = dict(given.named_parameters())
    for name, tensor in own.named_parameters():
        if "markov" not in name and name != "lm_head.weight":
            assert torch.equal(tensor, theirs[name]), name
    with pytest.raises(ConfigError, match=r"drafter.initial: .*given has rank = 4, this run 8"):
        begin_as(
            new_drafter(replace(facts, rank=8), target.tensors, given.vocabulary),
            tmp_path / "given",
            target.tensors,
        )


def test_layers_are_spread_as_the_public_configurations_do() -> None:
    assert usual_layers(36) == (1, 9, 17, 25, 33)  # Qwen3-4B
    assert usual_layers(40) == (1, 10, 19, 28, 37)  # Qwen3-14B
    assert usual_layers(30) == (1, 8, 14, 20, 27)
    assert usual_layers(4) == (1,)
    assert usual_layers(2) == (0,)


@pytest.mark.parametrize(("V", "k"), [(64 * 40, 16), (64 * 40, 64), (1000, 64), (100, 200)])
def test_the_largest_of_a_row_are_found(V: int, k: int) -> None:
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(0)) * 4
    logits[0, :5] = 30.0  # equal ones
    values, ids = top_k(logits, k)
    expected = logits.topk(min(k, V), -1).values
    assert torch.equal(values, expected)
    assert torch.equal(logits.gather(1, ids), expected)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    found = top_probabilities(logits, k)
    p = logits.double().softmax(-1).gather(1, found.top_ids.long())
    assert torch.allclose(found.top_p.double(), p, atol=1e-6)
    assert torch.allclose(found.tail.double(), 1 - p.sum(-1), atol=1e-6)
