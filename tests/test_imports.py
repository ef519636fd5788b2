"""Who may import whom (design.md §3), read from the source: nothing here is imported to be judged.

Each rule is also tried on a line that breaks it, so that a rule that sleeps is noticed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ROOTS = ("core", "models", "scheduler", "services", "client", "training", "cli")

SERVICES = {"verifier", "drafter", "gateway", "scheduling", "serving", "telemetry", "deploy"}
# Part of dspark -> other parts that its modules may import. Wire types (v1) have their own rule.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "models": {"core"},
    "scheduler": {"core"},
    "client": {"core"},
    **{part: {"core", "models", "scheduler", "client"} | SERVICES for part in SERVICES},
    "training": {"core", "models", "scheduler", "verifier"},
    "cli": {"core", "models", "scheduler", "client", "training"} | SERVICES,
}
# Whose servicer and client modules speak gRPC.
SPEAKS_GRPC = {"scheduler", "client"} | SERVICES
# Seconds of import time each, or a cluster: the command line answers --help without them.
HEAVY = {"torch", "transformers", "ray", "accelerate", "safetensors", "gguf", "flashinfer", "scipy"}
# What `core` would need for I/O.
IO = {"asyncio", "http", "multiprocessing", "select", "socket", "ssl", "subprocess", "urllib"}


@dataclass(frozen=True)
class Import:
    """One imported module of a source file. late: inside a function, or for type checkers only."""

    name: str
    line: int
    late: bool

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    @property
    def part(self) -> str | None:
        """The part of dspark it belongs to, if it is ours."""
        words = self.name.split(".")
        return words[1] if words[0] == "dspark" and len(words) > 1 else None


def imports(module: str, is_package: bool, source: str) -> Iterator[Import]:
    """Every import of a module, also those by importlib with a literal name.

    `from a import b` counts as `a.b`, since b may be a module.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, late)
            case ast.ImportFrom(module=origin, names=names, level=level):
                near = package[: len(package) - level + 1] if level else []
                stem = ".".join([*near, *([origin] if origin else [])])
                for alias in names:
                    yield Import(f"{stem}.{alias.name}", node.lineno, late)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, node.lineno, late)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for statement in node.body:
                    yield from visit(statement, True)
                for statement in node.orelse:
                    yield from visit(statement, late)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                late = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late)

    yield from visit(ast.parse(source), False)


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What `source` as module `dspark.<part>...` may not import, one sentence each."""
    part = module.split(".")[1]
    name = module.split(".")[-1]
    at_the_edge = part in SPEAKS_GRPC and ("servicer" in name or "client" in name)
    found = []
    for imported in imports(module, is_package, source):
        why = None
        if imported.part == "v1" or imported.name.endswith(("_pb2", "_pb2_grpc")):
            if not at_the_edge:
                why = "wire types belong in servicer and client modules"
        elif imported.part not in {None, part} | MAY_IMPORT[part]:
            why = f"{part} may import only {sorted(MAY_IMPORT[part])} of ours"
        elif imported.name == "dspark":
            why = "dspark is a namespace: name the part"
        elif imported.top == "ray" and part not in {"deploy", "training"}:
            why = "Ray only in deploy and training"
        elif part == "core" and imported.top not in sys.stdlib_module_names - IO | {
            "numpy",
            "dspark",
        }:
            why = "core is plain data: the standard library without I/O, and numpy"
        elif part == "client" and imported.top in HEAVY:
            why = "the client installs without torch and ray"
        elif part == "cli" and not imported.late:
            if imported.top in HEAVY:
                why = f"{imported.top} is slow to import: import it where it is used"
            elif imported.part not in {None, "cli", "core", "client"}:
                why = "parts of the server are imported where they are used"
        if why:
            found.append(f"{module}:{imported.line}: {imported.name}: {why}")
    return found


def modules(*roots: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, path) of every module under the namespace roots."""
    for root in roots:
        for path in sorted((REPO / root / "dspark").rglob("*.py")):
            words = path.relative_to(REPO / root).with_suffix("").parts
            yield ".".join(words[:-1] if words[-1] == "__init__" else words), path


def test_imports_follow_the_design() -> None:
    seen = list(modules(*ROOTS))
    assert {"core", "models"} <= {name.split(".")[1] for name, _ in seen} <= set(MAY_IMPORT)
    found = [
        complaint
        for name, path in seen
        for complaint in violations(
            name, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py"
        )
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.requests", "import dspark.models.targets"),
        ("core.requests", "from dspark import models"),
        ("core.requests", "from ..models import targets"),
        ("core.requests", "import torch"),
        ("core.requests", "def f():\n    import torch"),
        ("core.requests", "import socket"),
        ("core.client", "from dspark.v1 import drafting_pb2"),
        ("models.drafters.ngram", "from dspark.scheduler import planner"),
        ("models.drafters.ngram", "from dspark.verifier.engine import Engine"),
        ("models.client", "from dspark.v1 import drafting_pb2"),
        ("scheduler.planner", "import dspark.models"),
        ("scheduler.planner", "from dspark.v1 import scheduling_pb2"),
        ("client.sync", "from dspark.v1.generation_pb2 import GenerateRequest"),
        ("client.sync", "import importlib\nimportlib.import_module('torch')"),
        ("verifier.engine", "from dspark.v1 import verification_pb2"),
        ("verifier.engine", "from dspark.training import data"),
        ("verifier.engine", "if True:\n    import ray"),
        ("gateway.http", "from dspark.cli import main"),
        ("deploy.pools", "from dspark.v1 import scheduling_pb2"),
        ("training.trainer", "from dspark.gateway import http"),
        ("cli.main", "import torch"),
        ("cli.main", "try:\n    import transformers\nexcept ImportError:\n    pass"),
        ("cli.main", "from dspark.verifier.engine import Engine"),
        ("cli.main", "def f():\n    import ray"),
        ("cli.main", "import dspark"),
    ],
)
def test_each_rule_bites(module: str, source: str) -> None:
    assert len(violations(f"dspark.{module}", source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.requests", "import numpy as np\nfrom dspark.core.errors import DsparkError"),
        ("models.drafters.ngram", "import torch\nfrom dspark.core import drafts"),
        ("verifier.servicer", "from dspark.v1 import verification_pb2, verification_pb2_grpc"),
        ("gateway.verifier_client", "from dspark.v1 import verification_pb2"),
        ("gateway.runs", "from .verifier_client import VerifierClient"),
        ("deploy.pools", "from ray import serve\nfrom dspark.verifier.engine import Engine"),
        ("training.trainer", "import ray\nfrom dspark.verifier.engine import Engine"),
        ("cli.main", "import typer\nfrom dspark.core import config"),
        ("cli.main", "def f():\n    import torch\n    from dspark.verifier.engine import Engine"),
        (
            "cli.main",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        ),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(f"dspark.{module}", source) == []


def test_namespace_folders_stay_namespaces() -> None:
    assert [str(path) for path in REPO.glob("*/dspark/__init__.py")] == []


@pytest.mark.parametrize("root", ["core", "client", "cli"])
def test_importing_it_pulls_in_nothing_heavy(root: str) -> None:
    """In a fresh process, every module of the root is imported and sys.modules looked at."""
    names = [name for name, path in modules(root) if path.name != "__main__.py"]
    if root == "core":
        assert names, "the scan finds no module"
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    roots = [str(REPO / name) for name in ("protos", *ROOTS)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {roots!r}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_wheel_holds_dspark_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=REPO,
        env={**os.environ, "DSPARK_NATIVE_BUILD": "0"},
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dspark"}
    assert len(tops) == 2
    missing = {
        f"{name.replace('.', '/')}{'/__init__' if path.name == '__init__.py' else ''}.py"
        for name, path in modules("protos", *ROOTS)
    } - set(names)
    assert missing == set()
