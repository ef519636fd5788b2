"""`dspark data`: answers, and prompts, that drafters are trained on."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.console import console, say
from dspark.cli.long_work import rate_bar
from dspark.cli.target import Target
from dspark.core.errors import InvalidRequest

if TYPE_CHECKING:
    from dspark.core.config import EngineConfig
    from dspark.scheduler import OnlineStepCost
    from dspark.training.examples import Layout
    from dspark.training.generation import Made
    from dspark.training.jobs import Job
    from dspark.training.shard_writer import ShardWriter

app = typer.Typer(name="data", help="Make what drafters are trained on.", no_args_is_help=True)

DATA = "Data"
# Half greedy, as most serving is; the rest as hot as people like it.
MIX = "0:0.5,0.3/0.9:0.25,0.8:0.25"


@app.command()
def generate(
    prompts: Annotated[
        Path,
        typer.Argument(
            help='Lines of {"prompt": …}, {"messages": …} or {"prompt_ids": …}, which may name '
            "their domain and source; also gzipped. Lines with answer_ids are only read."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", help="A folder; what it holds already is gone on with.")
    ],
    answers: Annotated[
        int | None,
        typer.Option("--answers", help="How many; default one a prompt.", rich_help_panel=DATA),
    ] = None,
    balance: Annotated[
        bool,
        typer.Option("--balance", help="The same number from each domain.", rich_help_panel=DATA),
    ] = False,
    mix: Annotated[
        str,
        typer.Option(
            "--mix", help="T:SHARE or T/TOP_P:SHARE, commas between.", rich_help_panel=DATA
        ),
    ] = MIX,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Of an answer at most.", rich_help_panel=DATA)
    ] = 256,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            help="Target layers whose hidden states are kept, as 1,8,14,21,27; -1 is the "
            "embeddings, the last one is not allowed.",
            rich_help_panel=DATA,
        ),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option("--top-k", help="Ids kept of each distribution.", rich_help_panel=DATA),
    ] = 64,
    feature_dtype: Annotated[
        str,
        typer.Option("--feature-dtype", help="float16 or bfloat16.", rich_help_panel=DATA),
    ] = "float16",
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", help="Of a file, about.", rich_help_panel=DATA)
    ] = 16_384,
    seed: Annotated[int, typer.Option("--seed", help="Of order and sampling.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Answers at once.")] = 64,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave broken lines out and go on.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="State the sizes and stop.")] = False,
    model: options.Model = "smollm2-135m",
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    drafter: options.DrafterName = "none",
    gamma: options.Gamma = 7,
    threads: options.Threads = 0,
) -> None:
    """Let the target answer prompts, and keep what training reads of it.

    Beside each answer stand the target's likeliest ids with their probabilities and the hidden
    states of the chosen layers, so training needs no pass of the target. May be stopped at any
    time: the same command goes on, and at most the shard that was filling is lost.
    """
    from dspark.training.examples import FEATURE_DTYPES, Layout
    from dspark.training.jobs import parse_mix, plan_jobs
    from dspark.training.shard_writer import ShardWriter

    heats = parse_mix(mix)
    for name, value in (
        ("answers", answers),
        ("max_tokens", max_tokens),
        ("top_k", top_k),
        ("shard_tokens", shard_tokens),
        ("concurrency", concurrency),
    ):
        if value is not None and value < 1:
            raise InvalidRequest(name, value, "must be at least 1")
    if feature_dtype not in FEATURE_DTYPES:
        raise InvalidRequest("feature_dtype", feature_dtype, "must be float16 or bfloat16")
    if not 0 <= seed < 2**63:
        raise InvalidRequest("seed", seed, "must be in [0, 2^63)")
    if drafter not in ("none", "ngram"):
        raise InvalidRequest("drafter", drafter, "must be none or ngram")
    opened = Target(model, backend, dtype, device, threads)
    chosen = opened.layers(layers)
    width = opened.tensors.hidden_size
    layout = Layout(chosen, width, min(top_k, opened.vocab_size), feature_dtype)
    read = opened.prompts(prompts, skip_bad=skip_bad)
    jobs = plan_jobs(read, answers or len(read), heats, balance=balance, seed=seed)
    facts = {
        **opened.facts(),
        "prompts": hashlib.blake2b(prompts.read_bytes(), digest_size=8).hexdigest(),
        "mix": mix,
        "balance": balance,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    _state_sizes(layout, jobs, max_tokens, output)
    if dry_run:
        return
    writer = ShardWriter(output, layout, facts, shard_tokens=shard_tokens)
    todo = [job for job in jobs if job.name not in writer.done]
    if len(todo) < len(jobs):
        say(f"{len(jobs) - len(todo):,} of {len(jobs):,} answers are there already")
    if not todo:
        return
    made = _make(opened, layout, todo, writer, max_tokens, concurrency, drafter, gamma)
    say(
        f"{made.answers:,} answers of {made.answer_tokens:,} tokens in {made.seconds:,.0f} s "
        f"({made.rate:.0f} tokens/s), {made.dropped} dropped; {output}"
    )


def _state_sizes(layout: Layout, jobs: list[Job], max_tokens: int, output: Path) -> None:
    prompt_tokens = sum(len(job.prompt.ids) for job in jobs)
    most = layout.bytes(
        prompt_tokens, sum(len(job.prompt.answer_ids or range(max_tokens)) for job in jobs)
    )
    there = output
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    say(
        f"{len(jobs):,} answers to {prompt_tokens:,} prompt tokens, layers "
        f"{', '.join(map(str, layout.layer_ids))}: {layout.bytes_per_token:,} bytes a token and "
        f"{layout.bytes_per_answer_token:,} more a token of an answer; at most {most / 1e9:.2f} GB "
        f"({free / 1e9:.0f} GB are free)"
    )
    if most > free:
        say("that may not fit: a full disk stops it, and what is whole by then stays")


@app.command()
def synthesize(
    output: Annotated[
        Path, typer.Option("--output", help="A file of prompt lines; gone on with if it is there.")
    ],
    prompts: Annotated[
        int, typer.Option("--prompts", help="How many lines.", rich_help_panel=DATA)
    ] = 1000,
    domain: Annotated[
        str, typer.Option("--domain", help="What the lines are labelled.", rich_help_panel=DATA)
    ] = "chat",
    system: options.System = None,
    openers: Annotated[
        Path | None,
        typer.Option(
            "--openers",
            help="Prompt lines; each new one begins with the first words of one of them.",
            rich_help_panel=DATA,
        ),
    ] = None,
    opener_words: Annotated[
        int, typer.Option("--opener-words", help="How many words.", rich_help_panel=DATA)
    ] = 3,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Above 0.")] = 0.9,
    top_p: options.TopP = 0.95,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of a prompt at most.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampling.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Prompts at once.")] = 64,
    model: options.Model = "smollm2-135m",
    backend: options.Backend = "auto",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
) -> None:
    """Let the target write the user's turn: prompts for `dspark data generate`.

    What is empty, cut off at --max-tokens or there already is thrown away.
    """
    from dspark.training.synthesis import Wish, synthesize_prompts

    for name, value in (
        ("prompts", prompts),
        ("max_tokens", max_tokens),
        ("opener_words", opener_words),
        ("concurrency", concurrency),
    ):
        if value < 1:
            raise InvalidRequest(name, value, "must be at least 1")
    if temperature <= 0:
        raise InvalidRequest("temperature", temperature, "must be above 0: all would be the same")
    opened = Target(model, backend, dtype, device, threads)
    wish = Wish(prompts, domain, system, opener_words, temperature, top_p, max_tokens, seed)
    with rate_bar("prompts", console()) as advance:
        made = synthesize_prompts(
            opened.backend,
            opened.tokenizer,
            wish,
            output,
            openers=openers,
            concurrency=concurrency,
            watch=advance,
        )
    say(f"{made.kept:,} prompts, {made.thrown:,} thrown away; {output}")


def _make(
    target: Target,
    layout: Layout,
    todo: list[Job],
    writer: ShardWriter,
    max_tokens: int,
    concurrency: int,
    drafter: str,
    gamma: int,
) -> Made:
    """The given answers are read, the others made."""
    from dspark.models.drafters import NgramDrafter
    from dspark.training.generation import Made, generate, read_given, room_for

    given = [job for job in todo if job.prompt.answer_ids is not None]
    wanted = [job for job in todo if job.prompt.answer_ids is None]
    with rate_bar("answers", console()) as advance:

        def watch(now: Made, _: int) -> None:
            advance(now.answers + now.dropped, len(todo), f"{now.rate:,.0f} tokens/s")

        made = Made()
        if given:
            made = read_given(target.backend, layout, given, writer, watch=watch)
        if wanted:
            drafting = drafter == "ngram"
            config = room_for(wanted, max_tokens, concurrency, gamma if drafting else 0)
            made = generate(
                target.backend,
                layout,
                wanted,
                writer,
                max_tokens=max_tokens,
                config=config,
                cost=_cost(target, config, drafter),
                eos_ids=target.eos_ids,
                drafters={"ngram": NgramDrafter(gamma)} if drafting else {},
                watch=watch,
            )
    return made


def _cost(target: Target, config: EngineConfig, drafter: str) -> OnlineStepCost:
    from dspark.scheduler import OnlineStepCost, StepCost, cost_key, hardware

    if drafter == "none":  # nothing to plan
        return OnlineStepCost(StepCost.from_table({1: 1.0}))
    from dspark.deploy.single import Progress, step_cost
    from dspark.models.cache import default_cache

    name = f"{target.path.name}-{target.backend.target_id}"
    key = cost_key(hardware(), name, target.config.dtype, target.backend.name, target.threads)
    file = default_cache() / "step-cost" / key
    cost, _ = step_cost(target.backend, config, file, Progress(line=say))
    return OnlineStepCost(cost)
