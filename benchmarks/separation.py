"""What it costs to have the drafter in another process: the default model, over loopback.

    python benchmarks/separation.py [--drafter auto|ngram|random|DIR] [--concurrency 1,8,16]
        [--backend native --dtype int8]

Three arms, one after another within a round so that drift of a shared machine cancels:
  split      the drafter in a process of its own, one thread each
  together   both in one process at the same thread split: one thread each, one after the other
  free       both in one process with all threads (transformers only)
`random` is a dspark drafter of two layers with random weights: nothing of it is accepted, so blocks
of a fixed length are verified, which costs what good ones would. Printed: tokens a second of each
arm, paired ratios of split to the others, and of split: bytes and messages a token, the share of
time that the engine stood still for drafts, mean reply time, groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # two teams of threads must not spin each other out

import torch
from smollm2_shape import drafter_config

from dspark.core.config import EngineConfig
from dspark.core.drafts import Drafter
from dspark.core.replicas import Replica
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingParams
from dspark.deploy.single import Loaded, TargetConfig, load
from dspark.models.drafters.shipped import chosen_drafter
from dspark.scheduler import OnlineStepCost
from dspark.verifier.engine import Engine
from dspark.verifier.runner import EngineRunner

MODEL = "smollm2-135m"
GAMMA = 5
TEXT = (
    "Repeat this text word for word, three times: the harbour master keeps a list of every boat "
    "that enters or leaves. Each entry has a name, a flag, a draught in metres and the hour."
)


def make_drafter(kind: str, precision: str | None) -> Drafter:
    """The same in every process that makes it. precision: of the native kernels; None for torch."""
    from dspark.models.drafters import NgramDrafter, load_drafter
    from dspark.models.drafters.native import NativeDraftOptions

    if kind == "ngram":
        return NgramDrafter(GAMMA)
    from dspark.models import resolve
    from dspark.models.drafters.checkpoint import DrafterCheckpoint
    from dspark.models.drafters.drafting import ModelDrafter
    from dspark.models.drafters.kinds import new_drafter
    from dspark.models.drafters.target_tensors import TargetTensors

    tensors = TargetTensors.read(resolve(MODEL))
    if kind != "random":
        native = None if precision is None else NativeDraftOptions(precision, threads=1)
        return load_drafter(kind, tensors, native=native)
    vocabulary, width = tensors.embedding.shape
    torch.manual_seed(0)
    config = drafter_config(
        gamma=GAMMA, vocab_size=vocabulary, hidden_size=width, target_layers=tensors.layers
    )
    return ModelDrafter(DrafterCheckpoint(new_drafter(config, tensors, None), "bench"))


def draft(kind: str, precision: str | None, told: Connection) -> None:
    """The other process: a drafter replica, until it is killed."""
    torch.set_num_threads(1)
    asyncio.run(_draft(make_drafter(kind, precision), told))


async def _draft(drafter: Drafter, told: Connection) -> None:
    from dspark.drafter import DrafterOffer, DraftingServicer, DraftRunner
    from dspark.serving import serve_grpc

    async with DraftRunner(drafter) as runner:
        servicer = DraftingServicer(runner, DrafterOffer.of(drafter), Replica("d1"))
        async with serve_grpc(servicer, drain_s=0.0) as server:
            told.send(server.address)
            await asyncio.Event().wait()


class Bench:
    """A loaded target, and an engine on it for each arm."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        engine = EngineConfig(gamma=GAMMA, verify=args.verify, max_sequences=32)
        target = TargetConfig(
            backend=args.backend, dtype=args.dtype, drafter="none", threads=1, engine=engine
        )
        self.loaded: Loaded = load(target)
        self.ids = self.loaded.tokenizer.encode(TEXT)

    def engine(self, drafter: Drafter | None) -> Engine:
        config, cost = self.loaded.config.engine, OnlineStepCost(self.loaded.cost)
        drafters = {} if drafter is None else {drafter.card.kind: drafter}
        projection = getattr(drafter, "projection", None)
        if projection is not None:
            self.loaded.backend.load_projection(projection)
        return Engine(self.loaded.backend, config, cost, drafters=drafters)

    @asynccontextmanager
    async def together(self, threads: int) -> AsyncIterator[EngineRunner]:
        torch.set_num_threads(threads)
        async with EngineRunner(
            self.engine(make_drafter(self.args.drafter, self.args.precision))
        ) as runner:
            yield runner

    @asynccontextmanager
    async def split(self, address: str) -> AsyncIterator[tuple[EngineRunner, Any]]:
        from dspark.drafter import RemoteDrafter, VerifierFacts

        torch.set_num_threads(1)
        async with EngineRunner(self.engine(None)) as runner:
            bell, backend = runner.bell(), self.loaded.backend
            facts = VerifierFacts("v1", 1, backend.target_id, backend.vocab_size, "", 30)
            async with RemoteDrafter(Replica("d1", address), facts, bell) as link:
                reads = bool(link.card.feature_id)
                projection = await link.fetch_projection() if reads else None
                await runner.between_steps(
                    lambda e: e.adopt("d1", link, projection, link.calibration, bell)
                )
                yield runner, link
                await runner.between_steps(lambda e: e.dismiss("d1"))

    async def tokens_per_s(self, runner: EngineRunner, users: int, round_: int) -> float:
        """Of `users` requests at once, from the first token of the last of them to the end of the
        first: all decode."""
        params = SamplingParams(temperature=0.0, max_tokens=self.args.tokens, ignore_eos=True)
        begun: list[float] = []
        counted = [0]
        over = asyncio.Event()
        ends: list[float] = []

        async def one(i: int) -> None:
            prompt = (*self.ids, self.ids[(i + round_) % len(self.ids)])
            first = True
            async for event in runner.run(Request(f"{round_}/{i}", prompt, params)):
                if isinstance(event, Committed):
                    if first:
                        begun.append(time.monotonic())
                        first = False
                    if len(begun) == users and not over.is_set():
                        counted[0] += len(event.ids)
            if not over.is_set():
                over.set()
                ends.append(time.monotonic())

        await asyncio.gather(*(one(i) for i in range(users)))
        return counted[0] / max(ends[0] - max(begun), 1e-9)


async def measure(args: argparse.Namespace, address: str) -> list[dict[str, Any]]:
    bench = Bench(args)
    arms = {"together": 1}
    if args.backend == "transformers":  # native threads are chosen once, when it is opened
        arms["free"] = len(os.sched_getaffinity(0))
    rows = []
    for users in map(int, args.concurrency.split(",")):
        rates: dict[str, list[float]] = {arm: [] for arm in ("split", *arms)}
        wire: dict[str, float] = {}
        for round_ in range(args.rounds + 1):
            async with bench.split(address) as (runner, link):
                begin = time.monotonic()
                rate = await bench.tokens_per_s(runner, users, round_)
                engine = runner.engine
                tokens = engine.figures.committed_tokens
                wire = {
                    "bytes_a_token": (link.figures.bytes_sent + link.figures.bytes_received)
                    / tokens,
                    "messages_a_token": (
                        link.figures.messages_sent + link.figures.messages_received
                    )
                    / tokens,
                    "waiting": engine.figures.draft_wait_s / (time.monotonic() - begin),
                    "reply_ms": 1e3 * link.figures.reply_s,
                    "accepted_length": engine.figures.speculation.accepted_length,
                    "given_up": engine.desk.answers["given up"],
                    "groups": engine.pacing.groups,
                }
                rates["split"].append(rate)
            for arm, threads in arms.items():
                async with bench.together(threads) as runner:
                    rates[arm].append(await bench.tokens_per_s(runner, users, round_))
        kept = {arm: seen[1:] for arm, seen in rates.items()}  # the first round warms up
        rows.append(
            {
                "concurrency": users,
                "tokens_per_s": {arm: statistics.median(seen) for arm, seen in kept.items()},
                "split_by": {
                    arm: statistics.median(
                        a / b for a, b in zip(kept["split"], kept[arm], strict=True)
                    )
                    for arm in arms
                },
                **wire,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", default="auto", help="auto, ngram, random or a directory")
    parser.add_argument("--backend", default="transformers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--verify", default="")
    parser.add_argument("--concurrency", default="1,8,16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.verify = args.verify or ("fixed:3" if args.drafter == "random" else "early-stop")
    args.drafter = chosen_drafter(args.drafter, MODEL)
    args.precision = args.dtype if args.backend == "native" else None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=draft, args=(args.drafter, args.precision, theirs), daemon=True
    )
    process.start()
    try:
        if not ours.poll(120):
            raise SystemExit("the drafter did not start within 120 s")
        asyncio.run(measure(args, ours.recv()))
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    main()
