"""`dspark bench sweep`: policies against each other at every load, on the engine itself."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dspark.cli import options
from dspark.cli.bench.serve import LOAD, parse_users
from dspark.cli.console import bar, console, load_with_progress, say
from dspark.core.errors import DsparkError, InvalidRequest

if TYPE_CHECKING:
    from dspark.cli.bench.prompts import Chat
    from dspark.cli.bench.sweeping import SweepCell, SweepPlan
    from dspark.deploy.single import Loaded, TargetConfig
    from dspark.models.drafters.drafting import ModelDrafter
    from dspark.verifier.engine import Engine

POLICIES = "none,fixed:1,fixed:5,early-stop,top-k"
CONCURRENCY = "1,2,4,8,16,32,64"
INTERRUPTED = "Ctrl-C"
# Characters of a line that no terminal breaks.
FILE_WIDTH = 200


def sweep(
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="none, fixed:N, threshold:X, early-stop, top-k; comma between.",
            rich_help_panel=LOAD,
        ),
    ] = POLICIES,
    concurrency: Annotated[
        str,
        typer.Option("--concurrency", help="Closed loops of so many users.", rich_help_panel=LOAD),
    ] = CONCURRENCY,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            help="Requests of a policy in a round; default two a user, at least 8.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=2, help="Tokens of every answer.", rich_help_panel=LOAD),
    ] = 64,
    rounds: Annotated[
        int,
        typer.Option("--rounds", min=1, help="Turns of each policy.", rich_help_panel=LOAD),
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
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
) -> None:
    """Throughput, speed for a user and verify lengths of each policy at each load, side by side.

    In this process, without a server: greedy answers of equal length, policies in turns. Also how
    far each is from an oracle that knows which drafts are accepted. Ctrl-C prints what is done.
    """
    from dspark.cli.bench.plot import check_plot
    from dspark.cli.bench.prompts import OWN, read_chats
    from dspark.cli.bench.report import surroundings

    deadline = time.perf_counter() + time_limit
    names = parse_policies(policies, drafter, gamma)
    users = parse_users(concurrency)
    if plot_file is not None:
        check_plot(plot_file)
    chats = read_chats(prompts or OWN)
    facts = surroundings()
    config = _config(model, backend, dtype, device, drafter, threads, gamma, max(users))
    loaded = load_with_progress(config)
    for one in loaded.engine.drafters.values():
        parse_policies(policies, drafter, min(gamma, one.card.gamma))
    plan = _plan(loaded, chats, users, rounds, max_tokens, requests)
    cells: list[SweepCell] = []
    failure, cut_short = _measure(loaded, names, plan, cells, deadline)
    facts |= {
        "model": model,
        "backend": loaded.config.backend,
        "dtype": loaded.config.dtype,
        "device": device,
        "threads": loaded.threads,
        "drafter": drafter,
        "gamma": gamma,
        "step_cost": asdict(loaded.cost),
        "rounds": rounds,
        "max_tokens": max_tokens,
        "cut_short": cut_short,
    }
    _report(facts, loaded, cells, failure, as_json=as_json, plot_file=plot_file)
    if cut_short is not None:
        say(f"cut short by {cut_short}", style="red")
    if cut_short == INTERRUPTED:
        raise typer.Exit(128 + signal.SIGINT)


def parse_policies(text: str, drafter: str, gamma: int) -> list[str]:
    """As each is called in the figures. gamma: draft tokens there are. Raises InvalidRequest."""
    from dspark.scheduler import Policy, PolicyKind

    names = list[str]()
    for word in text.split(","):
        policy = Policy.parse(word)
        if policy.kind is not PolicyKind.NONE and (drafter == "none" or not gamma):
            raise InvalidRequest("policies", word, "needs a drafter, and there is none")
        if policy.length > gamma:
            raise InvalidRequest("policies", word, f"wants more than {gamma} draft tokens a round")
        if str(policy) in names:
            raise InvalidRequest("policies", word, "is there twice")
        names.append(str(policy))
    return names


def _config(
    model: str, backend: str, dtype: str, device: str, drafter: str, threads: int, gamma: int,
    users: int,
) -> TargetConfig:  # fmt: skip
    """As `dspark serve` has it, with room for so many users in a step."""
    from dspark.core.config import EngineConfig
    from dspark.deploy.single import TargetConfig

    usual = EngineConfig()
    engine = EngineConfig(
        kv_tokens=usual.block_size,  # until it is known how long prompts are
        max_sequences=max(usual.max_sequences, users),
        max_step_tokens=max(usual.max_step_tokens, users),
        gamma=gamma,
    )
    return TargetConfig(model, backend, dtype, device, drafter, threads, engine)


def _plan(
    loaded: Loaded,
    chats: Sequence[Chat],
    users: Sequence[int],
    rounds: int,
    max_tokens: int,
    per_round: int | None,
) -> SweepPlan:
    from dspark.cli.bench.engine_load import heads
    from dspark.cli.bench.sweeping import SweepPlan

    prompts = [loaded.tokenizer.chat(chat) for chat in chats]
    longest, room = 1 + max(map(len, prompts)), loaded.backend.context_length
    if longest + max_tokens > room:
        raise InvalidRequest(
            "max_tokens", max_tokens, f"is above the room left: {room} tokens - {longest} of prompt"
        )
    firsts = heads(loaded.engine.limits.vocab_size, loaded.tokenizer.eos_ids)
    return SweepPlan(prompts, firsts, users, rounds, max_tokens, per_round)


def arm_config(config: TargetConfig, policy: str) -> TargetConfig:
    """Of a policy's engine, at its best: `none` has no drafter whose features or sessions cost
    anything, and `fixed:N` asks its drafter for no more than it will verify."""
    from dspark.scheduler import Policy, PolicyKind

    parsed = Policy.parse(policy)
    if parsed.kind is PolicyKind.NONE:
        return replace(config, drafter="none")
    gamma = parsed.length or config.engine.gamma
    return replace(config, engine=replace(config.engine, verify=policy, gamma=gamma))


def _measure(
    loaded: Loaded, names: Sequence[str], plan: SweepPlan, cells: list[SweepCell], deadline: float
) -> tuple[DsparkError | None, str | None]:
    """What went wrong, and why not all is there."""
    from dspark.cli.bench.sweeping import Pace, sweep

    config = _with_room(loaded, plan)
    gamma = config.engine.gamma
    out = console()
    try:
        with bar("sweeping", out) as advance:
            pace = Pace(plan, len(names), loaded.cost, deadline, advance=advance)
            sweep(
                {name: partial(_engine, loaded, arm_config(config, name)) for name in names},
                partial(_engine, loaded, arm_config(config, f"fixed:{gamma}" if gamma else "none")),
                plan,
                pace,
                cells,
                partial(say, out=out),
            )
    except TimeoutError:
        return None, "the time limit"
    except KeyboardInterrupt:
        return None, INTERRUPTED
    except DsparkError as error:
        return error, str(error)
    return None, None


def _engine(loaded: Loaded, config: TargetConfig) -> Engine:
    """Over the weights that are loaded, the drafter's too; a trained one learns nothing while it
    drafts, and ngram, which does, is made anew."""
    from dspark.deploy.single import make_engine

    trained = None
    if not config.has_plain_drafter:
        (drafter,) = loaded.engine.drafters.local.values()
        trained = cast("ModelDrafter", drafter.drafter)
    return make_engine(loaded.backend, config, loaded.cost, loaded.tokenizer.eos_ids, trained)


def _with_room(loaded: Loaded, plan: SweepPlan) -> TargetConfig:
    """KV cache for all users' longest prompts and answers, so that nobody is preempted. Raises
    ConfigError where there is not so much memory."""
    from dspark.deploy.memory import bytes_per_token, check_kv_tokens, free_bytes

    config, block = loaded.config, loaded.config.engine.block_size
    longest = 1 + max(map(len, plan.prompts)) + plan.max_tokens + config.engine.gamma
    kv_tokens = max(plan.concurrency) * -(-longest // block) * block
    engine = replace(config.engine, kv_tokens=kv_tokens)
    if config.device == "cpu":
        check_kv_tokens(engine, bytes_per_token(loaded.backend), free_bytes())
    return replace(config, engine=engine)


def _report(
    facts: Mapping[str, Any],
    loaded: Loaded,
    cells: Sequence[SweepCell],
    failure: DsparkError | None,
    *,
    as_json: bool,
    plot_file: Path | None,
) -> None:
    """Of what was measured; raises `failure` after it."""
    from rich.console import Console

    from dspark.cli.bench import sweep_report

    found = sweep_report.results(cells, loaded.cost, loaded.config.engine.max_step_tokens)
    curves = sweep_report.pareto(cells)
    if failure is not None and not found:
        raise failure
    if plot_file is not None and found:
        from dspark.cli.bench.plot import plot

        plot(found, plot_file)
    if as_json:
        whole = {**facts, "rules": sweep_report.RULES, "results": found, "pareto": curves}
        typer.echo(json.dumps(whole))
    elif found:
        width = None if sys.stdout.isatty() else FILE_WIDTH
        out = Console(highlight=False, markup=False, emoji=False, width=width)
        sweep_report.show(found, curves, out)
    else:
        say("nothing was measured yet")
    if failure is not None:
        raise failure
