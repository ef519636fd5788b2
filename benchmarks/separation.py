"""What it costs to have the drafter in another process: the default model, over loopback.

    python benchmarks/separation.py [--drafter auto|ngram|random|DIR] [--concurrency 1,8,16]
        [--backend native --dtype int8]

Three arms, one after another within a round so that drift of a shared machine cancels:
  split      the drafter in a process of its own, one thread each
  together   both in one process at the same thread split: one thread each, one after the other
  free       both in one process with all threads
Each arm's engine lives through the whole run, as a replica does: what it has learnt of its drafter
and of its requests stays. Event loops are uvloop's, as those of Ray's actors are. The prompts are
those of `dspark bench`, other ones in each round. `random` is a dspark drafter of two layers with
random weights: nothing of it is accepted, so blocks of a fixed length are verified, which costs
what good ones would. Printed: tokens a second of each arm, paired ratios of split to the others,
and of split: bytes and messages a token, the share of time that the engine stood still for drafts,
mean reply time, rounds that were asked for, groups; of together: what a draft takes there.
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
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # two teams of threads must not spin each other out

import torch
import uvloop
from smollm2_shape import drafter_config

from dspark.cli.bench.prompts import read_chats
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
GAMMA = 6
KV_TOKENS = 16_384


def make_drafter(kind: str, precision: str | None, threads: int) -> Drafter:
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
        native = None if precision is None else NativeDraftOptions(precision, threads=threads)
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
    uvloop.run(_draft(make_drafter(kind, precision, 1), told))


async def _draft(drafter: Drafter, told: Connection) -> None:
    from dspark.drafter import DrafterOffer, DraftingServicer, DraftRunner
    from dspark.serving import serve_grpc

    async with DraftRunner(drafter) as runner:
        servicer = DraftingServicer(runner, DrafterOffer.of(drafter), Replica("d1"))
        async with serve_grpc(servicer, drain_s=0.0) as server:
            told.send(server.address)
            await asyncio.Event().wait()


class Arm:
    """An engine on a target of its own. threads: of the target and, beside it, of the drafter."""

    def __init__(self, args: argparse.Namespace, threads: int, *, drafts: bool) -> None:
        config = EngineConfig(
            gamma=GAMMA, verify=args.verify, max_sequences=32, kv_tokens=KV_TOKENS
        )
        self.threads = threads
        self.target = TargetConfig(
            backend=args.backend, dtype=args.dtype, drafter="none", threads=threads, engine=config
        )
        self.loaded: Loaded = load(self.target)
        self.drafter = make_drafter(args.drafter, args.precision, threads) if drafts else None
        projection = getattr(self.drafter, "projection", None)
        if projection is not None:
            self.loaded.backend.load_projection(projection)
        drafters = {} if self.drafter is None else {self.drafter.card.kind: self.drafter}
        cost = OnlineStepCost(self.loaded.cost)
        self.engine = Engine(self.loaded.backend, config, cost, drafters=drafters)
        self.runner = EngineRunner(self.engine)

    async def tokens_per_s(self, prompts: list[tuple[int, ...]], tokens: int, tag: str) -> float:
        """Of as many requests at once, from the first token of the last of them to the end of the
        first: all decode."""
        torch.set_num_threads(self.threads)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begun: list[float] = []
        counted = [0]
        over = asyncio.Event()
        ends: list[float] = []

        async def one(i: int, prompt: tuple[int, ...]) -> None:
            first = True
            async for event in self.runner.run(Request(f"{tag}/{i}", prompt, params)):
                if isinstance(event, Committed):
                    if first:
                        begun.append(time.monotonic())
                        first = False
                    if len(begun) == len(prompts) and not over.is_set():
                        counted[0] += len(event.ids)
            if not over.is_set():
                over.set()
                ends.append(time.monotonic())

        await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
        return counted[0] / max(ends[0] - max(begun), 1e-9)


@asynccontextmanager
async def linked(arm: Arm, address: str) -> AsyncIterator[Any]:
    """The drafter at an address drafts for an arm's engine."""
    from dspark.drafter import RemoteDrafter, VerifierFacts

    bell, backend = arm.runner.bell(), arm.loaded.backend
    facts = VerifierFacts("v1", 1, backend.target_id, backend.vocab_size, "", 30)
    async with RemoteDrafter(Replica("d1", address), facts, bell) as link:
        projection = await link.fetch_projection() if link.card.feature_id else None
        await arm.runner.between_steps(
            lambda e: e.adopt("d1", link, projection, link.calibration, bell)
        )
        yield link
        await arm.runner.between_steps(lambda e: e.dismiss("d1"))


def figures(arm: Arm, link: Any) -> dict[str, float]:
    """Running counts of split."""
    wire, engine = link.figures, arm.engine.figures
    return {
        "bytes": wire.bytes_sent + wire.bytes_received,
        "messages": wire.messages_sent + wire.messages_received,
        "tokens": engine.committed_tokens,
        "rounds": engine.speculation.rounds,
        "accepted": engine.speculation.accepted,
        "drafts": arm.engine.desk.answers["used"],
        "given_up": arm.engine.desk.answers["given up"],
        "waited_s": engine.draft_wait_s,
        "time": time.monotonic(),
    }


async def measure(args: argparse.Namespace, address: str) -> None:
    arms = {
        "split": Arm(args, 1, drafts=False),
        "together": Arm(args, 1, drafts=True),
        "free": Arm(args, len(os.sched_getaffinity(0)), drafts=True),
    }
    tokenizer = arms["split"].loaded.tokenizer
    chats = [tuple(tokenizer.chat(list(chat))) for chat in read_chats()]
    async with AsyncExitStack() as stack:
        for arm in arms.values():
            await stack.enter_async_context(arm.runner)
        link = await stack.enter_async_context(linked(arms["split"], address))
        for users in map(int, args.concurrency.split(",")):
            rates: dict[str, list[float]] = {arm: [] for arm in arms}
            spent: dict[str, float] = {}
            for round_ in range(args.rounds + 1):
                asked = [chats[(round_ * users + i) % len(chats)] for i in range(users)]
                for name, arm in arms.items():
                    before = figures(arms["split"], link)
                    rate = await arm.tokens_per_s(asked, args.tokens, f"{users}/{round_}")
                    after = figures(arms["split"], link)
                    if round_ and name == "split":  # the first round warms up
                        for key, value in after.items():
                            spent[key] = spent.get(key, 0.0) + value - before[key]
                    if round_:
                        rates[name].append(rate)
            print(json.dumps(row(users, rates, spent, arms)), flush=True)


def row(
    users: int, rates: dict[str, list[float]], spent: dict[str, float], arms: dict[str, Arm]
) -> dict[str, Any]:
    def ratios(arm: str) -> list[float]:
        pairs = zip(rates["split"], rates[arm], strict=True)
        return sorted(round(split / other, 3) for split, other in pairs)

    def draft_ms(arm: str) -> float:
        (source,) = arms[arm].engine.drafters.values()
        return round(1e3 * source.cost.seconds(users), 3)

    return {
        "concurrency": users,
        "tokens_per_s": {arm: round(statistics.median(seen), 1) for arm, seen in rates.items()},
        "split_by": {
            arm: [statistics.median(ratios(arm)), ratios(arm)] for arm in arms if arm != "split"
        },
        "bytes_a_token": round(spent["bytes"] / spent["tokens"]),
        "messages_a_token": round(spent["messages"] / spent["tokens"], 3),
        "waiting": round(spent["waited_s"] / spent["time"], 3),
        "draft_ms": {arm: draft_ms(arm) for arm in arms},
        "drafted_rounds": round(spent["drafts"] / max(spent["rounds"], 1), 3),
        "given_up": spent["given_up"],
        "accepted_a_round": round(spent["accepted"] / max(spent["rounds"], 1), 3),
        "groups": arms["split"].engine.pacing.groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", default="auto", help="auto, ngram, random or a directory")
    parser.add_argument("--backend", default="transformers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--verify", default="")
    parser.add_argument("--concurrency", default="1,8,16")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=6)
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
        uvloop.run(measure(args, ours.recv()))
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    main()
