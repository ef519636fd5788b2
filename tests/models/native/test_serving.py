"""The native backend under an engine: speculation changes no token, not even in int8."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dspark.core.config import EngineConfig
from dspark.core.requests import Committed, Finished, Request
from dspark.core.sampling import SamplingParams
from dspark.deploy.single import Progress, TargetConfig, open_backend
from dspark.models.drafters import NgramDrafter
from dspark.models.targets.native import NativeBackend, NativeOptions
from dspark.models.targets.transformers import TransformersBackend
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.verifier.engine import Engine

from ..tiny import Ids, text, tiny_model

SMALL = EngineConfig(
    kv_tokens=2048, block_size=16, max_sequences=8, max_step_tokens=64, prefill_chunk=33, gamma=4
)
PROMPTS = {str(seed): text(20 + 9 * seed, seed % 3) * 2 for seed in range(6)}


def answers(
    options: NativeOptions, verify: str, sampling: SamplingParams, at_once: int
) -> tuple[Mapping[str, Ids], int]:
    """Texts by request, and how many drafted tokens were accepted."""
    config = EngineConfig(**{**_fields(SMALL), "verify": verify})
    engine = Engine(
        NativeBackend(tiny_model("llama"), config.block_size, options),
        config,
        OnlineStepCost(StepCost.from_table({1: 1.0, 64: 1.0})),
        drafters={"ngram": NgramDrafter(4)},
    )
    texts: dict[str, Ids] = {}
    waiting = list(PROMPTS.items())
    running = 0
    while waiting or running:
        while waiting and running < at_once:
            name, prompt = waiting.pop(0)
            engine.submit(Request(name, prompt, sampling))
            running += 1
        for (name, _), event in engine.step():
            if isinstance(event, Committed):
                texts[name] = (*texts.get(name, ()), *event.ids)
            elif isinstance(event, Finished):
                assert event.error is None
                running -= 1
    return texts, engine.figures.speculation.accepted


def _fields(config: EngineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=40),
    ],
    ids=["greedy", "seeded"],
)
def test_speculation_and_company_change_no_token(precision: str, sampling: SamplingParams) -> None:
    plain, _ = answers(NativeOptions(precision, threads=1), "none", sampling, at_once=1)
    fast, accepted = answers(NativeOptions(precision, threads=2), "fixed:4", sampling, at_once=6)
    assert fast == plain
    if sampling.temperature == 0:
        assert accepted > 0


def test_where_native_does_not_fit_transformers_serves_and_a_line_says_why() -> None:
    lines: list[str] = []
    config = TargetConfig(backend="native", dtype="int8", threads=1)
    ran, served = open_backend(config, tiny_model("llama"), Progress(lines.append))
    assert ran == config
    assert isinstance(served, NativeBackend)
    assert served.name.startswith("native-int8-")
    assert not [line for line in lines if "transformers" in line]
    ran, served = open_backend(config, tiny_model("gemma2"), Progress(lines.append))
    assert (ran.backend, ran.dtype) == ("transformers", "float32")
    assert isinstance(served, TransformersBackend)
    assert lines[-1] == (
        "the native backend does not serve here, transformers does: model type 'gemma2' is not "
        "one of: llama, qwen2, qwen3, mistral"
    )
