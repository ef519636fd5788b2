"""Pools whose size nobody tells: by load, and by the nodes that offer a resource. Minutes on a real
Ray, whose cool-downs are seconds: `pytest -m slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..cli.conftest import make_checkpoint
from ..deploy.processes import ENGINE, tiny_cluster, until
from .running import Streams, upped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_by_load_and_by_node(tmp_path: Path) -> None:
    autoscale = {"min": 1, "max": 2, "target": 0.1, "up_s": 0.5, "down_s": 2.0}
    # One verifier has room for all of them: who comes while it is full is refused at once.
    engine = {**ENGINE, "verify": "fixed:1", "kv_tokens": 32_768}
    config = tiny_cluster(
        make_checkpoint(tmp_path / "tiny"),
        verifier={"replicas": None, "autoscale": autoscale, "engine": engine},
        drafter={"replicas": "per-node", "resources": {"custom": {"drafter": 1.0}}},
    )
    with upped(tmp_path / "up", config) as up:
        up.says("READY", "out")
        assert "nothing to change" in up.run("up", "-f", up.file)
        assert len(up.ready("drafter")) == 1  # this machine is one node
        pools = up.state()["pools"]
        assert (pools["verifier"]["size"], pools["drafter"]["size"]) == ("autoscaled", "per-node")
        assert "is autoscaled" in up.run("scale", "verifier", 2, status=2)
        load = Streams(up.grpc, tuple(f"cat {n}" for n in range(8)), 3000).begin()
        until(lambda: len(up.ready("verifier")) == 2)
        ids = load.end()
        assert {len(answer) for answer in ids.values()} == {3000}
        until(lambda: len(up.ready("verifier")) == 1 == len(up.replicas("verifier")))
        up.run("down")
        up.nothing_is_left()
