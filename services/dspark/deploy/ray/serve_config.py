"""A cluster's configuration as Ray Serve's: one application a pool, named after it.

Serve reads keys that it does not know and says nothing, so only what `ClusterConfig` has checked
comes here. What Serve is told is plain data without secrets: it is kept in Ray's store, and anybody
who may ask Ray may read it.
"""

from __future__ import annotations

from typing import Any

from dspark.core.errors import ConfigError
from dspark.deploy.cluster_config import ClusterConfig
from dspark.deploy.pools import PER_NODE, POOLS, PoolSection

# Serve's own messages, not ours.
LOGGING = {"log_level": "WARNING", "enable_access_log": False}

# Ports that a gateway tries on its machine, so that scaling the pool does not change its address.
GATEWAYS_OF_A_MACHINE = 8
# Seconds between two looks of Serve at a replica, and until a look counts as failed.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 3.0
# Seconds that a replica gets for its end beside drain_s.
FAREWELL_S = 10.0
# Share of a node's custom resource that the one replica of a per-node pool takes: the smallest that
# Ray counts well, so that an old and a new replica may stand beside each other while one replaces
# the other.
ONE_OF_A_NODE = 0.001
MOST_NODES = 1000

# What a pool's replicas read of other pools' sections, beside their own and what stands at the top.
# They are replaced only when one of these changes.
_ADDRESSES = ("replicas", "port", "host", "advertise", "addresses")
_READS: dict[str, dict[str, tuple[str, ...]]] = {
    "scheduler": {"gateway": ("keys",), "verifier": ("engine",)},
    "gateway": {"scheduler": _ADDRESSES, "verifier": ("engine", "fallback")},
    "verifier": {"scheduler": _ADDRESSES},
    "drafter": {"scheduler": _ADDRESSES, "verifier": ("engine",)},
}
# How many there are, and with what: Serve's to know, so that a change of it alone replaces nobody.
_SIZES = ("replicas", "autoscale", "resources")
_NO_PORTS = {"http_port": 0, "grpc_port": 0}


def serve_config(config: ClusterConfig) -> dict[str, Any]:
    """The whole configuration for Serve (ServeDeploySchema; `serveConfigV2` of KubeRay)."""
    return {
        "proxy_location": "Disabled",
        "logging_config": dict(LOGGING),
        "applications": [application(config, pool) for pool in POOLS if _is_there(config, pool)],
    }


def application(config: ClusterConfig, pool: str) -> dict[str, Any]:
    """One pool's."""
    return {
        "name": pool,
        "route_prefix": None,
        "import_path": f"dspark.deploy.ray.applications:{pool}",
        "args": {"config": pool_view(config, pool)},
        "deployments": [{"name": pool, **_deployment(config, pool)}],
    }


def pool_view(config: ClusterConfig, pool: str) -> dict[str, Any]:
    """What replicas of a pool are told: a configuration that is the same for as long as they need
    not be replaced."""
    told = config.model_dump(mode="json")
    # For its addresses a pool of one a node is one: each listens on the same port of its own node.
    told["scheduler"]["replicas"] = config.scheduler.most
    for other in POOLS:
        section = told[other]
        if other == pool:
            unread = _SIZES if pool != "scheduler" else ("resources",)
            told[other] = {key: value for key, value in section.items() if key not in unread}
        else:
            read = _READS[pool].get(other, ())
            ports = _NO_PORTS if other == "gateway" else {}
            told[other] = {**ports, **{key: section[key] for key in read}}
    if pool == "gateway":
        told[pool]["replicas"] = _window(config, told)
    return told


def _window(config: ClusterConfig, told: dict[str, Any]) -> int:
    """How many ports a gateway may try: as many as fit between what else listens."""
    for replicas in range(GATEWAYS_OF_A_MACHINE, config.gateway.most, -1):
        try:
            ClusterConfig.of({**told, "gateway": {**told["gateway"], "replicas": replicas}})
        except ConfigError:
            continue
        return replicas
    return config.gateway.most


def _is_there(config: ClusterConfig, pool: str) -> bool:
    """Serve has no deployment of 0 replicas that nothing scales; a drafter pool of 0 has none."""
    return config.pool(pool).initial != 0 or config.pool(pool).autoscale is not None


def _deployment(config: ClusterConfig, pool: str) -> dict[str, Any]:
    section = config.pool(pool)
    return {
        **_size(section),
        "ray_actor_options": _actor_options(section),
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": config.drain_s + FAREWELL_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        # A new replica first, then an old one goes; where ports are fixed, the old one has to let
        # its port go before.
        "max_surge_percent": 0 if _has_fixed_ports(section) else 25,
    }


def _has_fixed_ports(section: PoolSection) -> bool:
    return bool(section.fixed_ports())


def _size(section: PoolSection) -> dict[str, Any]:
    if section.replicas == PER_NODE:
        name = next(iter(section.resources.custom))
        policy = {"resource": name, "least": section.least}
        return {
            "autoscaling_config": _autoscaling(
                section.least, MOST_NODES, "OnePerNode", policy, up_s=0.0, down_s=0.0
            ),
            "max_replicas_per_node": 1,
        }
    auto = section.autoscale
    if auto is not None:
        return {
            "autoscaling_config": _autoscaling(
                auto.min,
                auto.max,
                "ByPressure",
                {"target": auto.target},
                up_s=auto.up_s,
                down_s=auto.down_s,
            )
        }
    return {"num_replicas": section.initial}


def _autoscaling(
    least: int, most: int, policy: str, options: dict[str, Any], *, up_s: float, down_s: float
) -> dict[str, Any]:
    return {
        "min_replicas": least,
        "initial_replicas": max(least, 1),
        "max_replicas": most,
        # Seconds between two figures of a replica, and over which they are averaged. Ray means to
        # take the first from its environment one day, which nodes of others would not have.
        "metrics_interval_s": 1.0,
        "look_back_period_s": 3.0,
        "upscale_delay_s": up_s,
        "downscale_delay_s": down_s,
        "policy": {
            "policy_function": f"dspark.deploy.ray.scaling:{policy}",
            "policy_kwargs": options,
        },
    }


def _actor_options(section: PoolSection) -> dict[str, Any]:
    wanted = section.resources
    custom = dict(wanted.custom)
    if section.replicas == PER_NODE:
        custom[next(iter(custom))] = ONE_OF_A_NODE
    options: dict[str, Any] = {"num_cpus": wanted.cpus}
    if wanted.gpus:
        options["num_gpus"] = wanted.gpus
    if wanted.memory is not None:
        options["memory"] = wanted.memory
    if custom:
        options["resources"] = custom
    return options
