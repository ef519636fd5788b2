"""Where the KV pool's memory comes from, and when."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path

import pytest

from dspark.models.targets.native import NativeBackend, NativeOptions

from ..tiny import tiny_model


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def linux() -> tuple[int, ...]:
    return tuple(map(int, platform.release().split("-")[0].split(".")[:2]))


@pytest.mark.skipif(
    sys.platform != "linux" or linux() < (5, 14),
    reason="MADV_POPULATE_WRITE is Linux's, since 5.14; elsewhere memory comes as it is written",
)
def test_the_pool_is_there_before_a_step_writes_to_it() -> None:
    """A step that wrote to new pages would wait for them."""
    backend = NativeBackend(tiny_model("llama"), 16, NativeOptions(threads=2))
    backend.allocate(1)
    a_block = backend.kv_bytes
    blocks = 64 * 2**20 // a_block
    before = resident()
    backend.allocate(blocks)
    assert backend.kv_bytes == blocks * a_block
    assert resident() - before >= 0.95 * backend.kv_bytes
    backend.allocate(1)
    assert resident() - before <= 0.05 * blocks * a_block, "and goes back"
