"""A GGUF file becomes a float32 checkpoint that loads in a second instead of twenty.

Only architectures are taken whose round trip through a GGUF file is tested to give equal logits.
transformers' reader knows more, but fills what it does not read with defaults: a gemma3 comes back
with other logits (0.07 on a tiny one), a gemma2 with the attention scale of another size.
"""

from __future__ import annotations

from pathlib import Path

from dspark.core.errors import ModelError
from dspark.models.cache import Progress, megabytes
from dspark.models.checkpoint import check_fit, quiet, summary

CONVERTIBLE = ("llama", "qwen2", "qwen3")

_MAGIC = b"GGUF"
# Beside the weights: tokenizer, configuration, what the file system adds.
_OVERHEAD_BYTES = 32_000_000


def converted_bytes(parameters: int) -> int:
    """Disk that the float32 checkpoint of so many parameters takes, at most."""
    return 4 * parameters + _OVERHEAD_BYTES


def count_parameters(file: Path) -> int:
    """The number of weights in a GGUF file, from its header (seconds: a vocabulary parses slowly).

    Raises `ModelError` for a file that is no GGUF, is cut short, or would not convert faithfully.
    """
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        raise ModelError(
            f"{file}: is not a GGUF file (it starts with {magic!r}); give a GGUF file, or the "
            f"directory that holds config.json and model.safetensors"
        )
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        architecture = str(reader.fields["general.architecture"].contents())
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # the reader raises whatever its arithmetic on bad bytes ends in
        raise ModelError(
            f"{file}: is damaged or cut short ({summary(error)}); fetch it again"
        ) from error
    if architecture not in CONVERTIBLE:
        raise ModelError(
            f"{file}: GGUF architecture {architecture!r} cannot be converted faithfully (only "
            f"{', '.join(CONVERTIBLE)}); give the model's safetensors directory"
        )
    names = (*reader.fields, *(tensor.name for tensor in reader.tensors))
    if scaled := next(
        (n for n in names if ".rope.scaling." in n or n == "rope_freqs.weight"), None
    ):
        raise ModelError(
            f"{file}: scales its rotary positions ({scaled}), which transformers' GGUF reader "
            f"drops; give the model's safetensors directory"
        )
    return parameters


def convert(file: Path, out: Path, parameters: int, progress: Progress) -> Path:
    """Write `file` to the directory `out` as float32 safetensors with configuration and tokenizer.

    parameters: how many weights the file holds, so that none is left out unseen.

    Raises `ModelError` for a file that transformers cannot read whole, OSError and SafetensorError
    when `out` cannot be written.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress(f"{file.name}: converting to float32 safetensors, once")
    source = {"gguf_file": file.name, "local_files_only": True}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(file.parent, **source)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, config=config, **source)
            model, info = AutoModelForCausalLM.from_pretrained(
                file.parent,
                config=config,
                dtype=torch.float32,
                # Else a machine that has the kernels keeps the weights packed, and unsavable.
                quantization_config=GgufConfig(dequantize=True),
                ignore_mismatched_sizes=True,  # check_fit tells which
                output_loading_info=True,
                **source,
            )
    except Exception as error:  # as above: a parser on bytes from anywhere
        raise ModelError(f"{file}: transformers cannot read it: {summary(error)}") from error
    check_fit(file, info)
    if model.num_parameters() != parameters:
        raise ModelError(
            f"{file}: holds {parameters} weights, of which transformers' GGUF reader places "
            f"{model.num_parameters()}; give the model's safetensors directory"
        )
    with quiet():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    progress(f"{file.name}: wrote {megabytes(4 * model.num_parameters())}")
    return out
