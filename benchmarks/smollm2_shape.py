"""Sizes of the default target and of its drafter, for benchmarks that need no weights of theirs."""

from __future__ import annotations

from typing import Any

from dspark.models.drafters.config import DrafterConfig

D, V, LAYERS = 576, 49_152, 30
LAYERS_READ = (1, 8, 14, 20, 27)


def drafter_config(**changes: Any) -> DrafterConfig:
    """A two-layer dspark drafter for SmolLM2-135M, but for `changes`."""
    facts = {
        "kind": "dspark",
        "gamma": 6,
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 1536,
        "num_layers": 2,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "target_layer_ids": LAYERS_READ,
        "target_layers": LAYERS,
        "head": "vanilla",
        "rank": 64,
        "confidence": True,
    }
    return DrafterConfig(**{**facts, **changes})
