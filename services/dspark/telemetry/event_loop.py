"""How late an event loop comes to what was due, and how much it has in hand."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
# Seconds between two looks at the event loop; each costs about 10 microseconds.
LAG_INTERVAL_S = 0.05
# Looks from one count of tasks to the next: a second, as a count goes through all of them.
TASKS_EVERY = 20


class EventLoopMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "dspark_event_loop_lag_seconds",
            "How late the event loop comes to what was due",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self._tasks = Gauge("dspark_event_loop_tasks", "Tasks of the event loop", registry=registry)

    async def watch(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measures until it is cancelled."""
        for look in itertools.count():
            if look % TASKS_EVERY == 0:
                self._tasks.set(len(asyncio.all_tasks()))
            due = clock() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(clock() - due, 0.0))
