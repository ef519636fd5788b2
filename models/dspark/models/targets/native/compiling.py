"""The kernels' source becomes a shared library. Standard library only: the package build runs it.

One body of kernels is compiled once for each instruction set, and the processor picks at run time;
nothing here is built for the machine that builds it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "csrc"
LIBRARY = "libdspark_native.so"

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
# Name of a kernel set -> flags, by machine, the best first. The last one must compile; of the
# others those that the compiler knows are taken.
_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512vnni": (*_AVX2, *_AVX512, "-mprefer-vector-width=512"),
        "avxvnni": (*_AVX2, "-mavxvnni"),
        "avx2": _AVX2,
        "portable": (),
    },
    "aarch64": {"portable": ()},
}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_STEMS = ("api", "step", "phases", "draft", "draft_heads", "pack", "weights", "pool", "limits")
_SECONDS = 300  # of one compilation, on a busy machine


class CannotCompile(Exception):
    """No compiler, or it failed: the reason in one line."""


def machine() -> str:
    """The processor's family as the tables here name it."""
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


def source_hash() -> str:
    """Of the source and the flags: equal for libraries that compute the same."""
    digest = hashlib.blake2b(repr((_FLAGS, _SETS)).encode(), digest_size=8)
    for file in sorted(SOURCE.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def find_compiler() -> str | None:
    """$CXX, else the first C++ compiler on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compiler_version(compiler: str) -> str:
    """Its first line about itself. Raises `CannotCompile`."""
    return _run([compiler, "--version"]).splitlines()[0]


def compile_library(target: Path, compiler: str) -> None:
    """Make the library at `target`, whole or not at all. Raises `CannotCompile`."""
    sets = _SETS.get(machine())
    if sets is None:
        raise CannotCompile(f"no kernels for the processor family {machine()}")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as threads:
        room = Path(name)
        jobs = {
            one: threads.submit(_object, compiler, "kernels", room / f"{one}.o", flags, one)
            for one, flags in sets.items()
        }
        objects, last = [], list(sets)[-1]
        for one, job in jobs.items():
            try:
                objects.append((one, job.result()))
            except CannotCompile:
                if one == last:
                    raise
        have = [f"-DDN_HAVE_{one}" for one, _ in objects]
        have.append(f'-DDN_SOURCE="{source_hash()}"')
        rest = [
            threads.submit(_object, compiler, stem, room / f"{stem}.o", have) for stem in _STEMS
        ]
        files = [str(file) for _, file in objects] + [str(job.result()) for job in rest]
        made = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _run([compiler, "-shared", "-pthread", *files, "-o", str(made)])
            made.replace(target)
        finally:
            made.unlink(missing_ok=True)


def _object(
    compiler: str, stem: str, out: Path, flags: tuple[str, ...] | list[str], name: str = ""
) -> Path:
    define = [f"-DDN_SET={name}"] if name else []
    source = str(SOURCE / f"{stem}.cpp")
    _run([compiler, *_FLAGS, *flags, *define, "-pthread", "-c", source, "-o", str(out)])
    return out


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} does not run: {error}"[:200]) from error
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        told = next((line for line in lines if "error" in line), lines[-1])
        raise CannotCompile(f"{Path(command[0]).name} failed: {told}"[:200])
    return done.stdout
