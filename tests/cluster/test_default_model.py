"""The default model under 20 live streams while its pools are resized and it comes and goes:
`pytest -m slow`, minutes on two cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dspark.models.cache import default_cache

from ..deploy.processes import free_ports
from .running import Streams, Up, upped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STREAMS, TOKENS = 20, 120


def test_twenty_streams_outlive_every_resize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was fetched and measured once serves here too.
    (tmp_path / "cache").mkdir()
    for name in ("models", "native", "step-cost"):
        if (default_cache() / name).exists():
            os.symlink(default_cache() / name, tmp_path / "cache" / name)
    http, grpc, scheduler = free_ports(3)
    config = {
        "name": "tests",
        "backend": "native",
        "gateway": {"http_port": http, "grpc_port": grpc},
        "scheduler": {"port": scheduler},
        "verifier": {"threads": 1, "engine": {"kv_tokens": 16_384}},
        "drain_s": 1.0,
    }
    with upped(tmp_path, config) as up:
        up.says("READY", "out")
        running = streams(up)
        for pool in ("drafter", "verifier"):
            up.run("scale", pool, 2)
        more = streams(up)
        for pool in ("verifier", "drafter"):
            up.run("scale", pool, 1)
        first, second = running.end(), more.end()
        assert [len(ids) for ids in first.values()] == [TOKENS] * STREAMS
        assert first == second, "native rows do not depend on their batch, nor on who drafts"
        up.run("down")
        up.nothing_is_left()


def streams(up: Up) -> Streams:
    prompts = tuple(f"Tell me a story about {n} cats and a dog." for n in range(STREAMS))
    return Streams(up.grpc, prompts, TOKENS).begin()
