"""Packed weights in files: whole or not taken, one copy for all processes, never a wrong number."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import re
import resource
import subprocess
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from dspark.core.errors import ModelError
from dspark.models.targets.native import NativeBackend, NativeOptions, Shelf, open_native
from dspark.models.targets.native.weights import shared_weights

from ..tiny import text, tiny_model
from .walks import one_by_one, projection

# --- Files


def total(at: int, size: int) -> int:
    return zlib.crc32((ctypes.c_char * size).from_address(at).raw)


class Maker:
    """What a process would pack, and how often and why it did."""

    def __init__(self, shelf: Shelf, content: bytes = b"weights" * 3000) -> None:
        self.shelf = shelf
        self.content = content
        self.packed = 0
        self.lines: list[str] = []

    def open(self, name: str = "source-int8", on_line: Callable[[str], None] = print) -> bool:
        """Whether it is shared; then what is in the file was checked."""
        file = self.hold(name, on_line)
        if file is None:
            return False
        with file:
            assert file.read(len(self.content)) == self.content
        return True

    def hold(self, name: str, on_line: Callable[[str], None] = print) -> BinaryIO | None:
        """As a process that uses it."""

        def pack() -> Sequence[memoryview]:
            self.packed += 1
            half = len(self.content) // 2
            return memoryview(self.content[:half]), memoryview(self.content[half:])

        def progress(line: str) -> None:
            self.lines.append(line)
            on_line(line)

        return shared_weights(self.shelf, name, pack, total, progress)

    @property
    def files(self) -> list[str]:
        return sorted(
            one.name for one in self.shelf.directory.iterdir() if not one.name.startswith(".lock")
        )


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(Shelf(tmp_path / "shelf", wait_s=0.05))


def test_it_is_packed_once_and_found_then(maker: Maker) -> None:
    assert maker.open()
    assert maker.open()
    assert Maker(maker.shelf).open()
    assert (maker.packed, maker.lines) == (1, [])
    assert maker.files == ["source-int8.weights"]


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:count]


def flip(at: int) -> Callable[[bytes], bytes]:
    def flipped(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[at] ^= 4
        return bytes(changed)

    return flipped


@pytest.mark.parametrize(
    "damage",
    [cut(0), cut(1), cut(-1), cut(12000), flip(0), flip(20000), *(flip(-i) for i in range(1, 41))],
)
def test_a_damaged_file_is_never_taken_but_made_again(
    maker: Maker, damage: Callable[[bytes], bytes]
) -> None:
    maker.open()
    [file] = maker.shelf.directory.glob("*.weights")
    file.write_bytes(damage(file.read_bytes()))
    assert maker.open()
    assert maker.packed == 2
    assert maker.open()
    assert maker.packed == 2


def test_the_file_of_another_model_is_not_taken_for_it(maker: Maker) -> None:
    other = Maker(maker.shelf, b"other weights" * 99)
    other.open("source-int8-other")
    (maker.shelf.directory / "source-int8-other.weights").rename(
        maker.shelf.directory / "source-int8.weights"
    )
    assert maker.open()
    assert maker.packed == 1


def test_what_a_dead_process_left_is_removed(maker: Maker) -> None:
    maker.shelf.directory.mkdir()
    left = maker.shelf.directory / ".source-int8-dead.weights.partial"
    left.write_bytes(b"half of")
    maker.open()
    assert maker.files == ["source-int8.weights"]


def test_a_place_that_cannot_be_written(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "shelf").touch()
    assert not maker.open()
    assert maker.packed == 1
    assert maker.lines == [
        f"{tmp_path / 'shelf'}: the packed weights are not shared with other processes: File exists"
    ]


def test_a_read_only_place_serves_what_it_holds(maker: Maker) -> None:
    maker.open()
    (maker.shelf.directory / ".lock").unlink()
    (maker.shelf.directory / ".lock").mkdir()  # also stops a superuser
    assert maker.open()
    assert maker.packed == 1
    assert not maker.open("source-int8-other")
    assert maker.packed == 2


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond it fails as on a full disk; where Python runs, without a signal's effect."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_while_it_is_written(maker: Maker) -> None:
    with file_size_limit(10_000):
        assert not maker.open()
    assert maker.packed == 1
    assert maker.files == []
    [line] = maker.lines
    assert line.endswith("not shared with other processes: File too large")
    assert maker.open()


def test_no_more_is_kept_than_the_limit(maker: Maker) -> None:
    """Those that nobody has opened for longest go first, and none that somebody has open."""
    size = len(maker.content) + 100
    maker.shelf = replace(maker.shelf, limit_bytes=3 * size)
    for name in ("source-a", "source-b", "source-c"):
        maker.open(name)
    used = maker.hold("source-b")
    for age, name in enumerate(("source-a", "source-b", "source-c")):
        os.utime(maker.shelf.directory / f"{name}.weights", (age, age))
    maker.open("source-a")  # which makes it the newest
    assert maker.open("source-d")
    assert maker.files == ["source-a.weights", "source-b.weights", "source-d.weights"]
    assert used is not None
    used.close()
    assert maker.open("source-e")
    assert maker.files == ["source-a.weights", "source-d.weights", "source-e.weights"]
    maker.shelf = replace(maker.shelf, limit_bytes=size - 100)
    assert not maker.open("source-f")
    assert "above the limit" in maker.lines[-1]


def test_files_of_another_source_go_unless_they_are_in_use(maker: Maker) -> None:
    assert maker.open("older-a")
    assert maker.open("older-b")
    used = maker.hold("older-b")
    assert maker.open("source-a")
    assert maker.files == ["older-b.weights", "source-a.weights"]
    assert used is not None
    used.close()
    assert maker.open("source-b")
    assert maker.files == ["source-a.weights", "source-b.weights"]


def test_another_process_makes_it_meanwhile(maker: Maker, tmp_path: Path) -> None:
    other = Maker(Shelf(tmp_path / "other"))
    other.open()
    maker.shelf.directory.mkdir()
    lock = (maker.shelf.directory / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def finish(_: str) -> None:
        name = "source-int8.weights"
        (other.shelf.directory / name).rename(maker.shelf.directory / name)
        lock.close()

    assert maker.open(on_line=finish)
    assert maker.packed == 0
    assert maker.lines == [
        f"{maker.shelf.directory}: waiting for another process that packs its weights"
    ]


def test_nobody_waits_for_ever(maker: Maker) -> None:
    maker.shelf.directory.mkdir()
    with (maker.shelf.directory / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not maker.open()
    assert maker.packed == 1
    assert maker.lines[-1].endswith("another process has packed for 0.05 s")


# --- Models


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("kernels", [None, "portable"])
def test_mapped_weights_say_the_same_bits(
    family: str, precision: str, kernels: str | None, tmp_path: Path
) -> None:
    """Packed for itself, just made, and found: by other numbers of threads, from one file."""
    plain = NativeOptions(precision, threads=1, kernels=kernels)
    ways = [plain, *(replace(plain, threads=n, shelf=Shelf(tmp_path)) for n in (1, 3))]
    said = []
    for options in ways:
        backend = NativeBackend(tiny_model(family), 16, options)
        backend.load_projection(projection(backend.shape.width))
        said.append(one_by_one(backend, text(20, 1)))
    for logits, features in said[1:]:
        assert torch.equal(logits, said[0][0])
        assert torch.equal(features, said[0][1])
    assert len(list(tmp_path.glob("*.weights"))) == 1


def test_any_other_number_is_another_file(tmp_path: Path) -> None:
    """The id of a target samples its tensors; what is packed depends on all of them."""
    options = NativeOptions(threads=1, shelf=Shelf(tmp_path))
    first, second = tiny_model("llama"), tiny_model("llama")
    second.base_model.layers[2].mlp.down_proj.weight.data[40, 41] += 0.5
    one, other = (NativeBackend(model, 16, options) for model in (first, second))
    assert one.target_id == other.target_id
    assert len(list(tmp_path.glob("*.weights"))) == 2
    for model in (first, second):
        open_native(model, 16, options)  # checks the numbers against the model
    NativeBackend(first, 16, replace(options, precision="int8"))
    NativeBackend(first, 16, replace(options, kernels="portable"))
    assert len(list(tmp_path.glob("*.weights"))) == 4


def test_weights_that_are_not_finite_make_no_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.base_model.layers[1].mlp.down_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ModelError, match="layer 1, down"):
        NativeBackend(model, options=NativeOptions(shelf=Shelf(tmp_path)))
    assert not list(tmp_path.glob("*.weights*"))


def test_nothing_of_the_model_stays(tmp_path: Path) -> None:
    """Not its memory either, which a view of a tensor would hold."""
    model = tiny_model("llama")
    held = []
    for parameter in model.parameters():
        numbers = parameter.numpy().copy()
        held.append(weakref.ref(numbers))
        parameter.data = torch.from_numpy(numbers)
    del parameter, numbers
    backend = open_native(model, 16, NativeOptions(threads=1, shelf=Shelf(tmp_path)))
    del model
    gc.collect()
    assert not [one for one in held if one() is not None]
    backend.load_projection(projection(backend.shape.width))
    assert one_by_one(backend, text(5, 1))[0].isfinite().all()


OPEN = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from dspark.models.targets.native import NativeOptions, Shelf, open_native

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=False,
)
model = LlamaForCausalLM(config).eval()
backend = open_native(model, 16, NativeOptions(threads=1, shelf=Shelf(Path(sys.argv[1]))))
print("shared" if backend.shares_weights else "private", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(
    not Path("/proc/self/smaps").is_file(), reason="only Linux tells who holds what"
)
def test_two_processes_hold_one_copy(tmp_path: Path) -> None:
    """Both open at once, and one of them packs. Neither has a page of it for itself."""
    command = [sys.executable, "-c", OPEN, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    try:
        for one in processes:
            assert one.stdout is not None
            assert one.stdout.readline() == "shared\n"
        seen = [mapping(one.pid) for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.communicate()
    [file] = tmp_path.glob("*.weights")
    assert file.stat().st_size > 20e6
    for inode, kilobytes in seen:
        assert inode == file.stat().st_ino
        assert kilobytes["Private_Clean"] + kilobytes["Private_Dirty"] == 0
        shared = 1024 * (kilobytes["Shared_Clean"] + kilobytes["Shared_Dirty"])
        assert shared > 0.7 * file.stat().st_size  # of the embedding few rows are read
        assert kilobytes["Pss"] <= 0.51 * kilobytes["Rss"]


def mapping(pid: int) -> tuple[int, dict[str, int]]:
    """The inode of a process's mapped weights, and its sizes in kB."""
    rows = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    [begin] = [i for i, row in enumerate(rows) if row.endswith(".weights")]
    sizes = {}
    for row in rows[begin + 1 :]:
        if not (told := re.fullmatch(r"(\w+): +(\d+) kB", row)):
            break
        sizes[told[1]] = int(told[2])
    return int(rows[begin].split()[4]), sizes
