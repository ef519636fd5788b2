"""What Serve says of the pools, as plain data. Pure: from the details of its REST API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.deploy.pools import POOLS

# What an operator is to read of a failed start stands after it; Serve wraps it in a trace.
MARK = "dspark cannot start: "


@dataclass(frozen=True, slots=True)
class SeenReplica:
    """key: Serve's name of it, which its own id in the cluster ends with. state: Serve's, in small
    letters: starting, running, stopping… host, pid: where its process is; "" and 0 before it is."""

    key: str
    state: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class SeenPool:
    """wanted: replicas that Serve works towards. size: the rule behind it, "fixed", "autoscaled" or
    "per-node". status: Serve's of the application, in small letters. trouble: why replicas do not
    start, "" if they do. config: the application as it was put."""

    name: str
    wanted: int
    size: str
    status: str
    trouble: str
    replicas: tuple[SeenReplica, ...]
    config: Mapping[str, Any]

    def count(self, *states: str) -> int:
        return sum(replica.state in states for replica in self.replicas)

    @property
    def running(self) -> int:
        return self.count("running")

    @property
    def settled(self) -> bool:
        """As many as are wanted run, none begins and none ends."""
        return (
            self.status == "running"
            and self.running == self.wanted
            and len(self.replicas) == self.running
        )

    def told(self) -> str:
        """In a line."""
        others = [
            f"{count} {state}"
            for state in ("starting", "updating", "recovering", "stopping")
            if (count := self.count(state))
        ]
        return ", ".join([f"{self.running} of {self.wanted} ready", *others])


def seen(details: Mapping[str, Any]) -> dict[str, SeenPool]:
    """By name, in the order of POOLS; applications of others are left out."""
    applications = details.get("applications") or {}
    return {name: _pool(name, applications[name]) for name in POOLS if name in applications}


def deployed(details: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The configuration of every application that is put now, also of others."""
    return {
        name: config
        for name, application in (details.get("applications") or {}).items()
        if (config := application.get("deployed_app_config")) is not None
        and application["status"] != "DELETING"
    }


def reason_of(message: str) -> str:
    """What an operator is to read of Serve's message on a failed start; "" if nothing of ours."""
    _, found, rest = message.rpartition(MARK)
    return rest.splitlines()[0].strip() if found else ""


def _pool(name: str, application: Mapping[str, Any]) -> SeenPool:
    config = application.get("deployed_app_config") or {}
    deployment = application["deployments"].get(name) or {}
    status = application["status"].lower()
    options: Mapping[str, Any] = next(iter(config.get("deployments") or ()), {})
    return SeenPool(
        name=name,
        wanted=deployment.get("target_num_replicas", options.get("num_replicas") or 1),
        size=_size(options),
        status=status,
        trouble=_trouble(status, application.get("message", ""), deployment.get("message", "")),
        replicas=tuple(
            SeenReplica(
                key=replica["replica_id"],
                state=replica["state"].lower(),
                host=replica.get("node_ip") or "",
                pid=replica.get("pid") or 0,
            )
            for replica in deployment.get("replicas") or ()
        ),
        config=config,
    )


def _size(options: Mapping[str, Any]) -> str:
    if "autoscaling_config" not in options:
        return "fixed"
    return "per-node" if options.get("max_replicas_per_node") == 1 else "autoscaled"


def _trouble(status: str, *messages: str) -> str:
    for message in messages:
        if found := reason_of(message):
            return found
    if status != "deploy_failed":
        return ""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Serve does not say why"
