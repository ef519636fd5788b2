"""What does not fit is told in one line, and what computes something else never serves."""

from __future__ import annotations

import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from dspark.core.errors import ModelError
from dspark.models.targets.native import (
    NativeBackend,
    NativeOptions,
    NativeUnavailable,
    Shelf,
    open_native,
)
from dspark.models.targets.native.compiling import LIBRARY
from dspark.models.targets.native.library import best_set, cached_library, open_library
from dspark.models.targets.native.opening import self_check

from ..tiny import tiny_model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_sound_backends_pass_their_check(family: str, precision: str) -> None:
    backend = open_native(tiny_model(family), 4, NativeOptions(precision, threads=1))
    assert backend.name.startswith(f"native-{precision}-")
    assert backend.kv_bytes == 0


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("changed", ["layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "norm"])
def test_a_backend_that_computes_something_else_does_not_serve(
    precision: str, changed: str, shared: bool, tmp_path: Path
) -> None:
    options = NativeOptions(precision, threads=1, shelf=Shelf(tmp_path) if shared else None)
    backend = NativeBackend(tiny_model("llama"), 16, options)
    assert backend.shares_weights is shared
    other = tiny_model("llama")
    other.base_model.get_submodule(changed).weight.data.neg_()
    with pytest.raises(ModelError, match="self-check"):
        self_check(backend, other, precision)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("layers.1.mlp.down_proj", "layer 1, down"),
        ("layers.2.input_layernorm", "layer 2, attention_norm"),
        ("norm", "norm"),
    ],
)
def test_weights_that_are_not_finite_are_refused(bad: float, where: str, named: str) -> None:
    model = tiny_model("llama")
    model.base_model.get_submodule(where).weight.data.flatten()[3] = bad
    with pytest.raises(ModelError, match=f"{named}: the weights hold a number that is not finite"):
        NativeBackend(model)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gemma2", {}, "model type 'gemma2'"),
        ("llama", {"head_dim": 24}, "head_dim 24"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_models_that_do_not_fit(family: str, changes: dict[str, object], named: str) -> None:
    with pytest.raises(NativeUnavailable, match=named):
        NativeBackend(tiny_model(family, **changes))


def test_a_precision_that_is_not_float32() -> None:
    with pytest.raises(NativeUnavailable, match="bfloat16"):
        NativeBackend(tiny_model("llama", torch.bfloat16))


def test_a_processor_without_avx2() -> None:
    assert best_set(["avx2", "portable"], "x86_64") == "avx2"
    assert best_set(["portable"], "aarch64") == "portable"
    with pytest.raises(NativeUnavailable, match="no AVX2"):
        best_set(["portable"], "x86_64")


def test_a_set_that_does_not_run_here() -> None:
    with pytest.raises(NativeUnavailable, match="runs none of those"):
        NativeBackend(tiny_model("llama"), options=NativeOptions(kernels="sse9"))


# --- The compiler, played by scripts


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


VERSION = '[ "$1" = --version ] && { echo "toy 1.0"; exit; }\n'
# Writes its arguments where -o says.
TOY = VERSION + 'all="$*"; while [ "$1" != -o ]; do shift; done; echo "$all" > "$2"'


def test_it_is_compiled_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", TOY))
    lines: list[str] = []
    file = cached_library(lines.append, tmp_path / "cache")
    assert "march" not in file.read_text()
    assert cached_library(lines.append, tmp_path / "cache") == file
    assert lines == ["compiling the native kernels with toy 1.0 (once)"]
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    # Another compiler, another library.
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", TOY.replace("1.0", "2.0")))
    assert cached_library(lines.append, tmp_path / "cache") != file


def test_a_set_that_the_compiler_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = VERSION + 'case "$*" in *-mavxvnni*|*-mavx512*) echo "error: unknown"; exit 1;; esac\n'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", old + TOY))
    assert "avxvnni" not in cached_library(print, tmp_path / "cache").read_text()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (VERSION + 'echo "x.cpp:1: error: no"; exit 1', "error: no"),
        ("exit 3", "exit status 3"),
        (VERSION + "kill -SEGV $$", "failed"),
    ],
)
def test_a_compiler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", body))
    with pytest.raises(NativeUnavailable, match=told) as raised:
        cached_library(print, tmp_path / "cache")
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        cached_library(print, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", TOY))
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match="cache cannot be written"):
        cached_library(print, tmp_path / "file" / "cache")


def test_a_library_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", TOY))
    with pytest.raises(NativeUnavailable, match="is no library of ours"):
        open_library(cached_library(print, tmp_path / "cache"))


def test_a_wheel_is_built_with_the_library_or_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a compiler that works it is one for this platform, by one that fails for any."""
    repository = Path(__file__).resolve().parents[3]
    found = []
    for body in (TOY, "exit 3"):
        monkeypatch.setenv("CXX", script(tmp_path / "cxx", body))
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            tmp_path / body[:4],
        ]
        subprocess.run(command, cwd=repository, check=True, capture_output=True)
        (wheel,) = (tmp_path / body[:4]).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [Path(name).name for name in archive.namelist()]
        found.append((wheel.stem.endswith("-py3-none-any"), LIBRARY in names))
        assert "kernels.cpp" in names
    assert found == [(False, True), (True, False)]
