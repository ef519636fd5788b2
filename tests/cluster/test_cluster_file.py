"""Where commands find a cluster, and how they know that it has gone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

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
