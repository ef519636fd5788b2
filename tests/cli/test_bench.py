"""`dspark bench serve`: what it counts, how it loads, what it makes of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.cli.bench import report
from dspark.cli.bench.load import (
    Answered,
    Ask,
    Closed,
    Endpoint,
    Load,
    Open,
    Slice,
    Tokens,
    Usage,
    apply,
    arrivals,
    busy_until,
    closed_loop,
    open_loop,
    timed,
)
from dspark.cli.bench.measure import Cell, Plan, measure
from dspark.cli.bench.peers import Server, Trial
from dspark.cli.bench.prompts import asks, context_tokens, read_chats
from dspark.cli.bench.stats import Ratio, paired_ratio, percentiles
from dspark.cli.bench.streams import TokenCount, check_loopback, connected
from dspark.core.errors import ConfigError, InvalidRequest, Unavailable

from . import fake_openai
from .conftest import Ran
from .fake_openai import Body, Reply, fake_server, threes

QUESTION = ({"role": "user", "content": "Why?"},)


def ask(tokens: int) -> Ask:
    return Ask(QUESTION, tokens)


# --- stats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_lie_between_their_neighbours(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count).tolist()
    ordered = sorted(values)
    for name, point in percentiles(values).items():
        at = (count - 1) * int(name[1:]) / 100
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        assert point == pytest.approx(low + (at - math.floor(at)) * (high - low))


def test_paired_ratio_against_every_resample() -> None:
    """With four pairs there are 256 equally likely resamples: the bootstrap's limit."""
    ours, theirs = [3.0, 5.0, 4.4, 4.0], [1.5, 2.0, 2.4, 1.0]
    logs = np.log(np.array(ours) / np.array(theirs))
    means = [np.mean(pick) for pick in itertools.product(logs, repeat=4)]
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    found = paired_ratio(ours, theirs)
    assert found.ratio == pytest.approx(np.exp(logs.mean()))
    assert found.low is not None
    assert found.high is not None
    assert found.low == pytest.approx(low, rel=0.03)
    assert found.high == pytest.approx(high, rel=0.03)
    assert found == paired_ratio(ours, theirs), "the draws are seeded"
    swapped = paired_ratio(theirs, ours)
    assert swapped.low == pytest.approx(1 / found.high, rel=0.03)


def test_drift_that_falls_on_both_arms_leaves_no_interval() -> None:
    drift = [1.0, 2.0, 5.0, 0.3]
    found = paired_ratio([3 * d for d in drift], [2 * d for d in drift])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert found.pairs == 4


def test_one_round_has_no_interval() -> None:
    assert paired_ratio([4.0], [2.0]) == Ratio(2.0, None, None, 1)


# --- tokens, not chunks --------------------------------------------------------------------------


def text(words: str, **more: Any) -> Body:
    return {"choices": [{"delta": {"content": words}, **more}]}


@pytest.mark.parametrize(
    ("events", "counts"),
    [
        (
            [text("a b c", token_ids=[1, 2, 3]), text("", token_ids=[4]), text("", token_ids=[])],
            [3, 1, 0],
        ),
        # llama.cpp holds an emoji until its third token, and the last may only come with the end.
        (
            [
                text("🌟") | {"timings": {"predicted_n": 3}},
                text("!") | {"timings": {"predicted_n": 4}},
                {"choices": [{"delta": {}, "finish_reason": "length"}]},
                {"choices": [], "usage": {}, "timings": {"predicted_n": 6}},
            ],
            [3, 1, 0, 2],
        ),
        ([text("a"), text("b"), {"choices": [{"text": "c"}]}], [1, 1, 1]),
        (
            [{"choices": [{"delta": {"role": "assistant", "content": None}}]}, {"choices": []}],
            [0, 0],
        ),
    ],
)
def test_tokens_of_each_event(events: list[Body], counts: list[int]) -> None:
    count = TokenCount()
    assert [count.of(event) for event in events] == counts


class HandClock:
    """Moved by a script, which can wait until somebody has looked at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looked = asyncio.Event()

    def __call__(self) -> float:
        self._looked.set()
        return self.now

    async def move(self, seconds: float) -> None:
        self.now += seconds
        self._looked.clear()

    async def looked(self) -> None:
        await self._looked.wait()


async def test_an_answer_is_timed_by_tokens_over_http() -> None:
    clock = HandClock()

    async def script(body: Body, reply: Reply) -> None:
        for seconds, ids in ((0.5, [1]), (0.25, [2, 3, 4, 5]), (1.0, [6, 7])):
            await clock.move(seconds)
            await reply.tokens(*ids)
            await clock.looked()
        await reply.usage(9, 7, speculation={"rounds": 3, "accepted": 4})

    async with fake_server(script) as address, connected(address) as endpoint:
        found = await timed(endpoint, ask(7), clock(), clock)
    assert found.arrivals == ((0.5, 1), (0.75, 4), (1.75, 2))
    assert found.ttft_s == 0.5
    assert found.tpot_s == pytest.approx(1.25 / 6), "seven tokens came in three chunks"
    assert found.usage == Usage(9, 7, rounds=3, accepted=4)


async def test_what_is_asked_for() -> None:
    bodies = []

    async def script(body: Body, reply: Reply) -> None:
        bodies.append(body)
        await threes(body, reply)

    for owner in ("dspark", "llamacpp"):
        async with fake_server(script, owner) as address, connected(address) as endpoint:
            await timed(endpoint, ask(4), 0.0, lambda: 1.0)
    ours, llama = bodies
    same = {"model": "fake", "messages": list(QUESTION), "max_tokens": 4, "temperature": 0}
    same |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    assert ours == {**same, "return_token_ids": True}
    assert llama == {**same, "timings_per_token": True}


async def test_events_are_found_however_the_bytes_are_cut() -> None:
    """Also one with U+2028 in it, which some readers take for the end of a line."""
    event = json.dumps(text("\u2028\x85é", token_ids=[1, 2]), ensure_ascii=False).encode()
    end = json.dumps(
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    ).encode()
    whole = b": ping\n\ndata: " + event + b"\r\n\ndata:" + end + b"\n\ndata: [DONE]\n\n"

    async def script(body: Body, reply: Reply) -> None:
        for at in range(len(whole)):
            await reply.raw(whole[at : at + 1])
            await asyncio.sleep(0)

    async with fake_server(script) as address, connected(address) as endpoint:
        assert (await timed(endpoint, ask(2), 0.0, lambda: 1.0)).usage == Usage(1, 2)


async def short(body: Body, reply: Reply) -> None:
    await reply.tokens(1, 2)
    await reply.usage(1, 2)


async def miscounted(body: Body, reply: Reply) -> None:
    await reply.event(text("three tokens, one chunk"))
    await reply.usage(1, 3)


async def cut(body: Body, reply: Reply) -> None:
    await reply.tokens(1, 2, 3)


async def failed(body: Body, reply: Reply) -> None:
    await reply.event({"error": {"message": "out of cheese"}})


@pytest.mark.parametrize(
    ("script", "status", "told"),
    [
        (short, "200 OK", "ended after 2 of 3 tokens"),
        (miscounted, "200 OK", "chunks hold 1 tokens, its usage says 3"),
        (cut, "200 OK", "without its usage"),
        (failed, "200 OK", "out of cheese"),
        (failed, "503 Service Unavailable", "HTTP 503: data: .*out of cheese"),
    ],
)
async def test_an_answer_that_cannot_be_compared_is_refused(
    script: fake_openai.Script, status: str, told: str
) -> None:
    async with fake_server(script, status=status) as address, connected(address) as endpoint:
        with pytest.raises(Unavailable, match=told):
            await apply(Closed(2), endpoint, [ask(3)] * 4)


async def test_no_server_there() -> None:
    async with fake_server(threes) as address:
        pass
    with pytest.raises(Unavailable, match="ConnectError"):
        async with connected(address):
            pass


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:80", "http://example.com", "https://127.0.0.1:1", "127.0.0.1:80", "x"]
)
def test_load_goes_to_this_machine_only(url: str) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        check_loopback(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:80/", "http://localhost:80", "http://[::1]:80"])
def test_loopback_addresses(url: str) -> None:
    assert check_loopback(url) == url.rstrip("/")


# --- loops ---------------------------------------------------------------------------------------


class Gated:
    """An endpoint that answers once its gate says so; who is inside is counted."""

    def __init__(self, gate: Callable[[Gated], AbstractAsyncContextManager[None]]) -> None:
        self.inside = self.most = self.came = 0
        self.changed = asyncio.Condition()
        self._gate = gate

    async def answer(self, ask: Ask) -> AsyncGenerator[Tokens | Usage, None]:
        async with self.changed:
            self.inside += 1
            self.came += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
        async with self._gate(self):
            yield Tokens(ask.max_tokens)
        self.inside -= 1
        yield Usage(1, ask.max_tokens)

    async def until(self, enough: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(enough)


def test_a_closed_loop_counts_until_its_first_user_is_idle() -> None:
    """Two users, three asks: the one who is done at 4 s idles; the other goes on until 9 s."""

    def answered(due: float, *times: float) -> Answered:
        return Answered(due, tuple((t, 1) for t in times), Usage(1, len(times)))

    answers = [answered(0.0, 1.0, 2.0), answered(2.1, 3.0, 4.0), answered(0.0, 3.0, 6.0, 9.0)]
    assert busy_until(answers) == 4.0
    part = Slice(tuple(answers), 9.0, 4.0, 0.01)
    assert part.counted_tokens == pytest.approx(4 + 3 * 4 / 9), "the last by the share of its time"
    assert part.throughput == part.counted_tokens / 4
    assert part.tokens == 7


async def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    @asynccontextmanager
    async def gate(endpoint: Gated) -> AsyncIterator[None]:
        turn = endpoint.came
        await endpoint.until(lambda: endpoint.came >= min(12, 4 * -(-turn // 4)))
        yield

    endpoint = Gated(gate)
    answers = await closed_loop(endpoint, [ask(2)] * 12, 4, lambda: 0.0)
    assert (endpoint.most, endpoint.came, len(answers)) == (4, 12, 12)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Nobody is answered before everybody has asked; and times count from when each was due."""

    @asynccontextmanager
    async def gate(endpoint: Gated) -> AsyncIterator[None]:
        await endpoint.until(lambda: endpoint.came == 20)
        yield

    endpoint = Gated(gate)
    due = arrivals(2000.0, 20, seed=3)
    answers = await open_loop(endpoint, [ask(2)] * 20, due, lambda: 100.0)
    assert endpoint.most == 20
    assert [answer.due for answer in answers] == [100.0 + t for t in due]


def test_arrivals_are_poisson() -> None:
    times = np.array(arrivals(4.0, 20_000, seed=1))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03), "exponential: as wide as it is long"
    assert np.mean(gaps > 0.25) == pytest.approx(math.exp(-1), abs=0.01)
    assert arrivals(4.0, 5, seed=1) == times[:5].tolist()
    assert arrivals(4.0, 5, seed=2) != times[:5].tolist()


class Ticking:
    """An endpoint on a clock of its own: 0.5 s to the first token, 0.1 s for each two further."""

    def __init__(self, tokens_per_s: float = 20.0) -> None:
        self.now = 0.0
        self._pause = 2 / tokens_per_s

    def clock(self) -> float:
        return self.now

    async def answer(self, ask: Ask) -> AsyncGenerator[Tokens | Usage, None]:
        self.now += 0.5
        yield Tokens(1)
        for _ in range((ask.max_tokens - 1) // 2):
            self.now += self._pause
            yield Tokens(2)
        yield Usage(10, ask.max_tokens, rounds=ask.max_tokens // 2, accepted=ask.max_tokens // 2)


async def test_figures_by_hand() -> None:
    endpoint = Ticking()
    found = await apply(Closed(1), endpoint, [ask(11), ask(21)], clock=endpoint.clock)
    assert found.seconds == pytest.approx(0.5 + 5 * 0.1 + 0.5 + 10 * 0.1)
    assert found.throughput == pytest.approx(32 / 2.5)
    facts = report.figures([found, found])
    assert (facts["requests"], facts["prompt_tokens"], facts["completion_tokens"]) == (4, 40, 64)
    assert facts["throughput_tokens_per_s"] == pytest.approx(32 / 2.5)
    assert facts["throughput_by_round"] == [pytest.approx(32 / 2.5)] * 2
    assert facts["ttft_s"] == {p: pytest.approx(0.5) for p in ("p50", "p90", "p99")}
    assert facts["tpot_s"]["p50"] == pytest.approx(0.05)
    assert facts["tokens_per_s_per_user"] == pytest.approx(20)
    assert facts["accepted_length"] == 2.0


# --- rounds --------------------------------------------------------------------------------------


class Scripted:
    """An arm in memory that writes down what is done with it."""

    def __init__(self, name: str, log: list[str], speeds: Iterator[float], most: int = 99) -> None:
        self.name = name
        self._log = log
        self._speeds = speeds
        self._most = most
        self.asked: list[list[Ask]] = []

    def takes(self, load: Load) -> bool:
        return isinstance(load, Open) or load.users <= self._most

    @asynccontextmanager
    async def serve(self, load: Load, trial: Trial) -> AsyncIterator[Server]:
        self._log.append(f"start {self.name}")

        @asynccontextmanager
        async def connect() -> AsyncIterator[Endpoint]:
            self._log.append(f"+{self.name}")
            self.asked.append([])
            yield self
            self._log.append(f"-{self.name}")

        try:
            yield Server(self.name, connect, {"of": self.name})
        finally:
            self._log.append(f"end {self.name}")

    async def answer(self, ask: Ask) -> AsyncGenerator[Tokens | Usage, None]:
        self.asked[-1].append(ask)
        if ask.max_tokens == 64:  # a measured one
            next(self._speeds, None)
        yield Tokens(ask.max_tokens)
        yield Usage(3, ask.max_tokens)


async def test_arms_take_turns_and_are_asked_the_same() -> None:
    log: list[str] = []
    arms = [Scripted(name, log, itertools.repeat(1.0)) for name in "ab"]
    plan = Plan(read_chats(), [Closed(2)], rounds=2, max_tokens=64)
    cells: list[Cell] = []
    await measure(arms, plan, cells, log.append)
    a, b = arms
    turns = [line for line in log if line[0] in "+-"]
    warm_up, rounds = turns[:4], turns[4:]
    assert warm_up == ["+a", "-a", "+b", "-b"]
    assert rounds == ["+a", "-a", "+b", "-b", "+b", "-b", "+a", "-a"], "forwards, then backwards"
    assert log[-2:] == ["end b", "end a"]
    assert a.asked == b.asked
    measured = [ask for turn in a.asked for ask in turn if ask.max_tokens == 64]
    assert len(measured) == 2 * 8
    assert len({json.dumps(ask.messages[0]) for turn in a.asked for ask in turn}) == sum(
        map(len, a.asked)
    ), "no two prompts begin alike"
    assert [set(row) for row in cells[0].rounds] == [{"a", "b"}] * 2


async def test_an_arm_that_cannot_take_a_load_is_left_out() -> None:
    log: list[str] = []
    arms = [Scripted("a", log, itertools.repeat(1.0)), Scripted("b", log, itertools.repeat(1.0), 1)]
    cells: list[Cell] = []
    plan = Plan(read_chats(), [Closed(1), Closed(4), Open(5000.0)], 1, 64)
    await measure(arms, plan, cells, log.append)
    assert [list(cell.rounds[0]) for cell in cells] == [["a", "b"], ["a"], ["a", "b"]]
    found = report.results(cells)
    assert [result["load"] for result in found] == [
        {"kind": "closed", "concurrency": 1},
        {"kind": "closed", "concurrency": 4},
        {"kind": "open", "requests_per_s": 5000.0},
    ]
    assert set(found[0]["ratios"]) == {"b"}
    assert found[1]["ratios"] == {}


async def test_whole_rounds_outlive_a_failure() -> None:
    log: list[str] = []

    def dies() -> Iterator[float]:
        yield from itertools.repeat(1.0, 8 + 3)
        raise Unavailable("it is gone")

    arms = [Scripted("a", log, itertools.repeat(1.0)), Scripted("b", log, dies())]
    cells: list[Cell] = []
    with pytest.raises(Unavailable, match="b: it is gone"):
        await measure(arms, Plan(read_chats(), [Closed(1)], 3, 64), cells, log.append)
    assert len(cells[0].rounds) == 1
    assert log[-2:] == ["end b", "end a"]


# --- prompts -------------------------------------------------------------------------------------


def test_our_own_prompts() -> None:
    chats = read_chats()
    assert len(chats) >= 20
    assert len({json.dumps(chat) for chat in chats}) == len(chats)


def test_every_ask_begins_with_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    system = {"role": "system", "content": "Be brief."}
    file.write_text(
        json.dumps({"prompt": "Why?"}) + "\n" + json.dumps({"messages": [system, *QUESTION]}) + "\n"
    )
    chats = read_chats(file)
    asked = asks(chats, 3, 5, "r1")
    assert asked == asks(chats, 3, 5, "r1")
    assert [a.messages[0]["content"].split("\n")[0] for a in asked] == [
        "Conversation r1-0. You are a helpful assistant.",
        "Conversation r1-1.",
        "Conversation r1-2. You are a helpful assistant.",
    ]
    assert asked[1].messages[0]["content"].endswith("\nBe brief.")
    assert [a.messages[-1]["content"] for a in asked] == ["Why?"] * 3
    assert all(a.max_tokens == 5 for a in asked)
    (last,) = asks(chats, 1, 5, "r2", first=3)
    assert last.messages[0]["content"].endswith("\nBe brief.")
    assert context_tokens(chats, 64) == 512


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("", "holds no prompt"),
        ('{"prompt_ids": [1]}', "has prompt_ids"),
        ('{"prompt": ""}', "is empty"),
        ("no", "is not JSON"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path: Path, lines: str, told: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    with pytest.raises(InvalidRequest, match=told):
        read_chats(file)


# --- reports -------------------------------------------------------------------------------------


def a_slice(seconds: float, prompt_tokens: int = 10) -> Slice:
    answers = [
        Answered(0.0, ((seconds / 2, 1), (seconds, 3)), Usage(prompt_tokens, 4)) for _ in range(2)
    ]
    return Slice(tuple(answers), seconds, seconds, 0.01)


def cells_of(loads: list[Load], prompt_tokens: int = 10) -> list[Cell]:
    arms = {"dspark": {"command": "dspark serve"}, "other": {"settings": {"slots": 4}}}
    return [
        Cell(load, arms, [{"dspark": a_slice(1.0), "other": a_slice(2.0, prompt_tokens)}] * 3)
        for load in loads
    ]


def test_ratios_are_ours_over_theirs() -> None:
    (found,) = report.results(cells_of([Closed(2)]))
    assert found["arms"]["other"]["settings"] == {"slots": 4}
    ratios = found["ratios"]["other"]
    assert ratios["throughput"] == {
        "ratio": pytest.approx(2),
        "low": pytest.approx(2),
        "high": pytest.approx(2),
        "pairs": 3,
    }
    assert ratios["ttft_p50"]["ratio"] == pytest.approx(0.5)
    assert ratios["tpot_p50"]["ratio"] == pytest.approx(0.5)
    assert json.loads(json.dumps(found)) == found


def test_prompts_of_unequal_length_are_told() -> None:
    assert report.warnings(report.results(cells_of([Closed(2)]))) == []
    (line,) = report.warnings(report.results(cells_of([Closed(2)], prompt_tokens=12)))
    assert "{'dspark': 60, 'other': 72} tokens" in line


def test_a_picture_of_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dspark.cli.bench.plot import plot

    both: list[Load] = [Closed(1), Closed(16), Open(2.0)]
    for loads in (both, both[:2], both[2:]):
        file = tmp_path / "bench.png"
        plot(report.results(cells_of(loads)), file)
        assert file.read_bytes().startswith(b"\x89PNG")


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def server_url() -> Iterator[str]:
    """A fake server in a process of its own: the command has this one's event loop for itself."""
    program = [sys.executable, fake_openai.__file__ or ""]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.kill()


def test_bench_of_a_running_server(
    dspark: Callable[..., Ran], server_url: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.svg"
    options = ["--concurrency", "1,3", "--rate", "50", "--rounds", "2", "--max-tokens", "9"]
    ran = dspark("bench", "serve", "--url", server_url, *options, "--plot", picture, "--json")
    told = ran.answer
    assert {"command", "date", "machine", "versions", "rules", "results"} <= set(told)
    assert told["machine"]["hardware"]
    assert told["cut_short"] is None
    name = server_url.removeprefix("http://")
    for result, requests in zip(told["results"], (8, 8, 8), strict=True):
        arm = result["arms"][name]
        assert arm["requests"] == 2 * requests
        assert arm["completion_tokens"] == 9 * 2 * requests
        assert arm["accepted_length"] == 3.0
        assert arm["url"] == server_url
        assert 0 < arm["ttft_s"]["p50"] <= arm["ttft_s"]["p99"]
    assert "round 2 of 2" in ran.err
    assert picture.read_text().startswith("<?xml")
    shown = dspark("bench", "serve", "--url", server_url, "--concurrency", "2", "--rounds", "1")
    assert shown.status == 0
    assert "closed loop, 2 at once" in shown.out


def test_bench_of_our_own_server(dspark: Callable[..., Ran], checkpoint: Path) -> None:
    """Started, measured beside itself without drafts, and ended."""
    options = ["--concurrency", "2", "--rounds", "2", "--requests", "4", "--max-tokens", "24"]
    size = ["--threads", "1", "--kv-tokens", "4096", "--verify", "fixed:7", "--against", "plain"]
    told = dspark("bench", "serve", "--model", checkpoint, *options, *size, "--json").answer
    (result,) = told["results"]
    ours, plain = result["arms"]["dspark"], result["arms"]["plain"]
    assert ours["completion_tokens"] == plain["completion_tokens"] == 2 * 4 * 24
    assert ours["prompt_tokens"] == plain["prompt_tokens"]
    assert ours["accepted_length"] > 1.0, "the tiny model says what it said before"
    assert plain["accepted_length"] in (None, 1.0)
    assert "--drafter none" in plain["command"]
    assert result["ratios"]["plain"]["throughput"]["pairs"] == 2


def test_bench_of_the_native_backend(dspark: Callable[..., Ran], checkpoint: Path) -> None:
    """It is what the server is started with, which knows what it may be asked for."""
    asked = ("--backend", "native", "--dtype", "bfloat16", "--concurrency", "1")
    ran = dspark("bench", "serve", "--model", checkpoint, *asked)
    assert ran.status == 1
    assert "dtype: the native backend has no bfloat16, it has: float32, int8" in ran.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--concurrency", "4,x"], "concurrency: 'x' is not a whole number in [1, 1024]"),
        (["--concurrency", "0"], "concurrency: '0'"),
        (["--rate", "0"], "rate: 0.0 must be above 0"),
        (["--rate", "inf"], "rate: inf must be above 0"),
        (["--against", "vllm"], "against: 'vllm' is not one of: llama.cpp, transformers, plain"),
        (["--url", "http://example.com"], "url: 'http://example.com' must be http://"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--prompts", "/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_options(dspark: Callable[..., Ran], arguments: list[str], told: str) -> None:
    ran = dspark("bench", "serve", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert told in ran.err
