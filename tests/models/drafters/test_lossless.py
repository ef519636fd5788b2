"""Trained drafters in the real engine (design.md §4): they change how fast, never what.

Targets are tiny random models of the three families; drafters are random too, so that most drafts
fall and every rule is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import PreTrainedModel

from dspark.core.config import EngineConfig
from dspark.core.requests import Request, Speculation
from dspark.core.sampling import SamplingParams
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.checkpoint import DrafterCheckpoint, load_checkpoint
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.targets.transformers import TransformersBackend
from dspark.verifier.engine import Engine

from ...verifier.toy import Scene, request, still_cost
from ..tiny import greedy as generate
from ..tiny import text, tiny_model
from .scene import KINDS, tiny_drafter
from .traces import GOLDEN, NAMES, V, load_target

FAMILIES = ("llama", "qwen3", "gemma3")
PROMPTS = [text(length, seed=length) for length in (3, 21)]


def engine_with(
    model: PreTrainedModel, drafters: Mapping[str, ModelDrafter], *, seed: int = 0, **config: Any
) -> Engine:
    backend = TransformersBackend(model)
    for drafter in drafters.values():
        backend.load_projection(drafter.projection)
    return Engine(
        backend,
        EngineConfig(**{"kv_tokens": 4096, **config}),
        still_cost(),
        drafters=drafters,
        rng=np.random.default_rng(seed),
    )


def asked(drafters: Iterable[str], params: SamplingParams) -> list[Request]:
    """Every prompt of every drafter, all at once."""
    return [
        request(f"{name}/{i}", prompt, params, speculation=Speculation(drafter=name))
        for name in drafters
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str) -> None:
    """Drafters of every kind side by side on one target."""
    model, tokens = tiny_model(family), 16
    drafters = {
        name: ModelDrafter(
            DrafterCheckpoint(tiny_drafter(name, TargetTensors.of(model)), name), candidates=24
        )
        for name in KINDS
    }
    expected = [list(generate(model, prompt, tokens)) for prompt in PROMPTS] * len(KINDS)
    engine = engine_with(model, drafters, verify="fixed:5", gamma=5, prefill_chunk=7)
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    answers = Scene(engine).ask(*asked(drafters, params))
    assert [answer.ids for answer in answers] == expected
    assert not engine.desk.faults
    assert engine.figures.speculation.verified > 100
    for drafter in drafters.values():
        assert not len(drafter.sessions)  # each was closed with its request


@pytest.mark.parametrize("verify", ["fixed:7", "early-stop"])
@pytest.mark.parametrize("candidates", [0, 32])
def test_seeded_text_does_not_depend_on_the_drafter(candidates: int, verify: str) -> None:
    """L3, with trained drafters, whose drafts are accepted."""
    drafters = {
        name: ModelDrafter(load_checkpoint(GOLDEN / name), candidates=candidates) for name in NAMES
    }
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=20)
    engine = engine_with(load_target(), drafters, verify=verify, seed=candidates)
    answers = Scene(engine).ask(*asked(["none", *drafters], params))
    texts = [answer.ids for answer in answers]
    assert texts == texts[: len(PROMPTS)] * (1 + len(drafters))
    assert not engine.desk.faults
    assert engine.figures.speculation.accepted > 30


# --- L2 ------------------------------------------------------------------------------------------

# Here a third of the drafts is accepted, so that a wrong rule would show.
PROMPT = (12, 15, 18, 21, 24)
TOP_K, OUTPUTS, REQUESTS = 3, 4, 800
SAMPLED = SamplingParams(temperature=0.7, top_k=TOP_K, max_tokens=OUTPUTS)
ALPHA, CERTAIN = 1e-3, 1e-9


@cache
def law() -> dict[tuple[int, ...], float]:
    """Probability of each text of four tokens under the target, top_k = 3: 81 of them."""
    model, texts = load_target(), {(): 1.0}
    for _ in range(OUTPUTS):
        longer = {}
        with torch.inference_mode():
            ids = torch.tensor([[*PROMPT, *told] for told in texts])
            logits = model(ids).logits[:, -1].double() / SAMPLED.temperature
        for (told, p), row in zip(texts.items(), logits, strict=True):
            top = row.topk(TOP_K)
            for token, q in zip(top.indices.tolist(), torch.softmax(top.values, 0), strict=True):
                longer[(*told, token)] = p * float(q)
        texts = longer
    return texts


def p_value(drafter: ModelDrafter, verify: str) -> float:
    engine = engine_with(
        load_target(), {"mine": drafter}, verify=verify, seed=4, max_waiting=REQUESTS
    )
    # Not `Scene`, whose check after every step would take most of the time.
    for i in range(REQUESTS):
        engine.submit(request(str(i), PROMPT, SAMPLED))
    said: dict[tuple[str, int], list[int]] = {}
    while not engine.idle:
        for key, event in engine.step():
            said.setdefault(key, []).extend(getattr(event, "ids", ()))
    assert not engine.desk.faults
    assert engine.figures.speculation.accepted > 0
    texts = law()
    counts = dict.fromkeys(texts, 0)
    for ids in said.values():
        counts[tuple(ids)] += 1
    observed = np.array(list(counts.values()))
    expected = np.array(list(texts.values())) * REQUESTS
    few = expected < 5
    observed = np.append(observed[~few], observed[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    kept = expected > 0
    return float(stats.chisquare(observed[kept], expected[kept]).pvalue)


@pytest.mark.parametrize(
    ("name", "candidates", "verify"),
    [
        ("dspark_markov", 0, "fixed:7"),
        ("dspark_markov", 32, "early-stop"),
        ("dspark_rnn", 32, "fixed:2"),
        ("eagle3", 0, "fixed:7"),
    ],
)
def test_sampled_text_follows_the_targets_law(name: str, candidates: int, verify: str) -> None:
    checkpoint = load_checkpoint(GOLDEN / name)
    mine = ModelDrafter(checkpoint, candidates=candidates, rng=np.random.default_rng(3))
    assert p_value(mine, verify) > ALPHA


def test_a_drafter_that_ships_other_weights_is_seen() -> None:
    """Power: a support that says more of the tail than was drawn from biases the text."""

    class Liar(ModelDrafter):
        def propose(self, requests: Any) -> Any:
            replies = super().propose(requests)
            return [replace(r, support_weights=np.ones_like(r.support_weights)) for r in replies]

    checkpoint = load_checkpoint(GOLDEN / "dspark_markov")
    assert isinstance(checkpoint.model, ParallelDrafter)
    assert p_value(Liar(checkpoint, rng=np.random.default_rng(3)), "fixed:7") < CERTAIN


def test_the_law_is_over_this_vocabulary() -> None:
    assert len(law()) == TOP_K**OUTPUTS
    assert max(max(ids) for ids in law()) < V
    assert sum(law().values()) == pytest.approx(1.0)
