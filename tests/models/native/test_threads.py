"""Threads: as many as the process may use, and none that works while nothing is to do."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.native import NativeBackend, NativeOptions
from dspark.models.targets.native.compiling import SOURCE, find_compiler
from dspark.models.targets.native.threads import cpu_quota, usable_threads

from ..tiny import tiny_model


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/a", {"a/cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "300000 100000"}, 3.0),
        (
            "3:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        (
            "3:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("3:memory:/a", {"cpu/a/cpu.cfs_quota_us": "1"}, None),
    ],
)
def test_quota_of_control_groups(
    tmp_path: Path, group: str, files: dict[str, str], quota: float | None
) -> None:
    for name, content in {"proc/self/cgroup": group + "\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content)
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    assert cpu_quota(tmp_path) == quota
    assert usable_threads(7, tmp_path) == 7
    if quota == 0.5:
        assert usable_threads(0, tmp_path) == 1


def batch() -> RaggedBatch:
    ids = np.arange(40, dtype=np.int32)
    return RaggedBatch(
        token_ids=ids,
        positions=ids,
        query_start=np.array([0, 40], np.int32),
        context_len=np.zeros(1, np.int32),
        block_table=np.arange(3, dtype=np.int32)[None],
        logit_rows=ids,
        feature_rows=np.empty(0, np.int32),
    )


def test_idle_threads_use_no_processor_time() -> None:
    backend = NativeBackend(tiny_model("llama"), 16, NativeOptions(threads=4))
    backend.allocate(3)
    backend.forward(batch())
    time.sleep(0.05)  # they stay awake for a while in case that the next step comes
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_more_teams_than_processors_do_not_stall_each_other() -> None:
    """Four backends of four threads each, at once: the processor time of a step stays of the order
    of one alone. Teams that spin for each other take tens of times as much."""
    backends = [NativeBackend(tiny_model("llama"), 16, NativeOptions(threads=4)) for _ in range(4)]
    for backend in backends:
        backend.allocate(3)
    truth = backends[0].forward(batch()).logits.clone()

    def run(backend: NativeBackend) -> None:
        for _ in range(50):
            logits = backend.forward(batch()).logits
        assert torch.equal(logits, truth)

    def processor_time(some: list[NativeBackend]) -> float:
        before = time.process_time()
        threads = [threading.Thread(target=run, args=(backend,)) for backend in some]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.process_time() - before) / len(some)

    alone = processor_time(backends[:1])
    assert processor_time(backends) < 10 * alone + 1.0


def test_numbers_outside_the_pool_are_refused() -> None:
    backend = NativeBackend(tiny_model("llama"), 16, NativeOptions(threads=1))
    backend.allocate(2)
    with pytest.raises(RuntimeError, match="block: 2, the limit is 1"):
        backend.forward(batch())
    with pytest.raises(IndexError):
        backend.copy(0, 2)


def test_the_pool_has_no_race(tmp_path: Path) -> None:
    """Under the compiler's thread sanitizer, where it has one."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "pool_check"
    command = [compiler, "-std=c++17", "-O1", "-fsanitize=thread", "-pthread", f"-I{SOURCE}"]
    files = [Path(__file__).parent / "pool_check.cpp", SOURCE / "pool.cpp"]
    made = subprocess.run([*command, *files, "-o", program], capture_output=True, text=True)
    if made.returncode and "tsan" in made.stderr:
        pytest.skip("needs a compiler with libtsan")
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr
