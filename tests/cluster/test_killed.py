"""Whoever of a local cluster is killed, and however early: nothing is left of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..cli.conftest import make_checkpoint
from ..deploy.processes import tiny_cluster, until
from .running import Up, upped

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Ray runs, Serve begins."""
    config = tiny_cluster(make_checkpoint(tmp_path / "tiny"))
    with upped(tmp_path / "up", config) as up:
        up.says("starting Serve")
        yield up


def test_up_is_killed(up: Up) -> None:
    assert up.process is not None
    assert len(up.left()) > 5
    up.process.kill()
    assert up.ended() == -signal.SIGKILL
    until(lambda: not up.left(), lambda: f"left: {up.left()}")
    # Its file stays, for nobody was left to remove it, and is known for what it is.
    assert "no cluster runs on this machine" in up.run("status", status=1)
    up.nothing_is_left()


def test_its_keeper_is_killed(up: Up) -> None:
    (keeper,) = (pid for pid, words in up.left().items() if "dspark.deploy.ray.keeper" in words)
    up.kill(keeper)
    assert up.ended() == 1
    assert "keeper was ended by SIGKILL" in up.err
    up.nothing_is_left()


@pytest.mark.slow
def test_up_is_told_to_stop_while_it_starts(up: Up) -> None:
    assert up.process is not None
    up.process.terminate()
    assert up.ended() == 0
    up.nothing_is_left()
