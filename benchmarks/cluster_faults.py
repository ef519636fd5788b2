"""What a fault costs the streams of a cluster: real processes, real gRPC, a real Valkey.

    python -m benchmarks.cluster_faults [--model smollm2-135m] [--runs 10] [--faults FAULT,…]

Two each of scheduler, gateway, verifier and drafter, each `dspark replica` in a process of its own
with one thread. In every run 16 streams (half greedy, half seeded) are under way when the fault
comes. Each answer is compared with the one of an undisturbed run; where it differs, `differs` says
so beside `differs_undisturbed`, of two undisturbed runs: on backends whose kernels depend on the
batch near-ties can fall either way. Stalls are the longest pause of a stream after the fault,
seconds; `machine_stall_s` is the longest one meanwhile of a process that does nothing but look at
the clock beside them. JSON on stdout, a line a run on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tests.deploy.processes import Processes, Replica, cluster, free_ports
from tests.scheduling.door import Door, Mode

from dspark.client import AsyncClient
from dspark.core.replicas import Pool
from dspark.scheduler.store.embedded import binary_path, until_we_die
from dspark.scheduling.client import SchedulingClient

PROMPTS = [
    "What is 17 times 23? Show each step.",
    "Write a Python function that reverses a linked list.",
    "Why is the sky blue?",
    "A train goes 120 km in 90 minutes. How fast is it?",
    "Explain recursion to a child.",
    "List the planets of the solar system with one fact each.",
    "Write a short story about a lighthouse keeper.",
    "How do vaccines work?",
]
STREAMS = 16
# Tokens of each stream that are there when the fault comes.
BEGUN = 8
# Seconds for a cluster to be whole again, and for a run to end.
PATIENCE_S = 120.0


class OwnValkey:
    """A Valkey on a port that stays the same when it is started again."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(until_we_die(command), stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass
class Stream:
    """One answer as it came. times: of each chunk, seconds."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    contiguous: bool = True

    def stall_after(self, moment: float) -> float:
        """The longest pause that ends after `moment`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if b > moment), default=0.0)


async def say(client: AsyncClient, number: int, tokens: int, stream: Stream) -> None:
    sampling: dict[str, Any] = {"temperature": 0.0}
    if number % 2:
        sampling = {"temperature": 0.8, "seed": number}
    try:
        asked = [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]
        async with client.stream(
            asked, max_tokens=tokens, ignore_eos=True, deadline_s=PATIENCE_S, **sampling
        ) as chunks:
            async for chunk in chunks:
                stream.contiguous &= not chunk.ids or chunk.index == len(stream.ids)
                stream.ids += chunk.ids
                stream.times.append(time.monotonic())
    except Exception as error:
        stream.error = f"{type(error).__name__}: {error}"


# A process that sleeps 5 ms at a time, and tells when it slept much longer: when it woke, for how
# long it was away. Times are of the clock that all processes share.
WATCH = """
import time
last = time.monotonic()
while True:
    time.sleep(0.005)
    now = time.monotonic()
    if now - last > 0.05:
        print(now, now - last, flush=True)
    last = now
"""


class Watch:
    """Pauses of the machine itself."""

    def __init__(self, folder: Path) -> None:
        self._told = folder / "watch.log"
        with self._told.open("wb") as out:
            command = until_we_die([sys.executable, "-c", WATCH])
            self._process = subprocess.Popen(command, stdout=out)

    def longest_since(self, moment: float) -> float:
        """Of pauses that ended after `moment`, seconds; none below 0.05 is seen."""
        pauses = [tuple(map(float, line.split())) for line in self._told.read_text().splitlines()]
        return max((away for woke, away in pauses if woke > moment), default=0.0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def until(holds: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)
    raise AssertionError(what)


class Scene:
    """The cluster, and what is done to it. door: in front of the first drafter."""

    def __init__(self, processes: Processes, near: Path, valkey: OwnValkey, watch: Watch) -> None:
        self.processes = processes
        self.valkey = valkey
        self.watch = watch
        self.door: Door | None = None
        self._near = near  # a configuration whose drafter is reached through the door
        self.pools: dict[str, list[Replica]] = {}

    async def start(self, pool: str, at: int) -> None:
        """The replica number `at` of a pool, until it is ready."""
        far = self.processes.file
        through = pool == "drafter" and at == 0
        self.processes.file = self._near if through else far
        try:
            replica = self.processes.start(pool, "--name", f"{pool}-{at}", ready=False)
        finally:
            self.processes.file = far
        self.pools.setdefault(pool, []).insert(at, replica)

        def ready() -> bool:
            assert replica.process.poll() is None, replica.log[-2000:]
            said = replica.out.read_text()
            replica.said = said.rstrip() if "\n" in said else ""
            return bool(replica.said)

        await until(ready, f"the {pool} is not ready")
        if through:
            if self.door is not None:
                await self.door.__aexit__(None, None, None)
            port = int(replica.address.rpartition(":")[2])
            self.door = Door(f"127.0.0.1:{port}", "127.0.0.2", port)
            await self.door.__aenter__()

    async def again(self, pool: str) -> None:
        """In place of the first one, which is gone."""
        self.pools[pool].pop(0)
        await self.start(pool, 0)

    async def whole(self) -> None:
        """Until both schedulers see all six others."""
        for replica in self.pools["scheduler"]:
            async with SchedulingClient([replica.address]) as client:

                async def all_there(client: SchedulingClient = client) -> bool:
                    try:
                        status = await client.status()
                    except Exception:
                        return False
                    seen = [m.member.pool for m in status.members if not m.member.draining]
                    return status.store_away_s is None and all(
                        seen.count(pool) == 2 for pool in Pool
                    )

                await until(all_there, "the cluster is not whole")


Fault = Callable[[Scene], Awaitable[Callable[[], Awaitable[None]]]]


def killing(pool: str) -> Fault:
    async def fault(scene: Scene) -> Callable[[], Awaitable[None]]:
        # A process is gone when its memory is: half a second here, in which streams go on.
        await asyncio.to_thread(scene.pools[pool][0].kill)
        return lambda: scene.again(pool)

    return fault


def stopping(pool: str) -> Fault:
    """SIGSTOP; afterwards it is woken, and goes on under a newer epoch or ends."""

    async def fault(scene: Scene) -> Callable[[], Awaitable[None]]:
        victim = scene.pools[pool][0]
        victim.signal(signal.SIGSTOP)

        async def heal() -> None:
            victim.signal(signal.SIGCONT)
            await asyncio.sleep(1.0)
            if victim.process.poll() is not None:
                await scene.again(pool)

        return heal

    return fault


async def store_killed(scene: Scene) -> Callable[[], Awaitable[None]]:
    await asyncio.to_thread(scene.valkey.kill)

    async def heal() -> None:
        scene.valkey.start()

    return heal


async def black_hole(scene: Scene) -> Callable[[], Awaitable[None]]:
    assert scene.door is not None
    door = scene.door
    door.turn(Mode.SILENT)

    async def heal() -> None:
        door.turn(Mode.OPEN)

    return heal


async def nothing(scene: Scene) -> Callable[[], Awaitable[None]]:
    async def heal() -> None:
        pass

    return heal


FAULTS: dict[str, Fault] = {
    "none": nothing,
    "kill-verifier": killing("verifier"),
    "kill-drafter": killing("drafter"),
    "kill-scheduler": killing("scheduler"),
    "kill-store": store_killed,
    "kill-gateway": killing("gateway"),
    "stop-verifier": stopping("verifier"),
    "stop-drafter": stopping("drafter"),
    "black-hole-drafter": black_hole,
}


async def run(scene: Scene, fault: Fault, tokens: int) -> tuple[list[Stream], float, float]:
    """16 streams with a fault in their midst; when it came; the machine's own pause after it."""
    gateways = [replica.address for replica in scene.pools["gateway"]]
    streams = [Stream() for _ in range(STREAMS)]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(gateways)) for _ in range(4)]
        tasks = [
            asyncio.create_task(say(clients[number % 4], number, tokens, stream))
            for number, stream in enumerate(streams)
        ]
        await until(
            lambda: all(len(s.ids) >= BEGUN or s.error for s in streams), "the streams do not begin"
        )
        moment = time.monotonic()
        heal = await fault(scene)
        await asyncio.gather(*tasks)
    paused = scene.watch.longest_since(moment)
    await heal()
    await scene.whole()
    return streams, moment, paused


async def prefill_rate(scene: Scene) -> float:
    """Tokens a second: of one long prompt that no cache holds, the first token's time."""
    async with AsyncClient([scene.pools["gateway"][0].address]) as client:
        seconds = []
        for number in range(3):
            prompt = [(7 * i + 13 * number) % 200 + 20 for i in range(512)]
            begin = time.monotonic()
            await client.generate(prompt, max_tokens=1, temperature=0.0)
            seconds.append(time.monotonic() - begin)
    return 512 / statistics.median(seconds)


def differing(streams: list[Stream], whole: list[Stream]) -> int:
    return sum(a.ids != b.ids for a, b in zip(streams, whole, strict=True))


@asynccontextmanager
async def scene(arguments: argparse.Namespace, **more: Any) -> AsyncIterator[Scene]:
    """more: sections of the cluster file."""
    valkey = OwnValkey()
    valkey.start()
    engine = {"kv_tokens": 16_384, "max_sequences": 16, "max_step_tokens": 256}
    scheduler, gateway, http = free_ports(3)
    # Ranges of two: a port is the first of as many as there are replicas.
    sections: dict[str, Any] = {
        "name": "faults",
        "served_name": "target",
        "backend": arguments.backend,
        "dtype": arguments.dtype,
        "scheduler": {"replicas": 2, "port": scheduler},
        "gateway": {"replicas": 2, "http_port": http, "grpc_port": gateway},
        "verifier": {"replicas": 2, "threads": 1, "engine": engine},
        "drafter": {"replicas": 2, "threads": 1, "checkpoint": arguments.drafter},
        "drain_s": 5.0,
        **more,
    }
    with (
        tempfile.TemporaryDirectory(prefix="dspark-faults-") as folder,
        cluster(
            Path(folder),
            Path(arguments.model),
            valkey=False,
            environment={"REDIS_URL": valkey.url, **user_cache()},
            **sections,
        ) as processes,
    ):
        near = Path(folder) / "near.yaml"
        told = yaml.safe_load(processes.file.read_text())
        told["drafter"]["advertise"] = "127.0.0.2"
        near.write_text(yaml.safe_dump(told))
        made = Scene(processes, near, valkey, Watch(Path(folder)))
        try:
            for at in range(2):
                for pool in ("scheduler", "verifier", "drafter", "gateway"):
                    await made.start(pool, at)
            await made.whole()
            yield made
        finally:
            if made.door is not None:
                await made.door.__aexit__(None, None, None)
            made.watch.kill()
            valkey.kill()


def user_cache() -> dict[str, str]:
    """The user's own: the target is converted and profiled once."""
    return {"DSPARK_CACHE": os.environ.get("DSPARK_CACHE", str(Path.home() / ".cache" / "dspark"))}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    table: dict[str, Any] = {}
    async with scene(arguments) as made:
        whole, *_ = await run(made, nothing, arguments.tokens)
        again, *_ = await run(made, nothing, arguments.tokens)
        rate = await prefill_rate(made)
        told = {
            "model": arguments.model,
            "backend": arguments.backend,
            "dtype": arguments.dtype,
            "drafter": arguments.drafter,
            "streams": STREAMS,
            "tokens": arguments.tokens,
            "prefill_tokens_per_s": rate,
            "differs_undisturbed": differing(again, whole),
        }
        for name in arguments.faults.split(","):
            rows = []
            for number in range(arguments.runs):
                streams, moment, paused = await run(made, FAULTS[name], arguments.tokens)
                replayed = sum(len(s.ids) for s in streams) / 2
                rows.append(
                    {
                        "lost": [s.error for s in streams if s.error],
                        "short": sum(len(s.ids) != arguments.tokens for s in streams),
                        "not_contiguous": sum(not s.contiguous for s in streams),
                        "differs": differing(streams, whole),
                        "stall_s": max(s.stall_after(moment) for s in streams),
                        "machine_stall_s": paused,
                        "stall_p50_s": statistics.median(s.stall_after(moment) for s in streams),
                        "replayed_at_most": replayed,
                    }
                )
                print(f"{name} {number + 1}/{arguments.runs}: {rows[-1]}", file=sys.stderr)
            table[name] = rows
    return {**told, "faults": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="transformers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--faults", default=",".join(FAULTS))
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
