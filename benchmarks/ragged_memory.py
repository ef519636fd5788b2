"""Resident memory over 10,000 ragged steps of a tiny random Llama on the transformers backend.

    OMP_NUM_THREADS=1 python benchmarks/ragged_memory.py

Sixteen sequences at all times: random prompts, lengths and cancellations, greedy and sampled,
`ngram` with `fixed:5`. Prints megabytes every 1,000 steps and checks every block at the end.
"""

from __future__ import annotations

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.core.config import EngineConfig
from dspark.core.requests import Request
from dspark.core.sampling import SamplingParams
from dspark.models.drafters import NgramDrafter
from dspark.models.targets.transformers import TransformersBackend
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.verifier.engine import Engine

STEPS, SEQUENCES = 10_000, 16


def tiny_engine() -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=160,
        max_position_embeddings=512,
    )
    return Engine(
        TransformersBackend(LlamaForCausalLM(config)),
        EngineConfig(
            kv_tokens=2048,
            max_sequences=SEQUENCES,
            max_step_tokens=128,
            prefill_chunk=64,
            verify="fixed:5",
        ),
        OnlineStepCost(StepCost.from_table({1: 0.010, 128: 0.011})),
        drafters={"ngram": NgramDrafter(5)},
    )


def random_request(number: int, rng: np.random.Generator) -> Request:
    params = SamplingParams(
        temperature=float(rng.integers(0, 2)), max_tokens=int(rng.integers(1, 60))
    )
    return Request(str(number), tuple(rng.integers(0, 20, rng.integers(1, 90)).tolist()), params)


def main() -> None:
    engine, rng, number = tiny_engine(), np.random.default_rng(0), 0
    process = psutil.Process()
    for step in range(STEPS + 1):
        while engine.active < SEQUENCES:
            number += 1
            engine.submit(random_request(number, rng))
        if rng.random() < 0.02:
            engine.cancel(str(number - int(rng.integers(0, 8))))
        engine.step()
        if step % 1000 == 0:
            print(f"{step:6d} steps {process.memory_info().rss / 1e6:7.0f} MB", flush=True)
    engine.check_integrity()


if __name__ == "__main__":
    main()
