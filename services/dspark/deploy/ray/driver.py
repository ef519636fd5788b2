"""A Ray of our own in this process's tree, with Serve on it: the driver's side. Imports Ray."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError, Unavailable
from dspark.deploy.ray.serve_config import LOGGING

# Bytes of the object store: nothing of ours goes through it, and Ray wants 75 MiB at least.
OBJECT_STORE_BYTES = 80 * 2**20
# Of a resource that an operator gives nodes by name: here there is one node, which has them all.
PLENTY = 1000.0
# Tells replicas that all of them are on this machine.
LOCAL = "DSPARK_LOCAL_CLUSTER"


def ray_environment() -> dict[str, str]:
    """What Ray's processes are to find in theirs, for a cluster that is only ours."""
    ours = {
        LOCAL: "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Serve's own log stays in its files; ours is told as it is, not counted and held back.
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "GOMP_SPINCOUNT": "1000",
    }
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        del ours["RAY_AUTH_TOKEN"], ours["RAY_AUTH_MODE"]
    return ours


def start_ray(folder: Path, named: Collection[str] = ()) -> None:
    """Head and node, which die with this thread. folder: for logs and sockets. named: resources
    that its one node offers, as many as are asked for. Raises Unavailable."""
    import ray

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(
            address="local",
            resources=dict.fromkeys(named, PLENTY),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=True,
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # Ray raises what it likes
        raise Unavailable(f"Ray does not start: {_last_line(error)}; see {folder}") from error


def start_serve() -> None:
    """Serve's controller, without proxies: our own servers answer."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config=dict(LOGGING))


class DriverDoor:
    """A `Door` for the process that is Ray's driver. Calls block."""

    def details(self) -> dict[str, Any]:
        found: dict[str, Any] = _answer(lambda client: client.get_serve_details())
        return found

    def put(self, config: Mapping[str, Any]) -> None:
        from pydantic import ValidationError
        from ray.serve.schema import ServeDeploySchema

        try:
            schema = ServeDeploySchema.model_validate(dict(config))
        except ValidationError as error:
            raise ConfigError(f"Serve refuses this configuration: {error}") from None
        _answer(lambda client: client.deploy_apps(schema))

    def close(self, *, force: bool, told: Callable[[str], None]) -> None:
        """Nothing: whoever started Ray ends it."""


def resources() -> dict[str, tuple[float, float]]:
    """By name, (free, all) of what Ray counts."""
    import ray

    free = ray.available_resources()
    return {name: (free.get(name, 0.0), whole) for name, whole in ray.cluster_resources().items()}


def _answer(ask: Callable[[Any], Any]) -> Any:
    # What Serve's own REST API and command line use; there is no public name for it.
    from ray.serve.context import _get_global_client

    try:
        return ask(_get_global_client())
    except Exception as error:
        raise Unavailable(f"Serve's controller does not answer: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:500] if lines else type(error).__name__
