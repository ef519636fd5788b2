"""What Serve imports: a builder for each pool, from the data that `serve_config` made."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from dspark.deploy.ray.replica import Replica


def scheduler(args: dict[str, Any]) -> Application:
    return _application("scheduler", args)


def gateway(args: dict[str, Any]) -> Application:
    return _application("gateway", args)


def verifier(args: dict[str, Any]) -> Application:
    return _application("verifier", args)


def drafter(args: dict[str, Any]) -> Application:
    return _application("drafter", args)


def _application(pool: str, args: dict[str, Any]) -> Application:
    return serve.deployment(Replica, name=pool).bind(pool, args["config"])
