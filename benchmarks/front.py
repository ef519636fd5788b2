"""What `dspark serve` costs beside its engine, on the default model; figures as JSON.

    python benchmarks/front.py cost      # HTTP and gRPC streams against the bare engine
    python benchmarks/front.py fairness  # one reader that never reads, and the others' pace
    python benchmarks/front.py start     # from exec to the first token
    python benchmarks/front.py memory    # resident set: idle, KV pool touched, under mixed load

The server is the installed command as a process of its own; the load comes from this process, so on
a small machine the client's own work counts against the server. HTTP is read from a plain socket
and gRPC through the SDK. Arms alternate within a round; ratios are of paired rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import grpc
import httpx
import numpy as np
import psutil
import typer
import uvloop
from engine import REPEATING, facts, interval, out, prompt_sets

from dspark.client import AsyncClient
from dspark.client.request_client import generate_request
from dspark.core.config import EngineConfig
from dspark.core.requests import Request
from dspark.core.sampling import SamplingParams
from dspark.deploy.single import TargetConfig, load
from dspark.v1 import generation_pb2_grpc as pb_grpc
from dspark.verifier.runner import EngineRunner

DSPARK = Path(sys.executable).parent / "dspark"
MB = 2**20
MODEL = TargetConfig().model
# A gRPC connection that takes no more than HTTP/2's first window unread.
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16 - 1))
GENERATED = 'dspark_tokens_total{kind="generated"}'

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Ids = tuple[int, ...]
# Reads a whole stream of so many tokens; when its first and its last came.
Ask = Callable[[Ids, int], Awaitable[tuple[float, float]]]

Model = Annotated[str, typer.Option("--model", help="As for `dspark serve`.")]
Concurrency = Annotated[str, typer.Option(help="Streams at once, with commas between.")]
Protocol = Annotated[str, typer.Option(help="http or grpc.")]


# --- a server and its readers --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    process: psutil.Process
    http: str
    grpc: str

    def resident_mb(self) -> float:
        return round(float(self.process.memory_info().rss) / MB, 1)


@contextmanager
def serving(model: str, **engine: int) -> Iterator[Served]:
    """The command on free ports, up and ready; stopped by SIGTERM at the end."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items()]
    process = subprocess.Popen(
        [DSPARK, "serve", "--model", model, "--http-port=0", "--grpc-port=0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DSPARK_LOG_LEVEL": "warning"},
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        found = re.search(r"http://(\S+) and gRPC (\S+)", said)
        if found is None:
            raise SystemExit(f"the server did not start: {said}")
        yield Served(psutil.Process(process.pid), found[1], found[2])
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def opened(
    address: str,
    body: dict[str, Any],
    *,
    route: str = "completions",
    receive_bytes: int = 0,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which a completion has been asked for. receive_bytes: of the kernel's buffer,
    0 for as many as it likes."""
    host, _, port = address.rpartition(":")
    plug = socket.socket()
    if receive_bytes:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    plug.connect((host, int(port)))
    limit = receive_bytes or 2**16
    reader, writer = await asyncio.open_connection(sock=plug, limit=limit)
    text = json.dumps({"temperature": 0, "ignore_eos": True, "stream": True, **body}).encode()
    writer.write(
        f"POST /v1/{route} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode()
        + text
    )
    return reader, writer


def over_http(address: str) -> Ask:
    async def ask(ids: Ids, tokens: int) -> tuple[float, float]:
        reader, writer = await opened(address, {"prompt": list(ids), "max_tokens": tokens})
        first, line = 0.0, b""
        with closing(writer):
            while not line.startswith(b"data: [DONE]"):
                line = await reader.readline()
                assert line, "the stream ended before the answer did"
                if not first and line.startswith(b"data: "):
                    first = time.perf_counter()
            return first, time.perf_counter()

    return ask


def over_grpc(client: AsyncClient) -> Ask:
    async def ask(ids: Ids, tokens: int) -> tuple[float, float]:
        first, got = 0.0, 0
        async with client.stream(ids, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
            async for chunk in stream:
                first = first or time.perf_counter()
                got += len(chunk.ids)
        assert got == tokens
        return first, time.perf_counter()

    return ask


def in_process(runner: EngineRunner) -> Ask:
    names = iter(range(10**9))

    async def ask(ids: Ids, tokens: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        first = 0.0
        async for _ in runner.run(Request(str(next(names)), ids, params)):
            first = first or time.perf_counter()
        return first, time.perf_counter()

    return ask


async def closed_loop(
    ask: Ask, prompts: Sequence[Ids], tokens: int, at_once: int
) -> list[tuple[float, float]]:
    gate = asyncio.Semaphore(at_once)

    async def one(ids: Ids) -> tuple[float, float]:
        async with gate:
            return await ask(ids, tokens)

    return await asyncio.gather(*map(one, prompts))


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def distinct(texts: Sequence[Ids], count: int) -> list[Ids]:
    """Prompts that share no block of the prefix cache."""
    return [(100 + i, *texts[i % len(texts)]) for i in range(count)]


# --- commands ------------------------------------------------------------------------------------


@app.command()
def cost(
    model: Model = MODEL,
    concurrency: Concurrency = "1,16",
    rounds: int = 8,
    prompts: int = 16,
    max_tokens: int = 96,
    kv_tokens: int = 16_384,
) -> None:
    """Tokens/s of HTTP and gRPC streams over those of the same engine with nothing before it.

    Every arm sees the same prompts in every round, so all of them are cached by the first, which is
    not counted: what is timed is decoding, where the front's share is largest.
    """
    loaded = load(TargetConfig(model=model, engine=EngineConfig(kv_tokens=kv_tokens)))
    texts = next(iter(prompt_sets(loaded, None, len(REPEATING)).values()))

    async def measure(served: Served) -> list[dict[str, Any]]:
        rows = []
        async with EngineRunner(loaded.engine) as runner, AsyncClient(served.grpc) as client:
            arms = {
                "bare": in_process(runner),
                "http": over_http(served.http),
                "grpc": over_grpc(client),
            }
            for at_once in map(int, concurrency.split(",")):
                todo = distinct(texts, max(at_once, prompts))
                speeds: dict[str, list[float]] = {arm: [] for arm in arms}
                for i in range(rounds + 1):
                    turn = [*arms][i % 3 :] + [*arms][: i % 3]
                    for arm in turn:
                        begin = time.perf_counter()
                        await closed_loop(arms[arm], todo, max_tokens, at_once)
                        if i:
                            speed = len(todo) * max_tokens / (time.perf_counter() - begin)
                            speeds[arm].append(speed)
                for arm in ("http", "grpc"):
                    pairs = [a / b for a, b in zip(speeds[arm], speeds["bare"], strict=True)]
                    rows.append({"arm": arm, "concurrency": at_once, **interval(pairs)})
                medians = {arm: round(float(np.median(each)), 1) for arm, each in speeds.items()}
                rows.append({"concurrency": at_once, "median_tokens_per_s": medians})
                out.print(*rows[-3:], sep="\n")
        return rows

    with serving(model, kv_tokens=kv_tokens) as served:
        rows = run(measure(served))
    print(json.dumps({**facts(loaded, "cost"), "max_tokens": max_tokens, "results": rows}))


@asynccontextmanager
async def unread(served: Served, protocol: str, ids: Ids, tokens: int) -> AsyncIterator[bool]:
    """A stream with much to say that nobody reads. Entered when all that may wait for its reader is
    full; False if it came to its end before."""
    async with AsyncExitStack() as stack:
        if protocol == "http":
            # Megabytes, for the kernel's buffers on the loopback hold that much.
            body = {
                "messages": [{"role": "user", "content": REPEATING[0]}],
                "max_tokens": tokens,
                "logprobs": True,
                "top_logprobs": 20,
            }
            _, writer = await opened(
                served.http, body, route="chat/completions", receive_bytes=4096
            )
            stack.callback(writer.transport.abort)
        else:
            options: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "ignore_eos": True}
            request = generate_request(ids, {**options, "temperature": 0, "max_tokens": tokens})
            channel = grpc.aio.insecure_channel(served.grpc, NARROW)
            await stack.enter_async_context(channel)
            call = pb_grpc.GenerationStub(channel).Generate(request)
            await call.read()
        made, before = await metric(served, GENERATED), -1.0
        while before < made or not made:
            await asyncio.sleep(1.0)
            made, before = await metric(served, GENERATED), made
        yield await metric(served, "dspark_requests_running") > 0


@app.command()
def fairness(
    model: Model = MODEL,
    streams: int = 64,
    rounds: int = 6,
    max_tokens: int = 64,
    unread_tokens: int = 4000,
    kv_tokens: int = 32_768,
    protocol: Protocol = "http",
) -> None:
    """Time per output token of all streams but one, when that one is never read and when it is not
    there, and how late the server's event loop came meanwhile.

    By then the unread stream has filled all buffers on its way, and its sequence is paused.
    """
    loaded = load(TargetConfig(model=model, engine=EngineConfig(kv_tokens=1024)))
    texts = next(iter(prompt_sets(loaded, None, len(REPEATING)).values()))
    todo = distinct([text[:48] for text in texts], streams)

    async def pace(ask: Ask) -> float:
        """Milliseconds a token, median of the streams."""
        times = await closed_loop(ask, todo[1:], max_tokens, streams)
        each = [1e3 * (last - first) / (max_tokens - 1) for first, last in times]
        return float(np.median(each))

    async def measure(served: Served) -> dict[str, Any]:
        ratios, paces, stalled = [], [], 0
        async with AsyncClient(served.grpc) as client:
            ask = over_http(served.http) if protocol == "http" else over_grpc(client)
            await pace(ask)  # warms up
            before = await lag(served)
            for i in range(rounds):
                pair = {}
                for arm in ("with", "without") if i % 2 else ("without", "with"):
                    if arm == "with":
                        async with unread(served, protocol, todo[0], unread_tokens) as stuck:
                            pair[arm] = await pace(ask)
                            stalled += stuck
                    else:
                        pair[arm] = await pace(ask)
                out.print(i, {arm: round(ms, 2) for arm, ms in pair.items()})
                ratios.append(pair["with"] / pair["without"])
                paces.append(pair)
            after = await lag(served)
        medians = {
            arm: round(float(np.median([pair[arm] for pair in paces])), 2)
            for arm in ("without", "with")
        }
        late = {bound: after[bound] - before[bound] for bound in after}
        return {
            "tpot_ms": medians,
            "tpot": interval(ratios),
            "rounds_with_a_stalled_reader": stalled,
            "loop_lag_p99_ms": round(1e3 * quantile(late, 0.99), 2),
            "loop_lag_samples": int(late[float("inf")]),
        }

    with serving(model, kv_tokens=kv_tokens) as served:
        figures = run(measure(served))
    setting = {"streams": streams, "protocol": protocol, "unread_tokens": unread_tokens}
    print(json.dumps({**facts(loaded, "fairness"), **setting, "results": figures}))


async def metrics(served: Served) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://{served.http}/metrics")).text


async def metric(served: Served, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", await metrics(served), re.M)
    return float(found[1]) if found else 0.0


async def lag(served: Served) -> dict[float, float]:
    """Looks at the event loop that were at most so many seconds late, by that bound."""
    bucket = r'^dspark_event_loop_lag_seconds_bucket\{le="(.+)"\} (\S+)'
    found = re.findall(bucket, await metrics(served), re.M)
    return {float(bound): float(count) for bound, count in found}


def quantile(cumulative: dict[float, float], q: float) -> float:
    """Seconds, linear inside a bucket; inf beyond the last bound."""
    due, below, under = q * cumulative[float("inf")], 0.0, 0.0
    for bound, count in sorted(cumulative.items()):
        if count >= due:
            share = (due - under) / (count - under) if count > under else 1.0
            return bound if bound == float("inf") else below + share * (bound - below)
        below, under = bound, count
    return float("inf")


@app.command()
def start(model: Model = MODEL, runs: int = 3) -> None:
    """Seconds from the exec of `dspark serve` to its ready line and to a first streamed token.

    The checkpoint is converted and the step's cost measured by a start that is not counted.
    """
    loaded = load(TargetConfig(model=model, engine=EngineConfig(kv_tokens=1024)))
    ids = loaded.tokenizer.encode("Why is the sky blue?")
    with serving(model):
        pass
    rows = []
    for _ in range(runs):
        begin = time.perf_counter()
        with serving(model) as served:
            ready = time.perf_counter()
            first, _ = run(over_http(served.http)(ids, 2))
            rows.append(
                {"ready_s": round(ready - begin, 2), "first_token_s": round(first - begin, 2)}
            )
        out.print(rows[-1])
    print(json.dumps({**facts(loaded, "start"), "results": rows}))


@app.command()
def memory(
    model: Model = MODEL,
    minutes: float = 10.0,
    every_s: float = 5.0,
    clients: int = 8,
    kv_tokens: int = 65_536,
    prompt_tokens: int = 1024,
) -> None:
    """Resident MB of the server: ready, with every KV block written once, and then under mixed load
    of both protocols; the slope is a straight line's through the second half of that."""
    loaded = load(TargetConfig(model=model, engine=EngineConfig(kv_tokens=1024)))
    vocab = loaded.engine.limits.vocab_size
    rng = random.Random(0)

    def words(count: int) -> Ids:
        return tuple(rng.randrange(100, vocab) for _ in range(count))

    async def measure(served: Served) -> dict[str, Any]:
        ask, samples = over_http(served.http), []
        await ask(words(8), 8)
        idle = served.resident_mb()
        prompts = [words(prompt_tokens) for _ in range(-(-kv_tokens // prompt_tokens))]
        await closed_loop(ask, prompts, 1, 4)
        touched = served.resident_mb()
        out.print({"idle_mb": idle, "touched_mb": touched})
        begin = time.perf_counter()
        until = begin + 60 * minutes
        async with AsyncClient(served.grpc) as client:
            load = [
                asyncio.create_task(mixed(served, client, words, random.Random(i), until))
                for i in range(clients)
            ]
            while time.perf_counter() < until:
                await asyncio.sleep(every_s)
                samples.append(((time.perf_counter() - begin) / 60, served.resident_mb()))
            answers = sum(await asyncio.gather(*load))
        late = np.array(samples[len(samples) // 2 :])
        slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) if len(late) > 1 else 0.0
        return {
            "idle_mb": idle,
            "touched_mb": touched,
            "loaded_mb": {
                "first": samples[0][1],
                "last": samples[-1][1],
                "most": max(mb for _, mb in samples),
            },
            "slope_mb_per_minute": round(slope, 3),
            "minutes": minutes,
            "answers": answers,
        }

    with serving(model, kv_tokens=kv_tokens) as served:
        figures = run(measure(served))
    print(json.dumps({**facts(loaded, "memory"), "kv_tokens": kv_tokens, "results": figures}))


async def mixed(
    served: Served,
    client: AsyncClient,
    words: Callable[[int], Ids],
    rng: random.Random,
    until: float,
) -> int:
    """One client's life: short and long prompts, both protocols, all kinds of sampling, and every
    fourth answer left unread. Returns how many calls it made."""
    calls = 0
    while time.perf_counter() < until:
        calls += 1
        ids, tokens = words(rng.choice((4, 60, 400))), rng.choice((4, 32, 128))
        leaves = rng.random() < 0.25
        if rng.random() < 0.5:
            kinds: list[dict[str, Any]] = [
                {"temperature": 0.0},
                {"temperature": 0.8, "seed": rng.randrange(99)},
                {"top_p": 0.9, "logprobs": True, "top_logprobs": 3},
                {"n": 2, "presence_penalty": 0.5},
            ]
            async with client.stream(ids, max_tokens=tokens, **rng.choice(kinds)) as stream:
                async for _ in stream:
                    if leaves:
                        break
        else:
            body = {"prompt": list(ids), "max_tokens": tokens, "temperature": rng.random()}
            reader, writer = await opened(served.http, body)
            with closing(writer):
                while await reader.readline() and not leaves:
                    pass
    return calls


if __name__ == "__main__":
    app()
