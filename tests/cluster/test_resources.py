"""What replicas ask of Ray is there, or both numbers are told."""

from __future__ import annotations

import pytest

from dspark.core.errors import ConfigError
from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.ray.resources import asks, check_fit, check_room, named
from dspark.deploy.ray.serve_config import serve_config

CLUSTER = ClusterConfig.of(
    {
        "verifier": {"replicas": 2, "resources": {"cpus": 1.5, "gpus": 1.0}},
        "drafter": {"resources": {"cpus": 0.5, "custom": {"small": 2.0}}},
    }
)
APPLICATIONS = serve_config(CLUSTER)["applications"]
VERIFIER = next(one for one in APPLICATIONS if one["name"] == "verifier")
ENOUGH = {"CPU": (3.5, 3.5), "GPU": (2.0, 2.0), "small": (2.0, 2.0)}


def test_what_a_replica_asks() -> None:
    assert asks(VERIFIER) == {"CPU": 1.5, "GPU": 1.0}
    assert named(APPLICATIONS) == {"small"}


def test_all_pools_together_have_to_fit() -> None:
    check_fit(APPLICATIONS, ENOUGH)
    with pytest.raises(ConfigError, match=r"2 × verifier, 1 × drafter need 3\.5 CPU, and 2 are"):
        check_fit(APPLICATIONS, {**ENOUGH, "CPU": (2.0, 2.0)})
    with pytest.raises(ConfigError, match="2 × verifier need 2 GPU, and 0 are here"):
        check_fit(APPLICATIONS, {"CPU": (8.0, 8.0)})


def test_more_replicas_have_to_fit_beside_what_runs() -> None:
    free = {"CPU": (3.0, 8.0), "GPU": (1.0, 4.0)}
    check_room(VERIFIER, 1, free)
    check_room(VERIFIER, -1, {})
    with pytest.raises(ConfigError, match="verifier: 2 more need 2 GPU, and 1 of 4 are free"):
        check_room(VERIFIER, 2, free)
