"""`dspark bench serve`: this server under load, next to others on the same machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.console import say
from dspark.core.errors import ConfigError, DsparkError, InvalidRequest

if TYPE_CHECKING:
    from dspark.cli.bench.load import Load
    from dspark.cli.bench.measure import Cell, Plan
    from dspark.cli.bench.peers import Arm

LOAD = "Load"
MOST_USERS = 1024
DEFAULT_CONCURRENCY = "1,4,16,64"
PEERS = ("llama.cpp", "transformers", "plain")


def serve(
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            help=f"Closed loops of so many users; {DEFAULT_CONCURRENCY} where no --rate is given.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            help="An open loop: requests a second, at random; may be repeated.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            help="Requests of an arm in a round; default two a user, at least 8.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=2, help="Tokens of every answer.", rich_help_panel=LOAD),
    ] = 64,
    rounds: Annotated[
        int,
        typer.Option("--rounds", min=1, help="Turns of each arm.", rich_help_panel=LOAD),
    ] = 5,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='{"prompt": …} or {"messages": …} lines; default: some of our own.',
            rich_help_panel=LOAD,
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            min=1,
            help="Seconds for all; what is measured by then is reported.",
            rich_help_panel=LOAD,
        ),
    ] = 7200,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="Others to measure beside it: llama.cpp (at the best of a sweep that is printed; "
            "the model's own GGUF and Q8_0), transformers (generate, at concurrency 1), plain "
            "(this server without drafts).",
            rich_help_panel=LOAD,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Measure a server that runs already on this machine, instead of starting one.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=options.OUTPUT)
    ] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Write a picture here.", rich_help_panel=options.OUTPUT),
    ] = None,
    model: options.Model = "smollm2-135m",
    drafter: options.DrafterName = "auto",
    gamma: options.Gamma = 7,
    verify: options.Verify = "early-stop",
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    threads: options.Threads = 0,
    kv_tokens: options.KVTokens = 65_536,
) -> None:
    """Tokens/s, time to first token and time per token of `dspark serve` under load.

    Starts the servers it measures on loopback, one at a time on the cores, and ends them whatever
    happens. Answers are greedy and of equal length; --threads holds for every arm.
    """
    _check_extras(against, plot_file)
    from dspark.cli.bench.measure import Plan
    from dspark.cli.bench.prompts import OWN, read_chats

    chats = read_chats(prompts or OWN)
    plan = Plan(chats, _loads(concurrency, rate), rounds, max_tokens, requests)
    flags: dict[str, str | int] = {
        "model": model,
        "backend": backend,
        "dtype": dtype,
        "threads": threads,
        "kv-tokens": kv_tokens,
        "drafter": drafter,
        "gamma": gamma,
        "verify": verify,
    }
    arms = [_ours(url, flags), *_others(against, flags, plan)]
    _run(arms, plan, time_limit, as_json=as_json, plot_file=plot_file)


def _run(
    arms: Sequence[Arm], plan: Plan, time_limit: float, *, as_json: bool, plot_file: Path | None
) -> None:
    """Measure and report; what was measured before a failure is reported too."""
    from rich.console import Console

    from dspark.cli.bench import report

    facts = report.surroundings()
    cells: list[Cell] = []
    failure: DsparkError | None = None
    cut_short: str | None = None
    try:
        asyncio.run(_measured(arms, plan, cells, time_limit))
    except TimeoutError:
        cut_short = f"the time limit of {time_limit:g} s"
    except DsparkError as error:
        failure, cut_short = error, str(error)
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    found = report.results(cells)
    if failure is not None and not found:
        raise failure
    if plot_file is not None and found:
        from dspark.cli.bench.plot import plot

        plot(found, plot_file)
    if as_json:
        facts |= {"rounds": plan.rounds, "max_tokens": plan.max_tokens, "cut_short": cut_short}
        typer.echo(json.dumps({**facts, "results": found}))
    else:
        report.show(found, Console(highlight=False, markup=False, emoji=False))
    for line in report.warnings(found):
        say(line, style="red")
    if failure is not None:
        raise failure
    if cut_short is not None:
        say(f"cut short by {cut_short}", style="red")


async def _measured(arms: Sequence[Arm], plan: Plan, cells: list[Cell], time_limit: float) -> None:
    """Raises TimeoutError at the limit. SIGTERM and SIGHUP end it as Ctrl-C does: in order."""
    from dspark.cli.bench.measure import measure

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with asyncio.timeout(time_limit):
        await measure(arms, plan, cells, say)


def parse_users(text: str) -> list[int]:
    """Of `1,4,16`; else InvalidRequest."""
    found = []
    for word in text.split(","):
        try:
            users = int(word)
        except ValueError:
            users = 0
        if not 1 <= users <= MOST_USERS:
            raise InvalidRequest("concurrency", word, f"is not a whole number in [1, {MOST_USERS}]")
        found.append(users)
    return found


def _loads(concurrency: str | None, rates: Sequence[float] | None) -> list[Load]:
    from dspark.cli.bench.load import Closed, Open

    loads: list[Load] = []
    if concurrency is not None or not rates:
        loads += map(Closed, parse_users(concurrency or DEFAULT_CONCURRENCY))
    for rate in rates or ():
        if not 0 < rate < float("inf"):
            raise InvalidRequest("rate", rate, "must be above 0 requests a second")
        loads.append(Open(rate))
    return loads


def _ours(url: str | None, flags: Mapping[str, str | int]) -> Arm:
    from dspark.cli.bench.peers import Running, ours
    from dspark.cli.bench.streams import check_loopback

    if url is not None:
        here = check_loopback(url)
        return Running(here.removeprefix("http://"), here)
    return ours("dspark", flags)


def _others(against: str | None, flags: Mapping[str, str | int], plan: Plan) -> list[Arm]:
    from dspark.cli.bench.peers import Transformers, ours

    arms: list[Arm] = []
    for name in against.split(",") if against else ():
        if name == "llama.cpp":
            arms += _llama_cpp(flags, plan)
        elif name == "transformers":
            dtype, threads = str(flags["dtype"]), int(flags["threads"])
            arms.append(Transformers(str(flags["model"]), dtype, threads))
        elif name == "plain":
            arms.append(ours("plain", {**flags, "drafter": "none"}))
        else:
            raise InvalidRequest("against", name, f"is not one of: {', '.join(PEERS)}")
    return arms


def _llama_cpp(flags: Mapping[str, str | int], plan: Plan) -> list[Arm]:
    """One arm for the model's own GGUF file, one for its weights in Q8_0."""
    from dspark.cli.bench.gguf_copies import in_q8_0, kind, original
    from dspark.cli.bench.llama_cpp import LlamaCpp
    from dspark.cli.bench.prompts import context_tokens
    from dspark.models.cache import default_cache

    own = original(str(flags["model"]), default_cache(), say)
    files = {kind(own): own} | {"q8_0": in_q8_0(own, default_cache(), say)}
    context = context_tokens(plan.chats, plan.max_tokens)
    threads = int(flags["threads"]) or len(os.sched_getaffinity(0))
    return [
        LlamaCpp(f"llama.cpp-{stored}", file, context, threads, say)
        for stored, file in files.items()
    ]


def _check_extras(against: str | None, plot_file: Path | None) -> None:
    """What the bench needs beside the engine, before anything is started."""
    wanted = {"httpx": True, "xllamacpp": "llama.cpp" in (against or ""), "matplotlib": plot_file}
    absent = [name for name, needed in wanted.items() if needed and find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"{', '.join(absent)} is not installed; pip install 'dspark[bench]' brings it"
        )
