"""A replica of a pool as a Serve deployment: the role runs in the replica's event loop, and Serve
starts it, looks at it and ends it. No request goes through Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from dspark.core.errors import DsparkError
from dspark.deploy.ray.driver import LOCAL
from dspark.deploy.ray.observed import MARK

if TYPE_CHECKING:
    from dspark.deploy.cluster_config import ClusterConfig
    from dspark.deploy.roles import RunningRole

log = logging.getLogger(__name__)

# Seconds for a replica to load, profile and register; the first profile of a large model on a slow
# machine takes minutes.
START_S = 1800.0
# Seconds that a new replica waits for a fixed port which the one before it still holds.
PORT_WAIT_S = 60.0


class CannotStart(RuntimeError):
    """An expected error of a role, in one line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(MARK + " ".join(str(error).split()))


class Replica:
    """pool: whose. view: of `serve_config.pool_view`. Serve awaits `__init__`, which returns when
    the replica is ready, and `__del__`, which drains it."""

    async def __init__(self, pool: str, view: dict[str, Any]) -> None:  # type: ignore[misc]
        # OpenMP's threads spin where they wait; both are read when torch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        self._role: RunningRole | None = None
        self._stop = asyncio.Event()
        self._grace_s = 0.0
        self._drained = False
        started: asyncio.Future[RunningRole] = asyncio.get_running_loop().create_future()
        # One task enters and leaves the role.
        self._life = asyncio.create_task(self._live(pool, view, started))
        try:
            await asyncio.wait((started, self._life), return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                await self._life  # raises why
            self._role = await started
            await self._role.wait_ready(START_S)
        except DsparkError as error:
            await self._end(0.0)
            raise CannotStart(error) from None
        except BaseException:
            await self._end(0.0)
            raise

    async def check_health(self) -> None:
        """Raises where the replica has to be replaced."""
        role = self._role
        if role is None or self._life.done():
            raise RuntimeError("it has drained, as an operator wanted, or its role has ended")
        if role.fenced.is_set():
            raise RuntimeError(f"{role.name}: a newer life of it has registered")
        if not role.alive:
            raise RuntimeError(f"{role.name}: its work has died")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the policies in scaling.py."""
        role = self._role
        return {} if role is None else {"pressure": role.load().pressure}

    async def __del__(self) -> None:
        """What runs goes on for drain_s; what is left then goes on elsewhere."""
        await self._end(self._grace_s)

    async def _live(
        self, pool: str, view: dict[str, Any], started: asyncio.Future[RunningRole]
    ) -> None:
        from ray import serve

        from dspark.deploy.cluster_config import ClusterConfig
        from dspark.deploy.roles import role, without_torch

        config = ClusterConfig.of(view)
        self._grace_s = config.drain_s
        host, advertise = _host()
        name = f"{pool}-{host}-{serve.get_replica_context().replica_id.unique_id}"
        _log_to_stderr(config, pool, name)
        if pool == "gateway":
            without_torch(config)  # 300 MB that it does not need
        fixed = pool in ("gateway", "scheduler")
        async with role(
            pool,
            config,
            name,
            environment=os.environ,
            advertise=advertise,
            port_wait_s=PORT_WAIT_S if fixed else 0.0,
        ) as running:
            started.set_result(running)
            wanted = asyncio.create_task(running.drain_wanted.wait())
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait((wanted, stopped), return_when=asyncio.FIRST_COMPLETED)
            wanted.cancel()
            stopped.cancel()
            await running.drain(self._grace_s)
        log.info("%s has drained", name)

    async def _end(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._stop.set()
        if self._drained:
            return
        self._drained = True
        with contextlib.suppress(Exception):
            await asyncio.shield(self._life)


def _host() -> tuple[str, str]:
    """(what names the machine, its address for other machines, "" where there are none)."""
    import ray

    if os.environ.get(LOCAL):
        return "local", ""
    address = ray.util.get_node_ip_address()
    return address.replace(".", "-").replace(":", "-"), address


def _log_to_stderr(config: ClusterConfig, pool: str, name: str) -> None:
    """Ours only: what Ray and Serve say goes where they say it."""
    from dspark.telemetry.logs import JsonFormatter, TextFormatter

    as_json = config.telemetry.log_format == "json"
    # Serve puts its log in place of sys.stderr.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter(pool, name) if as_json else TextFormatter())
    ours = logging.getLogger("dspark")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(config.log_level.upper())
