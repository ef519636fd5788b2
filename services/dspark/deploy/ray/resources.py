"""Whether what replicas ask of Ray is there: cores, GPUs, memory, and resources by name. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from dspark.core.errors import ConfigError

# By option of an actor, Ray's name of the resource.
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}

Free = Mapping[str, tuple[float, float]]


def asks(application: Mapping[str, Any]) -> dict[str, float]:
    """Of one replica, by Ray's name."""
    options = application["deployments"][0].get("ray_actor_options") or {}
    found = {ray: float(options.get(name) or 0.0) for name, ray in _NAMES.items()}
    found |= options.get("resources") or {}
    return {name: amount for name, amount in found.items() if amount}


def named(applications: Iterable[Mapping[str, Any]]) -> set[str]:
    """Resources that only an operator can give a node."""
    return {name for one in applications for name in asks(one)} - set(_NAMES.values())


def check_fit(applications: Iterable[Mapping[str, Any]], free: Free) -> None:
    """free: (free, all) by name. Raises ConfigError for what all pools together do not find at the
    start."""
    wanted: dict[str, float] = defaultdict(float)
    who: dict[str, list[str]] = defaultdict(list)
    for one in applications:
        options = one["deployments"][0]
        auto = options.get("autoscaling_config") or {}
        replicas = options.get("num_replicas", auto.get("initial_replicas", 1))
        for name, amount in asks(one).items():
            wanted[name] += replicas * amount
            who[name].append(f"{replicas} × {one['name']}")
    for name, amount in wanted.items():
        whole = free.get(name, (0.0, 0.0))[1]
        if amount > whole:
            raise ConfigError(
                f"resources: {', '.join(who[name])} need {amount:g} {name}, and {whole:g} are here"
            )


def check_room(application: Mapping[str, Any], more: int, free: Free) -> None:
    """Raises ConfigError where `more` replicas do not fit beside what runs."""
    for name, amount in asks(application).items():
        left, whole = free.get(name, (0.0, 0.0))
        if more * amount > left:
            raise ConfigError(
                f"{application['name']}: {more} more need {more * amount:g} {name}, and {left:g} "
                f"of {whole:g} are free"
            )
