"""Where commands find a cluster, and how they know that it has gone."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from dspark.cli.main import main
from dspark.core.errors import ConfigError, NotFound
from dspark.deploy.ray.cluster_file import ClusterFile, Running, find_cluster, running_clusters


def running(name: str) -> Running:
    return Running(name, os.getpid(), "/nowhere/control.sock", "0")


def held(name: str, folder: Path) -> int:
    file = ClusterFile(name, folder)
    lock = file.hold()
    assert lock is not None
    file.write(running(name))
    return lock


def test_a_name_is_for_one(tmp_path: Path) -> None:
    lock = held("one", tmp_path)
    assert ClusterFile("one", tmp_path).hold() is None
    assert find_cluster(folder=tmp_path) == running("one")
    os.close(lock)
    again = ClusterFile("one", tmp_path).hold()
    assert again is not None
    os.close(again)


def test_down_does_not_wait_for_a_drain_beyond_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keeper answers when it has drained, and until then only says what it does."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    file = ClusterFile("one")
    lock = file.hold()
    assert lock is not None
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(str(tmp_path / "s"))
        keeper.listen()
        file.write(Running("one", 7, str(tmp_path / "s"), "0"))

        def drain() -> None:
            link, _ = keeper.accept()
            with link:
                link.sendall(b'{"said": "draining"}\n')
                while link.recv(4096):
                    pass

        thread = threading.Thread(target=drain)
        thread.start()
        assert main(["down", "--wait", "0.5"]) == 1
        thread.join()
    assert "one is not down after 0.5 s: process 7; --force ends it" in capsys.readouterr().err
    os.close(lock)


def test_a_file_left_behind_is_known_and_removed(tmp_path: Path) -> None:
    os.close(held("one", tmp_path))
    with pytest.raises(NotFound, match="'one'"):
        find_cluster("one", tmp_path)
    assert not (tmp_path / "one.json").exists()


def test_of_several_one_has_to_be_named(tmp_path: Path) -> None:
    locks = [held(name, tmp_path) for name in ("one", "two")]
    with pytest.raises(ConfigError, match="one, two"):
        find_cluster(folder=tmp_path)
    assert find_cluster("two", tmp_path).name == "two"
    assert [found.name for found in running_clusters(tmp_path)] == ["one", "two"]
    for lock in locks:
        os.close(lock)
    with pytest.raises(NotFound, match="dspark up"):
        find_cluster(folder=tmp_path)


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "clusters"
    os.close(held("one", folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "one.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a" * 64, ".hidden"])
def test_a_name_that_is_no_file_name(name: str) -> None:
    with pytest.raises(ConfigError, match="name: "):
        ClusterFile(name)
