"""A local directory becomes a model and a tokenizer.

A checkpoint is config.json, model.safetensors (or its shards and their index) and a tokenizer. Only
safetensors are read and no code of a checkpoint is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dspark.core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Model types whose ragged steps are tested to equal `generate` (tests/models).
SERVABLE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gemma4_text")

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def check_checkpoint(directory: Path) -> dict[str, Any]:
    """The configuration of a checkpoint whose files are all there and complete (milliseconds).

    Raises `ModelError` naming the file that is missing, cut short, or not what its name says.
    """
    config = directory / "config.json"
    if not config.is_file():
        found = next(iter(sorted(directory.glob("*.gguf"))), None)
        hint = f"; give the GGUF file {found} itself" if found else "; is it a checkpoint?"
        raise ModelError(f"{directory}: has no config.json{hint}")
    facts = _read_json(config)
    if not isinstance(facts.get("model_type"), str):
        raise ModelError(f"{config}: names no model_type")
    for file in _weight_files(directory):
        try:
            # Opening compares the header with the file's size: a truncated download shows here.
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{file}: is damaged or cut short ({summary(error)}); delete it and fetch it again"
            ) from error
    return facts


def load_target(path: Path, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The causal language model in `path`, in evaluation mode, without gradients.

    Raises `ModelError` for a checkpoint that is broken, of a type outside `SERVABLE`, quantised, or
    that does not fit its own configuration or the device.
    """
    config = check_checkpoint(path)
    if config["model_type"] not in SERVABLE:
        raise ModelError(
            f"{path}: model type {config['model_type']!r} is not served; "
            f"these are: {', '.join(SERVABLE)}"
        )
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unnamed method")
        raise ModelError(
            f"{path}: its weights are quantised ({method}); give the float checkpoint it came from"
        )
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # check_fit tells which
                output_loading_info=True,
            )
    except Exception as error:  # a strange configuration ends in whatever its code runs into
        raise ModelError(f"{path}: cannot be loaded: {summary(error)}") from error
    check_fit(path, info)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # no such device, or no room on it
        raise ModelError(f"{path}: does not go to device {device!r}: {summary(error)}") from error
    return model.eval().requires_grad_(False)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `path`, with its chat template if it has one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception on a file it cannot parse
        raise ModelError(f"{path}: has no tokenizer that loads: {summary(error)}") from error


def check_fit(source: Path, info: Mapping[str, Any]) -> None:
    """Raise `ModelError` where transformers warns and goes on with random numbers.

    info: its `output_loading_info`.
    """
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{source}: lacks {len(missing)} tensors that its configuration asks for, "
            f"first {missing[0]}"
        )
    if wrong := sorted(info["mismatched_keys"]):
        name, held, asked = wrong[0]
        raise ModelError(
            f"{source}: {len(wrong)} tensors do not fit its configuration, first {name}: "
            f"{list(held)} instead of {list(asked)}"
        )


def summary(error: Exception) -> str:
    """The type and first line of an error that another library raised, at most 200 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars: ours are the lines of `progress`."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _weight_files(directory: Path) -> list[Path]:
    """The files transformers will read, in its order of preference."""
    if (directory / _WEIGHTS).is_file():
        return [directory / _WEIGHTS]
    index = directory / _INDEX
    if not index.is_file():
        others = sorted(
            p.name for p in directory.glob("*.*") if p.suffix in (".bin", ".pt", ".gguf")
        )
        held = f" (it holds {', '.join(others[:3])})" if others else ""
        raise ModelError(f"{directory}: has no weights: neither {_WEIGHTS} nor {_INDEX}{held}")
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index}: has no weight_map")
    files = [directory / name for name in sorted(set(shards.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{directory}: lacks {len(absent)} of {len(files)} weight files, first {absent[0]}"
        )
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not even text
        raise ModelError(f"{file}: is not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ModelError(f"{file}: is not a JSON object")
    return facts
