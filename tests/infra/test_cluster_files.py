"""The cluster files of infra/ and examples/: read strictly, and alike where they should be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dspark.deploy.cluster_config import POOLS, read_cluster

from .tools import INFRA, ROOT

FILES = sorted([*INFRA.rglob("cluster*.yaml"), *(ROOT / "examples").rglob("cluster/*.yaml")])
IN_CONTAINERS = [file for file in FILES if file.is_relative_to(INFRA)]


def test_they_are_found() -> None:
    assert len(IN_CONTAINERS) == 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_cluster_file_is_read(file: Path) -> None:
    read_cluster(file)


@pytest.mark.parametrize("file", IN_CONTAINERS, ids=lambda file: str(file.relative_to(ROOT)))
def test_pools_follow_their_nodes_and_are_reached_from_outside(file: Path) -> None:
    config = read_cluster(file)
    for pool in POOLS:
        section = config.pool(pool)
        assert section.replicas == "per-node"
        assert list(section.resources.custom) == [pool]
        assert section.host == "0.0.0.0"
    assert config.gateway.keys  # nobody without a key
    assert config.store.password_file
    assert config.scheduler.addresses


def test_the_file_with_traces_is_the_other_one_with_traces() -> None:
    plain, observed = (
        read_cluster(INFRA / "compose" / name).model_dump()
        for name in ("cluster.yaml", "cluster-observed.yaml")
    )
    assert observed["telemetry"].pop("otlp") is not None
    assert plain["telemetry"].pop("otlp") is None
    assert plain == observed


@pytest.mark.parametrize(
    ("cuda", "cpu"),
    [
        ("compose/cluster-cuda.yaml", "compose/cluster.yaml"),
        ("kuberay/overlays/gpu/cluster.yaml", "kuberay/overlays/cpu/cluster.yaml"),
    ],
)
def test_the_file_for_gpus_differs_in_what_a_gpu_changes(cuda: str, cpu: str) -> None:
    on_gpu, on_cpu = (read_cluster(INFRA / name).model_dump() for name in (cuda, cpu))
    assert on_gpu["verifier"]["resources"].pop("gpus") == 1
    assert on_cpu["verifier"]["resources"].pop("gpus") == 0
    # A trained drafter wants a GPU of its own, which these nodes do not have.
    assert on_gpu["drafter"].pop("checkpoint") == "ngram"
    assert on_cpu["drafter"].pop("checkpoint") == "auto"
    for told in (on_gpu, on_cpu):
        told["verifier"].pop("threads")
        told.pop("device")
        told.pop("dtype")
    assert on_gpu == on_cpu


def test_what_listens_in_compose_is_published_and_named_alike() -> None:
    config = read_cluster(INFRA / "compose/cluster.yaml")
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    inside = {port.rpartition(":")[2] for port in services["gateway"]["ports"]}
    assert inside == {str(config.gateway.http_port), str(config.gateway.grpc_port)}
    assert config.scheduler.addresses == [f"scheduler:{config.scheduler.port}"]
    for pool in ("verifier", "drafter"):
        cores = services[pool]["deploy"]["resources"]["limits"]["cpus"]
        assert config.pool(pool).threads == int(cores)
