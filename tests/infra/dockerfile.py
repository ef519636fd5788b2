"""A Dockerfile taken apart: enough for ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def stages(file: Path) -> list[str]:
    """Each from its FROM on, without comments, lines joined where they go on."""
    text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", " ", text)
    return [f"FROM {part.strip()}" for part in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]]


def instructions(stage: str) -> Iterator[tuple[str, str]]:
    """(name, the rest) of each."""
    for line in stage.splitlines():
        name, _, rest = line.partition(" ")
        if rest:
            yield name, re.sub(r"\s+", " ", rest).strip()


def environment(stage: str) -> dict[str, str]:
    """What ENV sets."""
    found: dict[str, str] = {}
    for name, rest in instructions(stage):
        if name == "ENV":
            found.update(re.findall(r"(\w+)=(\S+)", rest))
    return found
