"""Whether a cluster stays as it is: clients that hang up, then an hour of load.

    python -m benchmarks.cluster_steady [--minutes 60] [--users 8] [--disconnects 100]
        [--backend native --dtype int8] [--drafter auto]

The processes of `cluster_faults`. First so many streams begin at once and are all cut after five
seconds; told is how long it takes until no verifier owns a KV block, no drafter holds a session and
no lease is left. Then users ask one thing after another, greedy, seeded and free, of many lengths,
one in eight hanging up in the midst. Of each process memory, descriptors, threads and tasks of the
event loop are written down; told are the first and last quarter's medians and the slope of the last
three quarters, an hour, with twice its standard error. JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.processes import free_ports

from dspark.client import AsyncClient

from .cluster_faults import PATIENCE_S, PROMPTS, Scene, scene

# What each process is watched for, by name of its metric; threads are of /proc.
WATCHED = {
    "memory_mb": "process_resident_memory_bytes",
    "descriptors": "process_open_fds",
    "tasks": "dspark_event_loop_tasks",
}
# Nothing of these is left when nobody asks: metric, labels.
AT_REST = (
    ("dspark_kv_blocks", {"state": "owned"}),
    ("dspark_requests_running", {}),
    ("dspark_requests_waiting", {}),
    ("dspark_drafter_sessions", {}),
    ("dspark_leases_held", {}),
    ("dspark_leases", {}),
)
# Ports that replicas on one machine try from `telemetry.metrics.port` on.
PORTS = 16

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Pages:
    """Metrics of all processes. urls: by replica."""

    client: httpx.AsyncClient
    urls: dict[str, str] = field(default_factory=dict)

    async def find(self, first: int, replicas: set[str]) -> None:
        for port in range(first, first + PORTS):
            url = f"http://127.0.0.1:{port}/metrics"
            try:
                page = await self.read(url)
            except httpx.ConnectError:
                continue
            [labels] = [dict(labels) for name, labels in page if name == "dspark_build_info"]
            self.urls[labels["replica"]] = url
        assert set(self.urls) == replicas, f"metrics of {sorted(self.urls)}, not of all"

    async def read(self, url: str) -> Page:
        text = (await self.client.get(url)).text
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def all(self) -> dict[str, Page]:
        pages = await asyncio.gather(*(self.read(url) for url in self.urls.values()))
        return dict(zip(self.urls, pages, strict=True))

    async def held(self) -> dict[str, float]:
        """What is held for requests, by replica and metric, where it is not nothing."""
        found = {}
        for replica, page in (await self.all()).items():
            for name, labels in AT_REST:
                if value := page.get((name, frozenset(labels.items()))):
                    found[f"{replica} {name}"] = value
        return found


async def hang_up(gateways: list[str], pages: Pages, count: int) -> dict[str, Any]:
    """So many streams at once, all cut after a while; seconds until all is at rest."""

    async def begin(client: AsyncClient, number: int) -> None:
        asked = [{"role": "user", "content": f"{number}: {PROMPTS[number % len(PROMPTS)]}"}]
        async with client.stream(asked, max_tokens=400, ignore_eos=True) as chunks:
            async for _ in chunks:
                pass

    most: dict[str, float] = {}
    async with AsyncClient(gateways) as client:
        streams = [asyncio.create_task(begin(client, number)) for number in range(count)]
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            most = max(most, await pages.held(), key=lambda held: sum(held.values()))
            await asyncio.sleep(0.2)
        for stream in streams:
            stream.cancel()
        cut = time.monotonic()
        await asyncio.gather(*streams, return_exceptions=True)
        while (held := await pages.held()) and time.monotonic() - cut < PATIENCE_S:
            await asyncio.sleep(0.02)
    return {"streams": count, "held": most, "rest_s": time.monotonic() - cut, "left": held}


@dataclass
class Asked:
    answers: int = 0
    tokens: int = 0
    cut: int = 0
    errors: list[str] = field(default_factory=list)


async def use(client: AsyncClient, number: int, end: float, asked: Asked) -> None:
    """One user."""
    dice = random.Random(number)
    while time.monotonic() < end:
        content = f"{dice.choice(PROMPTS)} ({dice.randrange(10_000)})"
        length, ids = dice.randint(16, 160), 0
        how: dict[str, Any] = dice.choice(
            [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "seed": length}]
        )
        stop = dice.randint(1, length) if dice.random() < 1 / 8 else None
        try:
            async with client.stream(
                [{"role": "user", "content": content}],
                max_tokens=length,
                ignore_eos=True,
                deadline_s=PATIENCE_S,
                **how,
            ) as chunks:
                async for chunk in chunks:
                    ids += len(chunk.ids)
                    if stop is not None and ids >= stop:
                        break
        except Exception as error:
            asked.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1.0)
            continue
        asked.tokens += ids
        if stop is not None:
            asked.cut += 1
        else:
            asked.answers += 1
            if ids != length:
                asked.errors.append(f"{ids} tokens of {length}")


def slope(hours: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Least squares; (an hour's change, twice its standard error)."""
    away = hours - hours.mean()
    rise = float(away @ values / (away @ away))
    rest = values - values.mean() - rise * away
    error = float(np.sqrt(rest @ rest / max(len(hours) - 2, 1) / (away @ away)))
    return rise, 2 * error


async def watch(
    made: Scene, pages: Pages, end: float, every_s: float
) -> tuple[list[float], dict[str, list[float]]]:
    """(hours, series by replica and what)."""
    pids = {replica.name: replica.pid for pool in made.pools.values() for replica in pool}
    hours: list[float] = []
    series: dict[str, list[float]] = {}
    begin = time.monotonic()
    while time.monotonic() < end:
        hours.append((time.monotonic() - begin) / 3600)
        for replica, page in (await pages.all()).items():
            told = {what: page[name, frozenset()] for what, name in WATCHED.items()}
            told["memory_mb"] /= 1e6
            status = Path(f"/proc/{pids[replica]}/status").read_text()
            told["threads"] = float(status.split("Threads:")[1].split()[0])
            for what, value in told.items():
                series.setdefault(f"{replica} {what}", []).append(value)
        await asyncio.sleep(every_s)
    return hours, series


def table(hours: list[float], series: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    quarter = max(len(hours) // 4, 1)
    rows = {}
    for name, values in series.items():
        rise, error = slope(np.array(hours[quarter:]), np.array(values[quarter:]))
        rows[name] = {
            "first": statistics.median(values[:quarter]),
            "last": statistics.median(values[-quarter:]),
            "slope": rise,
            "error": error,
        }
    return rows


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    *_, port = sorted(free_ports(PORTS))
    async with (
        scene(arguments, telemetry={"metrics": {"host": "127.0.0.1", "port": port}}) as made,
        httpx.AsyncClient() as http,
    ):
        pages = Pages(http)
        await pages.find(port, {r.name for pool in made.pools.values() for r in pool})
        gateways = [replica.address for replica in made.pools["gateway"]]
        cut = await hang_up(gateways, pages, arguments.disconnects)
        print(f"hung up: {cut}", file=sys.stderr)
        asked, begin = Asked(), time.monotonic()
        end = begin + 60 * arguments.minutes
        async with AsyncClient(gateways) as client:
            users = [
                asyncio.create_task(use(client, number, end, asked))
                for number in range(arguments.users)
            ]
            hours, series = await watch(made, pages, end, arguments.every)
            await asyncio.gather(*users)
        seconds = time.monotonic() - begin
        await asyncio.sleep(2.0)
        left = await pages.held()
    return {
        "drafter": arguments.drafter,
        "backend": f"{arguments.backend} {arguments.dtype}",
        "hung_up": cut,
        "seconds": seconds,
        "answers": asked.answers,
        "cut": asked.cut,
        "errors": asked.errors,
        "tokens_per_s": asked.tokens / seconds,
        "left": left,
        "processes": table(hours, series),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--every", type=float, default=15, help="seconds between two looks")
    parser.add_argument("--disconnects", type=int, default=100)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
