"""What is off is not there: no import, no interceptor, no thread, no task."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

from dspark.telemetry.config import TelemetryConfig
from dspark.telemetry.process import telemetry


async def test_off_starts_nothing() -> None:
    threads, tasks = threading.active_count(), len(asyncio.all_tasks())
    async with telemetry(TelemetryConfig(), pool="verifier") as told:
        assert (told.tracer, told.registry, told.metrics_address) == (None, None, "")
        assert (told.runs, told.drafts) == (None, None)
        assert (threading.active_count(), len(asyncio.all_tasks())) == (threads, tasks)


def test_off_imports_nothing() -> None:
    """All that services import, in a process of its own, and a replica's life with it off."""
    script = """
import asyncio, sys
import dspark.client, dspark.gateway.gateway, dspark.gateway.dispatch, dspark.gateway.servicer
import dspark.scheduling.servicer, dspark.verifier.servicer, dspark.drafter.servicer
from dspark.telemetry.config import TelemetryConfig
from dspark.telemetry.process import telemetry
async def main():
    async with telemetry(TelemetryConfig(), pool="verifier"):
        pass
asyncio.run(main())
print(*sorted(m for m in sys.modules if m.startswith("opentelemetry")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_a_replica_without_metrics_needs_no_prometheus() -> None:
    script = """
import asyncio, sys
import dspark.scheduling.servicer, dspark.drafter.servicer, dspark.drafter.runner
from dspark.telemetry.config import TelemetryConfig
from dspark.telemetry.process import telemetry
async def main():
    async with telemetry(TelemetryConfig(), pool="drafter") as told:
        told.watch_drafter(None)
asyncio.run(main())
print("prometheus_client" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False"]), done.stderr
