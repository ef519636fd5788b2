"""A traced cluster of real processes: one trace over all of them, and a scrape of each."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dspark.client import Client
from dspark.core.traces import TraceContext

from ..cli.conftest import make_checkpoint
from ..deploy.processes import Processes, Replica, cluster, until
from .collector import Collector, attributes, collecting

CLIENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
POOLS = ("scheduler", "verifier", "drafter", "gateway")
PARTS = {
    "text_completion tiny": "gateway",
    "dspark.lease": "gateway",
    "dspark.scheduler.lease": "scheduler",
    "dspark.run": "gateway",
    "dspark.verify": "verifier",
    "dspark.queue": "verifier",
    "dspark.prefill": "verifier",
    "dspark.decode": "verifier",
    "dspark.draft": "drafter",
}


@contextmanager
def collecting_beside() -> Iterator[Collector]:
    """A collector in a thread of its own: the cluster is started from this one, without a loop."""
    found: list[Collector] = []
    started, over = threading.Event(), threading.Event()

    async def collect() -> None:
        async with collecting() as collector:
            found.append(collector)
            started.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(collect()))
    thread.start()
    try:
        assert started.wait(30)
        yield found[0]
    finally:
        over.set()
        thread.join(30)


# Four processes that load torch: a minute on two cores that others share. Run it by hand.
@pytest.mark.slow
def test_one_trace_and_a_scrape_of_every_process(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny")
    with collecting_beside() as found:
        told = {
            "otlp": {"endpoint": found.endpoint, "metrics_interval_s": 0.5},
            "sample": 0.0,
            "metrics": {"port": 0},
            "log_format": "json",
        }
        engine = {"kv_tokens": 8192, "max_step_tokens": 64, "verify": "fixed:3"}
        with cluster(
            tmp_path / "run", checkpoint, telemetry=told, verifier={"engine": engine}
        ) as processes:
            replicas = dict(zip(POOLS, processes.start_all(*POOLS), strict=True))
            replicas["verifier"].logged("is adopted")
            with Client(replicas["gateway"].address) as client:
                client.generate("the cat sat on the", max_tokens=40, traceparent=CLIENT.traceparent)
            until(lambda: set(PARTS) <= {span.name for span in found.spans})
            scraped(replicas, found)
            check_logs(processes)
    ids = {span.span_id.hex(): span for span in found.spans}
    for span in found.spans:
        assert span.trace_id.hex() == CLIENT.trace_id
        above = span.parent_span_id.hex()
        assert above in ids or above == CLIENT.span_id
    verify = attributes(found.named("dspark.verify")[0])
    assert verify["dspark.replica"] == replicas["verifier"].name


def scraped(replicas: dict[str, Replica], found: Collector) -> None:
    """Each has a page, and OTLP tells the same names."""
    page = httpx.get(f"{replicas['gateway'].url}/metrics", timeout=60).text
    assert 'dspark_placements_total{by="lease"}' in page
    for pool, replica in replicas.items():
        where = re.search(r"metrics are at (http://\S+/metrics)", replica.log)
        assert where is not None, replica.log
        assert f'pool="{pool}"' in httpx.get(where[1], timeout=60).text
    until(lambda: "dspark.steps" in found.metrics)
    until(lambda: "gen_ai.server.request.duration" in found.metrics)


def check_logs(processes: Processes) -> None:
    for line in processes.logs.splitlines():
        if line.startswith("{"):
            assert {"ts", "level", "logger", "message", "pool", "replica"} <= json.loads(
                line
            ).keys()
    assert "the cat sat" not in processes.logs
