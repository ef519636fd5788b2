"""A target is told from its checkpoint as from the loaded model, so that a drafter knows whose it
is without loading it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from dspark.core.errors import ModelError
from dspark.models import load_target
from dspark.models.targets.fingerprint import fingerprint, fingerprint_of
from dspark.models.targets.transformers import TransformersBackend

SIZE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZE),
    "gemma2": Gemma2Config(**SIZE),
}


def saved(name: str, directory: Path, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_is_told_as_the_model_that_it_becomes(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    directory = saved(name, tmp_path / "target")
    model = load_target(directory, dtype=dtype, device="cpu")
    loaded = fingerprint(model)
    assert fingerprint_of(directory, dtype) == loaded
    assert TransformersBackend(model).target_id == loaded


def test_other_weights_are_another_target(tmp_path: Path) -> None:
    one, other = (saved("llama", tmp_path / str(seed), seed) for seed in (1, 2))
    assert fingerprint_of(one, torch.float32) != fingerprint_of(other, torch.float32)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        fingerprint_of(tmp_path, torch.float32)
