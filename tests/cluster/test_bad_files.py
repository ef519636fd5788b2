"""What `dspark up` and the commands refuse, in one line and before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.cli.main import main
from dspark.deploy.ray.cluster_file import ClusterFile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    for name in ("REDIS_URL", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    assert main(words) == status
    told = capsys.readouterr().err
    assert told.startswith("dspark: ")
    assert told.count("\n") == 1
    return told


def written(directory: Path, config: dict[str, Any]) -> str:
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"verifer": {}}, "verifer: is not a known field"),
        ({"verifier": {"replicas": 1, "autoscale": {"max": 2}}}, "exactly one of them"),
        ({"verifier": {"resources": {"gpus": -1.0}}}, "verifier.resources.gpus"),
        ({"gateway": {"http_port": 12_000}}, "10000 to 19999"),
        ({"name": "a b"}, "name: "),
    ],
)
def test_a_file_that_cannot_be(
    config: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, "up", "-f", written(tmp_path, config))


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.yaml" in refused(capsys, "up", "-f", str(tmp_path / "none.yaml"))


def test_a_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = written(tmp_path, {"gateway": {"http_port": port}})
        assert f"{port}" in refused(capsys, "up", "-f", file)
    assert ClusterFile("default").read() is None


def test_a_ray_elsewhere_needs_a_store_that_all_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "up", "--address", "http://127.0.0.1:1"
    assert "store.url: " in refused(capsys, *words)
    store = {"store": {"url": "redis://store:6379"}}
    hosts = {
        "scheduler": {"host": "0.0.0.0"},
        "gateway": {"host": "10.0.0.1"},
        "verifier": {"host": "::1", "advertise": "::1"},
        "drafter": {"replicas": 0},
    }
    file = written(tmp_path, {**store, **hosts})
    assert "does not answer" in refused(capsys, *words, "-f", file, status=1)


@pytest.mark.parametrize("pool", ["scheduler", "gateway", "verifier", "drafter"])
def test_on_a_ray_elsewhere_replicas_are_reached_from_other_nodes(
    pool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = {name: {"host": "0.0.0.0"} for name in ("scheduler", "gateway", "verifier", "drafter")}
    del hosts[pool]["host"]
    file = written(tmp_path, {"store": {"url": "redis://store:6379"}, **hosts})
    told = refused(capsys, "up", "--address", "http://127.0.0.1:1", "-f", file)
    assert f"{pool}.host: 127.0.0.1 is reached from its own node only" in told


@pytest.mark.parametrize(
    "words", [("status",), ("scale", "verifier", "2"), ("drain", "verifier-1"), ("down",)]
)
def test_no_cluster_runs(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert "no cluster runs on this machine" in refused(capsys, *words, status=1)
    assert "'other'" in refused(capsys, *words, "--cluster", "other", status=1)
    both = (*words, "--cluster", "other", "--address", "http://127.0.0.1:1")
    assert refused(capsys, *both)


def test_serves_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--print-serve-config"]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    paths = [one["import_path"] for one in told["applications"]]
    assert "dspark.deploy.ray.applications:verifier" in paths
