"""The Lua scripts as they are sent: each file of scripts/ with what it leans on in front.

A script's header names its keys; they are passed in that order and stand in the script as `K.name`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from dspark.scheduler.store.names import KEEP_MS, KEYS, MAX_TTL_MS, SWEEP

_PRELUDE = "prelude.lua"


@dataclass(frozen=True, slots=True)
class Script:
    """keys: names of KEYS, in order. sha: of `source`, by which a server knows it."""

    name: str
    keys: tuple[str, ...]
    source: str
    sha: str


def keys_of(text: str) -> tuple[str, ...]:
    """From the header: lines `--   name  type  what it holds` between `-- keys` and
    `-- arguments`; what goes on from the line before is indented deeper."""
    header = text.partition("\n-- keys\n")[2].partition("-- arguments\n")[0]
    return tuple(re.findall(r"^--   (\w+) +(?:hash|zset)\b", header, re.MULTILINE))


def load(sweep: int = SWEEP) -> Mapping[str, Script]:
    """All scripts by name. sweep: names.SWEEP, unless a test wants less."""
    folder = files("dspark.scheduler.store") / "scripts"
    prelude = (folder / _PRELUDE).read_text(encoding="utf-8")
    bounds = f"local MAX_TTL, KEEP, SWEEP = {MAX_TTL_MS}, {KEEP_MS}, {sweep}\n"
    scripts = {}
    for file in folder.iterdir():
        if not file.name.endswith(".lua") or file.name == _PRELUDE:
            continue
        text = file.read_text(encoding="utf-8")
        keys = keys_of(text)
        assert keys, f"{file.name}: its header names no key"
        assert set(keys) <= set(KEYS), f"{file.name}: its header names the keys {keys}"
        table = ", ".join(f"{key} = KEYS[{i}]" for i, key in enumerate(keys, 1))
        source = f"local K = {{{table}}}\n{bounds}{prelude}\n{text}"
        name = file.name.removesuffix(".lua")
        scripts[name] = Script(name, keys, source, hashlib.sha1(source.encode()).hexdigest())
    return scripts
