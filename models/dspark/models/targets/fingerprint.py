"""Which target this is, told from a loaded model or, without loading it, from its checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark.core.errors import ModelError
from dspark.models.checkpoint import check_checkpoint, summary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Numbers of each tensor that count.
SAMPLE = 16


def fingerprint(model: PreTrainedModel) -> str:
    """Hash of the model's kind and vocabulary and of a sample of every weight. Take it before a
    backend lays the weights out anew."""
    config = model.config.get_text_config()
    return _hash(
        config,
        ((name, tuple(t.shape), t.flatten()[:SAMPLE]) for name, t in model.state_dict().items()),
    )


def fingerprint_of(directory: Path, dtype: torch.dtype) -> str:
    """The same of a checkpoint that would be loaded in `dtype`; "" where the names in its files
    are not the model's own. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    check_checkpoint(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        samples = dict(_samples(directory))
    except Exception as error:  # a strange configuration ends in whatever its code runs into
        raise ModelError(f"{directory}: cannot be read: {summary(error)}") from error
    tied = {id(tensor): samples[n] for n, tensor in model.named_parameters() if n in samples}
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        sample = samples.get(name, tied.get(id(tensor)))
        if sample is None:
            return ""
        found.append((name, tuple(tensor.shape), sample.to(dtype)))
    return _hash(config, found)


def _hash(config: Any, tensors: Iterable[tuple[str, tuple[int, ...], torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{config.model_type} {config.vocab_size}".encode())
    for name, shape, sample in tensors:
        digest.update(f"{name} {shape}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _samples(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_slice(name)[:SAMPLE].flatten()[:SAMPLE]
