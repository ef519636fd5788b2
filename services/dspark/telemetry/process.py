"""All that one process tells of itself, from its configuration: `async with telemetry(...)`.

Heavy parts are imported only where they are asked for: without `otlp` no OpenTelemetry, without any
metrics no Prometheus.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from dspark.core.errors import ConfigError
from dspark.telemetry.config import TelemetryConfig
from dspark.telemetry.readings import (
    read_dispatch,
    read_drafter,
    read_engine,
    read_outage,
)
from dspark.telemetry.tracing import Tracer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

    from dspark.core.traces import Drafted, RunTrace
    from dspark.drafter.runner import DraftRunner
    from dspark.gateway.dispatch import Dispatch
    from dspark.scheduler.central import Scheduler
    from dspark.scheduler.central.outage import Outage
    from dspark.telemetry.otlp import Export
    from dspark.verifier.engine import Engine


log = logging.getLogger(__name__)

# Whose own metrics have the lag of the event loop.
GATEWAYS = ("gateway", "serve")


class Telemetry:
    """What a replica hands to its parts. tracer, registry: None where that is off. metrics_address:
    host:port of GET /metrics, "" where it is off."""

    def __init__(
        self,
        replica: str = "",
        tracer: Tracer | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.replica = replica
        self.tracer = tracer
        self.registry = registry
        self.metrics_address = ""

    # --- traces: hand these to a runner; None where nothing is traced -------------------------

    @property
    def runs(self) -> Callable[[list[RunTrace]], None] | None:
        """For an engine's runner: takes traced runs that are over."""
        return None if self.tracer is None else partial(_runs, self.tracer, self.replica)

    @property
    def drafts(self) -> Callable[[list[Drafted]], None] | None:
        """For a drafter's runner: takes traced requests of a pass."""
        return None if self.tracer is None else partial(_drafts, self.tracer, self.replica)

    # --- metrics: name what there is to read --------------------------------------------------

    def watch_engine(self, engine: Engine) -> None:
        if self.registry is not None:
            from dspark.telemetry.collectors import EngineCollector

            self._add(EngineCollector(partial(read_engine, engine)))

    def watch_drafter(self, runner: DraftRunner) -> None:
        if self.registry is not None:
            from dspark.telemetry.collectors import DrafterCollector

            self._add(DrafterCollector(partial(read_drafter, runner)))

    def watch_dispatch(self, dispatch: Dispatch) -> None:
        if self.registry is not None:
            from dspark.telemetry.collectors import DispatchCollector

            self._add(DispatchCollector(partial(read_dispatch, dispatch)))

    def watch_outage(self, what: str, outage: Outage) -> None:
        """what: "scheduler", a member's; or "store", a scheduler's."""
        if self.registry is not None:
            from dspark.telemetry.collectors import OutageCollector

            self._add(OutageCollector(what, partial(read_outage, outage)))

    def watch_scheduler(self, scheduler: Scheduler) -> None:
        if self.registry is not None:
            from dspark.telemetry.collectors import SchedulerCollector

            self._add(
                SchedulerCollector(
                    scheduler.status,
                    lambda: scheduler.granted,
                    lambda: dict(scheduler.turned_away),
                    lambda: dict(scheduler.refused),
                )
            )
            self.watch_outage("store", scheduler.outage)

    def _add(self, collector: Collector) -> None:
        assert self.registry is not None
        self.registry.register(collector)


def _runs(tracer: Tracer, replica: str, runs: list[RunTrace]) -> None:
    from dspark.telemetry.spans import run_spans

    wall = tracer.wall()
    for run in runs:
        for span in run_spans(run, wall, replica):
            tracer.sink(span)


def _drafts(tracer: Tracer, replica: str, drafted: list[Drafted]) -> None:
    from dspark.telemetry.spans import drafted_spans

    for span in drafted_spans(drafted, tracer.wall(), replica):
        tracer.sink(span)


@asynccontextmanager
async def telemetry(
    config: TelemetryConfig,
    *,
    pool: str,
    replica: str = "",
    cluster: str = "",
    environment: Mapping[str, str] = os.environ,
) -> AsyncIterator[Telemetry]:
    """For as long as a process serves; what is left of its traces is sent at the end.

    Raises ConfigError for what cannot be had: a port, a certificate, a package.
    """
    if config.otlp is None and config.metrics is None:
        yield Telemetry(replica)
        return
    registry = _registry(pool, replica)
    async with AsyncExitStack() as stack:
        told = Telemetry(replica, registry=registry)
        if config.otlp is not None:
            export = _export(config, pool, replica, cluster, environment, registry)
            stack.push_async_callback(asyncio.to_thread, export.close, config.otlp.timeout_s)
            told.tracer = Tracer(export.put, config.sample)
        if config.metrics is not None:
            from prometheus_client import generate_latest

            from dspark.telemetry.endpoint import serve_metrics

            text = partial(generate_latest, registry)
            serving = serve_metrics(config.metrics, text)
            told.metrics_address = await stack.enter_async_context(serving)
            log.info("metrics are at http://%s/metrics", told.metrics_address)
        if pool not in GATEWAYS:
            from dspark.telemetry.event_loop import EventLoopMetrics

            lag = asyncio.create_task(EventLoopMetrics(registry).watch())
            stack.push_async_callback(_ended, lag)
        yield told


def _registry(pool: str, replica: str) -> CollectorRegistry:
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
    except ImportError as error:
        raise ConfigError(f"telemetry needs the extra `telemetry` of dspark: {error}") from None
    from dspark.telemetry.collectors import BuildCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(BuildCollector(_version(), pool, replica))
    return registry


def _export(
    config: TelemetryConfig,
    pool: str,
    replica: str,
    cluster: str,
    environment: Mapping[str, str],
    registry: CollectorRegistry,
) -> Export:
    assert config.otlp is not None
    try:
        from dspark.telemetry.otlp import to_collector
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp needs the extra `telemetry` of dspark: {error}"
        ) from None
    from dspark.telemetry.collectors import SpansCollector

    known = {
        "service.name": f"dspark-{pool}",
        "service.namespace": cluster,
        "service.instance.id": replica,
        "service.version": _version(),
        "dspark.pool": pool,
    }
    attributes = {name: value for name, value in known.items() if value} | config.attributes
    export = to_collector(config.otlp, attributes, environment, registry)
    registry.register(SpansCollector(lambda: dict(export.outcomes)))
    return export


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _version() -> str:
    try:
        return version("dspark")
    except PackageNotFoundError:
        return "unknown"
