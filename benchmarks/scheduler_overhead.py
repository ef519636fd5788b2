"""What the scheduler's service costs a verifier's steps: the same work with it and without, paired.

    python benchmarks/scheduler_overhead.py tiny     # a random Llama of two layers: 2 ms a step
    python benchmarks/scheduler_overhead.py default  # the default model

With: the engine is enrolled, its reports go up and plans come down at the default pace, from a
scheduler in a process of its own on an embedded Valkey. Without: the same engine alone. It verifies
fixed:3, so that plans change nothing of the work. Arms alternate within a round; figures are ratios
of paired rounds with a bootstrap interval, as JSON. The scheduler and its store yield to the engine
(nice 19), as if they were on another machine; `--share` lets them have their part of the cores, and
`service_cpu` says how much of one the scheduler takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.core.config import EngineConfig
from dspark.core.replicas import Member, Pool, Replica, VerifierCard
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingParams
from dspark.deploy.single import TargetConfig, load, make_engine
from dspark.models.targets.transformers import TransformersBackend
from dspark.scheduler import StepCost, hardware
from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.store import EmbeddedValkey, StoreConfig
from dspark.scheduler.store.redis_store import RedisStore
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.servicer import SchedulingServicer, WireCodec
from dspark.serving import serve_grpc
from dspark.verifier.engine import Engine
from dspark.verifier.enrolment import enrol
from dspark.verifier.runner import EngineRunner

CONFIG = TargetConfig(engine=EngineConfig(kv_tokens=16_384, verify="fixed:3"))


async def serve(url: str) -> None:
    """A scheduler replica, until its parent ends it; its address is the first line it prints."""
    async with (
        RedisStore(StoreConfig(url)) as store,
        Scheduler(store, WireCodec(), SchedulerConfig(), "s1") as scheduler,
        serve_grpc(SchedulingServicer(scheduler)) as server,
    ):
        print(server.address, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def service(priority: int) -> AsyncIterator[tuple[str, int]]:
    """Its address, and its process."""
    embedded = EmbeddedValkey()
    async with embedded as url:
        os.setpriority(os.PRIO_PROCESS, embedded.pid, priority)
        command = (sys.executable, __file__, "--serve", url)
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        os.setpriority(os.PRIO_PROCESS, child.pid, priority)
        try:
            yield (await child.stdout.readline()).decode().strip(), child.pid
        finally:
            child.kill()
            await child.wait()


def tiny_engine() -> tuple[Engine, StepCost]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
    )
    backend: Any = TransformersBackend(LlamaForCausalLM(config).eval())
    cost = StepCost.from_table({1: 0.002, 64: 0.004, 512: 0.02})
    return make_engine(backend, CONFIG, cost, ()), cost


def default_engine() -> tuple[Engine, StepCost]:
    loaded = load(CONFIG)
    return loaded.engine, loaded.cost


@dataclass(frozen=True)
class Run:
    """Means of a step: step_ms, added_ms of wall time, cpu_ms of the engine's thread (which others
    on the machine do not stretch). tokens_s: of the run's wall."""

    step_ms: float
    cpu_ms: float
    added_ms: float
    tokens_s: float


async def run(runner: EngineRunner, number: int, sequences: int, tokens: int) -> Run:
    figures = runner.engine.figures
    before = figures.steps, figures.step_s, figures.added_s
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin, cpu = time.perf_counter(), await runner.between_steps(thread_seconds)

    async def read(i: int) -> int:
        # First tokens of its own keep the prefix cache out of the comparison.
        prompt = (3 + i, 5 + number % 200, *range(20, 60))
        events = runner.run(Request(f"{number} {i}", prompt, params))
        return sum([len(e.ids) async for e in events if isinstance(e, Committed)])

    done = sum(await asyncio.gather(*map(read, range(sequences))))
    seconds = time.perf_counter() - begin
    cpu = await runner.between_steps(thread_seconds) - cpu
    steps, step_s, added_s = (
        now - was
        for now, was in zip((figures.steps, figures.step_s, figures.added_s), before, strict=True)
    )
    return Run(1e3 * step_s / steps, 1e3 * cpu / steps, 1e3 * added_s / steps, done / seconds)


def thread_seconds(_: Engine) -> float:
    return time.thread_time()


def member_of(engine: Engine) -> Member:
    config = engine.config
    card = VerifierCard(
        "m",
        engine.target_id,
        "",
        engine.backend_name,
        engine.limits,
        config.block_size,
        config.max_sequences,
        config.max_waiting,
    )
    return Member(Pool.VERIFIER, Replica("v1", "host:1"), card)


async def planned(engine: Engine) -> None:
    while engine.guidance.plan is None:
        await asyncio.sleep(0.01)


def interval(ratios: list[float]) -> dict[str, float]:
    """Geometric mean of paired ratios and its bootstrap 95 % interval (fixed seed)."""
    logs = np.log(np.asarray(ratios))
    rng = np.random.default_rng(0)
    low, high = np.exp(np.quantile(rng.choice(logs, (4000, len(logs))).mean(1), [0.025, 0.975]))
    mean = float(np.exp(logs.mean()))
    return {"ratio": round(mean, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    engine, cost = tiny_engine() if arguments.model == "tiny" else default_engine()
    numbers = count()
    arms: dict[bool, list[Run]] = {True: [], False: []}
    async with (
        service(0 if arguments.share else 19) as (address, pid),
        SchedulingClient([address]) as client,
        EngineRunner(engine) as runner,
    ):

        async def arm(served: bool) -> None:
            async with AsyncExitStack() as stack:
                if served:
                    await stack.enter_async_context(enrol(client, runner, member_of(engine), cost))
                    await planned(engine)
                else:
                    engine.ledger.close()  # as before anybody asked
                arms[served].append(
                    await run(runner, next(numbers), arguments.sequences, arguments.tokens)
                )

        cpu, begin = cpu_seconds(pid), time.perf_counter()
        for i in range(arguments.rounds + 1):
            await arm(bool(i % 2))
            await arm(not i % 2)
        cpu = (cpu_seconds(pid) - cpu) / (time.perf_counter() - begin)
    pairs = [*zip(arms[True], arms[False], strict=True)][1:]  # the first round warms up
    return {
        "model": arguments.model,
        "sequences": arguments.sequences,
        "rounds": len(pairs),
        "shared_cores": arguments.share,
        "step_ms": medians(pairs, "step_ms"),
        "cpu_ms": medians(pairs, "cpu_ms"),
        "added_ms": medians(pairs, "added_ms"),
        "step_time": interval([a.step_ms / b.step_ms for a, b in pairs]),
        "step_cpu": interval([a.cpu_ms / b.cpu_ms for a, b in pairs]),
        "throughput": interval([a.tokens_s / b.tokens_s for a, b in pairs]),
        "service_cpu": round(cpu, 3),
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
    }


def medians(pairs: list[tuple[Run, Run]], name: str) -> dict[str, float]:
    columns = zip(("with", "without"), zip(*pairs, strict=True), strict=True)
    return {arm: round(median(getattr(r, name) for r in runs), 3) for arm, runs in columns}


def cpu_seconds(pid: int) -> float:
    """Of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", choices=("tiny", "default"), default="tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--share", action="store_true", help="the service takes part of the cores")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
    else:
        print(json.dumps(asyncio.run(compare(arguments))))


if __name__ == "__main__":
    main()
