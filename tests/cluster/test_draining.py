"""The only verifier is let go when another is there, or not at all."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from dspark.core.errors import ConfigError, DeadlineExceeded, Unavailable
from dspark.deploy.ray.draining import drain_replica

from .test_changes import Serve, patience, up

ONLY = "verifier-local-r0"


def puts(serve: Serve) -> list[int]:
    """Sizes of the verifier pool that were put, one after the other."""
    return [put["verifier"]["deployments"][0]["num_replicas"] for put in serve.puts]


def deserted(**sections: Any) -> Serve:
    """A cluster whose scheduler does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return up(scheduler={"port": port}, **sections)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ({"replicas": "per-node", "resources": {"custom": {"v": 1.0}}}, "its pool is per-node"),
        ({"autoscale": {"max": 3}}, "its pool is autoscaled"),
    ],
)
def test_the_only_verifier_of_a_pool_that_cannot_grow_stays(
    size: dict[str, Any], told: str
) -> None:
    serve = up(verifier=size)
    with pytest.raises(ConfigError, match=f"{ONLY}: is the only verifier that runs.*{told}"):
        drain_replica(serve, ONLY, patience())
    assert serve.puts == []


def test_nor_where_there_is_no_room_for_a_second() -> None:
    class Narrow(Serve):
        def details(self) -> dict[str, Any]:
            return {**super().details(), "resources": {"CPU": (0.0, 4.0)}}

    serve = Narrow(applications=up(verifier={"resources": {"cpus": 1.0}}).applications)
    with pytest.raises(ConfigError, match="verifier: 1 more need"):
        drain_replica(serve, ONLY, patience())
    assert serve.puts == []


def test_a_pool_that_grew_for_nothing_gets_its_size_back() -> None:
    serve = deserted()
    with pytest.raises(Unavailable, match="no scheduler answers"):
        drain_replica(serve, ONLY, patience())
    assert puts(serve) == [2, 1]


def test_and_where_the_second_does_not_come() -> None:
    serve = up()
    serve.stuck = True
    with pytest.raises(DeadlineExceeded):
        drain_replica(serve, ONLY, patience(0.3))
    assert puts(serve) == [2, 1]
