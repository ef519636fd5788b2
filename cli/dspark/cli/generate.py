"""`dspark generate`: answer one prompt, or a file of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from dspark.cli import options
from dspark.cli.answering import Job
from dspark.cli.console import load_with_progress, say
from dspark.cli.inputs import STDIN, parse_bias, parse_ids, read_lines, read_prompt
from dspark.core.config import EngineConfig
from dspark.core.errors import InvalidRequest
from dspark.core.sampling import SamplingParams


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="A user's message; - reads it from stdin.")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='A file of {"prompt": …}, {"messages": …} or {"prompt_ids": …} lines; '
            "- reads stdin.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Where answers to --input go, in input order; default stdout.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", help="Prompts of --input at once.", rich_help_panel=options.OUTPUT
        ),
    ] = 16,
    prompt_ids: Annotated[
        str | None,
        typer.Option(
            "--prompt-ids", help="The prompt as a JSON list.", rich_help_panel=options.OUTPUT
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="No chat template.", rich_help_panel=options.OUTPUT),
    ] = False,
    system: options.System = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the whole answer as JSON.", rich_help_panel=options.OUTPUT
        ),
    ] = False,
    model: options.Model = "smollm2-135m",
    backend: options.Backend = "auto",
    drafter: options.DrafterName = "auto",
    gamma: options.Gamma = 7,
    verify: options.Verify = "early-stop",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    kv_tokens: options.KVTokens = 65_536,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help="Tokens to answer at most; default 256, or what the context has room for.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    presence_penalty: options.Presence = 0.0,
    frequency_penalty: options.Frequency = 0.0,
    repetition_penalty: options.Repetition = 1.0,
    logit_bias: options.LogitBias = "{}",
    seed: options.Seed = None,
    n: options.Choices = 1,
    stop: options.Stop = None,
    stop_id: options.StopId = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = False,
    top_logprobs: options.TopLogprobs = 0,
) -> None:
    """Answer a prompt, speculating, and say how that went.

    One prompt streams its text to stdout and its figures to stderr; with --json, or for a file of
    prompts, answers are JSON objects, one a line. A line that cannot be answered has `error`, and
    the others go on.
    """
    params = options.checked(
        SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=parse_bias(logit_bias),
            seed=seed,
            n=n,
            stop=tuple(stop or ()),
            stop_ids=tuple(stop_id or ()),
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            logprobs=logprobs or top_logprobs > 0,
            top_logprobs=top_logprobs,
        )
    )
    given = {"PROMPT": prompt, "--prompt-ids": prompt_ids, "--input": input_file}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        asked = f"is given: give one of {', '.join(given)}"
        raise InvalidRequest("prompt", " and ".join(names) or "nothing", asked)
    if concurrency < 1:
        raise InvalidRequest("concurrency", concurrency, "must be at least 1")

    from dspark.deploy.single import TargetConfig

    config = TargetConfig(
        model=model,
        backend=backend,
        dtype=dtype,
        device=device,
        drafter=drafter,
        threads=threads,
        engine=EngineConfig(
            kv_tokens=kv_tokens,
            gamma=gamma,
            verify=verify,
            max_waiting=concurrency * n,  # nobody but this command asks, and it asks no more
        ),
    )

    if input_file is not None:
        lines = read_lines(input_file)
        with _output(output_file) as out:
            job = Job(load_with_progress(config), params, raw, system)
            if output_file is not None and output_file.is_file():
                out.truncate(0)
            failed = asyncio.run(job.answer_lines(lines, out, concurrency))
        if failed:
            say(f"{failed} of {len(lines)} lines failed; each says why in `error`")
        return
    if output_file is not None:
        raise InvalidRequest("output", str(output_file), "needs --input, whose answers go there")
    one = parse_ids(prompt_ids) if prompt_ids is not None else read_prompt(prompt or "", raw=raw)
    one.check(raw=raw, system=system)
    job = Job(load_with_progress(config), params, raw, system)
    asyncio.run(job.answer_one(one, as_json=as_json))


@contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    """A file is opened before there is work to lose, and not emptied yet."""
    if path is None or str(path) == STDIN:
        yield sys.stdout
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise InvalidRequest("output", str(path), f"cannot be written: {error.strerror}") from error
