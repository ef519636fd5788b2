"""What the central plan is worth beside verifiers that plan by themselves, on real processes.

    python benchmarks/central_gain.py [--case drafter|tenants|alike] [--pairs 5] [--seconds 15]

Real gRPC, an embedded Valkey, a scheduler, verifiers and a drafter in processes of their own; the
engines are the real ones, on a target whose steps and a drafter whose passes sleep for a known
time, so that what else the machine does matters little. Users ask in a closed loop and never stop;
the arms alternate in the same processes: `central` follows the plans, `local` drops them (the same
library plans, and keeps the tenants' shares at each verifier). Prints tokens a second of all
verifiers, by arm and tenant, and the ratio of paired windows with its spread, as JSON. What is
compared is the objective: the tokens a second that come in the tenants' shares, min_i rate_i / σ_i.

drafter: a drafter that one verifier nearly fills, and a second, slower one whose drafts bring less.
tenants: shares 3:1 at two verifiers of which only one gains by drafts, of one tenant only.
alike: two equal verifiers with drafters of their own, where there is nothing to plan.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import torch

from dspark.core.config import EngineConfig
from dspark.core.drafts import Draft, Drafter, DrafterCard, DraftRequest, NeedContext
from dspark.core.plans import Plan
from dspark.core.replicas import Member, Pool, Replica, VerifierCard
from dspark.core.reports import Report
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingParams
from dspark.drafter import DrafterOffer, DraftingServicer, DraftRunner
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.models.targets.features import FeatureProjection
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.store import EmbeddedValkey, StoreConfig
from dspark.scheduler.store.redis_store import RedisStore
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership
from dspark.scheduling.servicer import SchedulingServicer, WireCodec
from dspark.serving import serve_grpc
from dspark.verifier.adoption import Adoption
from dspark.verifier.engine import Engine
from dspark.verifier.enrolment import enrol
from dspark.verifier.runner import EngineRunner

GAMMA, ANSWER = 7, 24
# A tenant's text stays in a part of the vocabulary of its own, so that a drafter knows whose it is.
PART = 64
SHARES = {"a": 3.0, "b": 1.0}
MOST_B = 4096
# For one window.
TRIES = 4

# By case: drafters of the pool, then verifiers. base_s, token_s: T(B) = base_s + token_s·B.
# stands: by tenant, how likely a draft token is to stand. own: seconds of a drafter's pass in the
# verifier's process, None to draw on the pool. users: of each tenant, at each verifier.
CASES: dict[str, dict[str, Any]] = {
    "drafter": {
        "drafters": [{"tokens_per_s": 900.0, "stands": {"a": 0.9}}],
        "verifiers": [
            {"base_s": 0.04, "token_s": 0.0, "most": 16, "users": {"a": 20}},
            {"base_s": 0.08, "token_s": 0.002, "most": 48, "users": {"a": 56}},
        ],
    },
    "tenants": {
        "drafters": [],
        "verifiers": [
            {"base_s": 0.05, "token_s": 0.0, "most": 8, "users": {"a": 12, "b": 12}},
            {"base_s": 0.02, "token_s": 0.004, "most": 8, "users": {"a": 12, "b": 12}},
        ],
        "own": {"pass_s": 0.002, "stands": {"a": 0.9, "b": 0.02}},
    },
    "alike": {
        "drafters": [],
        "verifiers": [
            {"base_s": 0.05, "token_s": 0.0005, "most": 8, "users": {"a": 12}},
            {"base_s": 0.05, "token_s": 0.0005, "most": 8, "users": {"a": 12}},
        ],
        "own": {"pass_s": 0.002, "stands": {"a": 0.8}},
    },
}


def after(token: int) -> int:
    """The text: what comes after a token."""
    part, place = divmod(token, PART)
    return part * PART + (5 * place + 3) % PART


class Target:
    """A `Backend` whose steps take T(B)."""

    name = target_id = "scripted"
    vocab_size = PART * len(SHARES)
    context_length, block_size, kv_bytes = 4096, 16, 0

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def allocate(self, blocks: int) -> None: ...

    def copy(self, src_block: int, dst_block: int) -> None: ...

    def load_projection(self, projection: FeatureProjection) -> None: ...

    def unload_projection(self, feature_id: str) -> None: ...

    def forward(self, batch: RaggedBatch) -> StepOutput:
        until = time.perf_counter() + self._cost.seconds(0, 0, len(batch.token_ids), 0)
        rows = batch.token_ids[batch.logit_rows].tolist()
        logits = torch.zeros(len(rows), self.vocab_size)
        logits[range(len(rows)), [after(token) for token in rows]] = 1.0
        time.sleep(max(until - time.perf_counter(), 0.0))
        return StepOutput(logits, {})


class ScriptedDrafter:
    """Each token of a tenant's draft stands with the same probability, and its confidence says so.
    A pass takes pass_s + tokens / tokens_per_s."""

    def __init__(
        self, stands: dict[str, float], pass_s: float = 0.0, tokens_per_s: float = math.inf
    ) -> None:
        self.card = DrafterCard("scripted", "scripted", GAMMA)
        self._stands = [stands.get(name, 0.0) for name in SHARES]
        self._pass_s, self._token_s = pass_s, 1 / tokens_per_s
        self._rng = np.random.default_rng(5)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        until = time.perf_counter() + self._pass_s
        until += sum(request.gamma for request in requests) * self._token_s
        drafts: list[Draft | NeedContext] = [self._draft(request) for request in requests]
        time.sleep(max(until - time.perf_counter(), 0.0))
        return drafts

    def _draft(self, request: DraftRequest) -> Draft:
        token = request.tokens[-1]
        p = self._stands[token // PART]
        ids = []
        for stands in (self._rng.random(request.gamma) < p).tolist():
            right = after(token)
            token = right if stands else (right + 1) % PART + right // PART * PART
            ids.append(token)
        logits = np.full(len(ids), math.log(max(p, 0.01) / (1 - max(p, 0.01))), np.float32)
        return Draft(request.session, request.round, tuple(ids), logits)

    def close(self, session: str) -> None: ...


class Deaf(SchedulingClient):
    """Drops plans while `deaf`."""

    deaf = False

    async def follow(self, reports: AsyncIterator[Report]) -> AsyncGenerator[Plan, None]:
        async for plan in super().follow(reports):
            if not self.deaf:
                yield plan


# --- the processes --------------------------------------------------------------------------------


async def scheduler(url: str) -> None:
    # Slower than by default, and patient: a machine that stops it for a second is not the subject.
    config = SchedulerConfig(
        shares=SHARES,
        ttl_s=20.0,
        plan_interval_s=0.1,
        plan_ttl_s=2.0,
        report_ttl_s=4.0,
        lead_ttl_s=5.0,
    )
    async with (
        RedisStore(StoreConfig(url, connect_timeout_s=5.0, answer_timeout_s=5.0)) as store,
        Scheduler(store, WireCodec(), config, "s1") as replica,
        serve_grpc(SchedulingServicer(replica)) as server,
    ):
        say(server.address)
        await commands(lambda line: say("ok"))


async def drafter(name: str, address: str, how: dict[str, Any]) -> None:
    scripted = ScriptedDrafter(how["stands"], tokens_per_s=how["tokens_per_s"])
    async with DraftRunner(scripted) as runner:
        servicer = DraftingServicer(runner, DrafterOffer.of(scripted), Replica(name))
        async with (
            serve_grpc(servicer) as server,
            SchedulingClient([address], call_s=10.0) as client,
        ):
            member = Member(Pool.DRAFTER, Replica(name, server.address), scripted.card)
            async with Membership(client, member, load=runner.load):
                say(server.address)
                await commands(lambda line: say(json.dumps(runner.figures.busy_s)))


async def verifier(name: str, address: str, how: dict[str, Any]) -> None:
    grid = (1, MOST_B)
    table = tuple(how["base_s"] + how["token_s"] * B for B in grid)
    cost = StepCost(grid, table)
    own = how.get("own")
    config = EngineConfig(max_sequences=how["most"], max_step_tokens=MOST_B, verify="top-k")
    drafters: dict[str, Drafter] = {}
    if own is not None:
        drafters["scripted"] = ScriptedDrafter(own["stands"], own["pass_s"])
    engine = Engine(Target(cost), config, OnlineStepCost(cost), drafters=drafters)
    engine.guidance.configured_shares = SHARES
    card = VerifierCard(
        "scripted", "scripted", "", "scripted", engine.limits, 16, how["most"], config.max_waiting
    )
    served: Counter[str] = Counter()

    async def user(runner: EngineRunner, tenant: str, number: int) -> None:
        first = list(SHARES).index(tenant) * PART + number % PART
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        for turn in itertools.count():
            asked = Request(
                f"{tenant}{number}-{turn}", (first, after(first)), sampling, tenant=tenant
            )
            async for event in runner.run(asked):
                if isinstance(event, Committed):
                    served[tenant] += len(event.ids)

    async with AsyncExitStack() as stack:
        runner = await stack.enter_async_context(EngineRunner(engine))
        client = Deaf([address], call_s=10.0)
        await stack.enter_async_context(client)
        adoption = await stack.enter_async_context(Adoption(client, runner, card, name, 30))
        member = Member(Pool.VERIFIER, Replica(name, f"{name}:1"), card)
        await stack.enter_async_context(
            enrol(client, runner, member, cost, on_life=adoption.begin_life, silent_s=1e6)
        )

        def answer(line: str) -> None:
            if line in ("local", "central"):
                client.deaf = line == "local"
            plan = engine.guidance.plan
            figures = {
                "served": dict(served),
                "at": time.perf_counter(),
                "links": len(adoption.links),
            }
            say(json.dumps({**figures, "guided": plan is not None}))

        say("ready")
        users = [
            asyncio.create_task(user(runner, tenant, number))
            for tenant, count in how["users"].items()
            for number in range(count)
        ]
        try:
            await commands(answer)
        finally:
            for task in users:
                task.cancel()
            await asyncio.gather(*users, return_exceptions=True)


def say(line: str) -> None:
    print(line, flush=True)


async def commands(answer: Any) -> None:
    """Answer a line at a time until there are none: whoever asks has ended, however it did."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(answer, line.strip())
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()


ROLES: dict[str, Any] = {"scheduler": scheduler, "drafter": drafter, "verifier": verifier}


# --- the comparison -------------------------------------------------------------------------------


class Child:
    """A process that answers a line with a line. first: what it said when it was ready."""

    first: str

    @classmethod
    @asynccontextmanager
    async def of(cls, role: str, *arguments: str) -> AsyncIterator[Child]:
        child = cls()
        command = (sys.executable, __file__, "--role", json.dumps([role, *arguments]))
        pipe = asyncio.subprocess.PIPE
        child.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            child.first = await child.line()
            yield child
        finally:
            assert child.process.stdin is not None
            child.process.stdin.close()
            try:
                await asyncio.wait_for(child.process.wait(), 10.0)
            except TimeoutError:
                child.process.kill()
                await child.process.wait()

    async def line(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60.0)
        if not line:
            raise RuntimeError("a process has ended")
        return line.decode().strip()

    async def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        return json.loads(await self.line())

    process: asyncio.subprocess.Process


async def window(
    verifiers: Sequence[Child], arm: str, seconds: float, settle_s: float
) -> Counter[str]:
    """Tokens a second by tenant, of all verifiers together. One in which a plan was lost, or found,
    is made again: on a machine that stands still for seconds both happen."""
    for _ in range(TRIES):
        if (rates := await one_window(verifiers, arm, seconds, settle_s)) is not None:
            return rates
    raise RuntimeError(f"{TRIES} windows with the verifiers not {arm}")


async def one_window(
    verifiers: Sequence[Child], arm: str, seconds: float, settle_s: float
) -> Counter[str] | None:
    for child in verifiers:
        await child.ask(arm)
    await asyncio.sleep(settle_s)
    begin = [await child.ask(arm) for child in verifiers]
    await asyncio.sleep(seconds)
    end = [await child.ask(arm) for child in verifiers]
    if not all(told["guided"] == (arm == "central") for told in (*begin, *end)):
        return None
    rates: Counter[str] = Counter()
    for before, now in zip(begin, end, strict=True):
        for tenant, tokens in now["served"].items():
            rates[tenant] += (tokens - before["served"].get(tenant, 0)) / (now["at"] - before["at"])
    return rates


def objective(rates: Counter[str]) -> float:
    """Tokens a second that are in the tenants' shares."""
    asking = sum(SHARES[tenant] for tenant in rates)
    return min(rate * asking / SHARES[tenant] for tenant, rate in rates.items())


async def compare(case: str, pairs: int, seconds: float, settle_s: float) -> dict[str, Any]:
    setting = CASES[case]
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(EmbeddedValkey())
        address = (await stack.enter_async_context(Child.of("scheduler", url))).first
        for i, how in enumerate(setting["drafters"]):
            await stack.enter_async_context(Child.of("drafter", f"d{i}", address, json.dumps(how)))
        verifiers = []
        for i, how in enumerate(setting["verifiers"]):
            told = json.dumps({**how, "own": setting.get("own")})
            verifiers.append(
                await stack.enter_async_context(Child.of("verifier", f"v{i}", address, told))
            )
        async with asyncio.timeout(60.0):
            while not all(
                told["guided"] and told["links"] == len(setting["drafters"])
                for told in [await child.ask("central") for child in verifiers]
            ):
                await asyncio.sleep(0.1)
        arms: dict[str, list[Counter[str]]] = {"local": [], "central": []}
        for pair in range(pairs):
            order = ("local", "central") if pair % 2 == 0 else ("central", "local")
            for arm in order:
                arms[arm].append(await window(verifiers, arm, seconds, settle_s))
    ratios = [
        objective(central) / objective(local)
        for local, central in zip(arms["local"], arms["central"], strict=True)
    ]
    return {
        "case": case,
        "tokens_s": {
            arm: {name: round(statistics.median(w[name] for w in windows), 1) for name in SHARES}
            for arm, windows in arms.items()
        },
        "gain": {
            "median": round(statistics.median(ratios), 4),
            "least": round(min(ratios), 4),
            "most": round(max(ratios), 4),
            "pairs": pairs,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a window")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before each window")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        torch.set_num_threads(1)
        role, *rest = json.loads(arguments.role)
        asyncio.run(ROLES[role](*rest[:2], *map(json.loads, rest[2:])))
        return
    for case in CASES if arguments.case == "all" else (arguments.case,):
        told = asyncio.run(compare(case, arguments.pairs, arguments.seconds, arguments.settle))
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
