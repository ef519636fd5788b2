"""What Serve is told: only what was checked, no secret, and the same for whom nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from dspark.deploy.cluster_config import POOLS, ClusterConfig
from dspark.deploy.ray.changes import ORDER
from dspark.deploy.ray.serve_config import pool_view, serve_config


def config(**sections: Any) -> ClusterConfig:
    return ClusterConfig.of(sections)


def options(cluster: ClusterConfig, pool: str) -> dict[str, Any]:
    found = {one["name"]: one for one in serve_config(cluster)["applications"]}
    deployment: dict[str, Any] = found[pool]["deployments"][0]
    return deployment


def test_serve_takes_it() -> None:
    cluster = config(
        verifier={
            "autoscale": {"min": 2, "max": 5, "target": 0.5, "up_s": 1.0, "down_s": 9.0},
            "resources": {"gpus": 1.0, "custom": {"verifier": 1.0}},
        },
        drafter={"replicas": "per-node", "resources": {"custom": {"drafter": 1.0}}},
        drain_s=12.0,
    )
    schema = ServeDeploySchema.model_validate(serve_config(cluster))
    assert (
        [one.name for one in schema.applications] == list(POOLS) == sorted(POOLS, key=POOLS.index)
    )
    assert sorted(ORDER) == sorted(POOLS)
    verifier = options(cluster, "verifier")
    assert verifier["ray_actor_options"] == {
        "num_cpus": 0.0,
        "num_gpus": 1.0,
        "resources": {"verifier": 1.0},
    }
    scaling = verifier["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 5)
    assert scaling["policy"]["policy_kwargs"] == {"target": 0.5}
    assert verifier["graceful_shutdown_timeout_s"] > 12
    drafter = options(cluster, "drafter")
    assert drafter["max_replicas_per_node"] == 1
    assert drafter["ray_actor_options"]["resources"]["drafter"] < 0.5  # an old and a new one fit
    assert drafter["autoscaling_config"]["policy"]["policy_kwargs"]["resource"] == "drafter"


def test_old_first_where_ports_are_fixed_and_new_first_elsewhere() -> None:
    surge = {pool: options(config(), pool)["max_surge_percent"] for pool in POOLS}
    assert surge["gateway"] == surge["scheduler"] == 0
    assert surge["verifier"] > 0
    assert surge["drafter"] > 0


def test_a_pool_of_none_is_not_deployed() -> None:
    names = [one["name"] for one in serve_config(config(drafter={"replicas": 0}))["applications"]]
    assert names == ["scheduler", "gateway", "verifier"]


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({"verifier": {"replicas": 3}}, set()),
        ({"drafter": {"autoscale": {"max": 3}}}, set()),
        ({"verifier": {"resources": {"cpus": 2.0}}}, set()),
        ({"drafter": {"gamma": 3}}, {"drafter"}),
        ({"verifier": {"threads": 2}}, {"verifier"}),
        ({"gateway": {"http_port": 9000}}, {"gateway"}),
        ({"scheduler": {"port": 9100}}, set(POOLS)),
        ({"model": "other/model"}, set(POOLS)),
    ],
)
def test_only_whom_a_change_concerns_is_replaced(
    change: dict[str, Any], replaced: set[str]
) -> None:
    before, after = config(), config(**change)
    assert {p for p in POOLS if pool_view(before, p) != pool_view(after, p)} == replaced


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "cluster",
    [
        config(scheduler={"port": 8000, "replicas": 2}, gateway={"http_port": 8010}),
        config(gateway={"http_port": 8000, "grpc_port": 8001}),  # room for one gateway
        config(gateway={"replicas": 3, "http_port": 65_533, "grpc_port": 0}),
    ],
)
def test_what_a_replica_is_told_is_a_configuration(cluster: ClusterConfig, pool: str) -> None:
    told = ClusterConfig.of(pool_view(cluster, pool))
    assert told.scheduler_addresses() == cluster.scheduler_addresses()
    assert told.pool(pool).host == cluster.pool(pool).host


def test_a_gateway_tries_the_ports_that_are_left() -> None:
    alone = config(gateway={"http_port": 8000, "grpc_port": 8001})
    assert pool_view(alone, "gateway")["gateway"]["replicas"] == 1
    assert pool_view(config(), "gateway")["gateway"]["replicas"] == 8
