"""`dspark chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import typer

from dspark.cli import options
from dspark.cli.console import console, load_with_progress
from dspark.core.errors import InvalidRequest
from dspark.core.requests import Request
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.deploy.single import Loaded


def chat(
    model: options.Model = "smollm2-135m",
    system: options.System = None,
    backend: options.Backend = "transformers",
    drafter: options.DrafterName = "ngram",
    gamma: options.Gamma = 7,
    verify: options.Verify = "early-stop",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    kv_tokens: options.KVTokens = 65_536,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    repetition_penalty: options.Repetition = 1.0,
    seed: options.Seed = None,
) -> None:
    """Chat until Ctrl-D. Ctrl-C stops an answer. What was said before stays in the prefix cache."""
    from dspark.core.config import EngineConfig
    from dspark.deploy.single import TargetConfig

    config = TargetConfig(
        model=model,
        backend=backend,
        dtype=dtype,
        device=device,
        drafter=drafter,
        threads=threads,
        engine=EngineConfig(kv_tokens=kv_tokens, gamma=gamma, verify=verify),
    )
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
    )
    loaded = load_with_progress(config)
    messages = [] if system is None else [{"role": "system", "content": system}]
    asyncio.run(_talk(loaded, params, messages))


async def _talk(loaded: Loaded, params: SamplingParams, messages: list[dict[str, str]]) -> None:
    from dspark.verifier.runner import EngineRunner

    out = console()
    async with EngineRunner(loaded.engine) as runner:
        turn = 0
        while (said := await asyncio.to_thread(_read_turn)) is not None:
            if not said.strip():
                continue
            turn += 1
            messages.append({"role": "user", "content": said})
            request = Request(f"turn-{turn}", loaded.tokenizer.chat(messages), params)
            answer = asyncio.create_task(_say(runner, loaded, request))
            try:
                text = await answer
            except InvalidRequest as error:
                out.print(f"[red]{error}[/red]")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": text})


def _read_turn() -> str | None:
    try:
        return input("you> ")
    except EOFError:
        typer.echo()
        return None


async def _say(runner: object, loaded: Loaded, request: Request) -> str:
    """Stream one answer to stdout; Ctrl-C ends it and keeps what was said."""
    from dspark.gateway.answers import Piece, stream_answer

    said = ""
    try:
        async for event in stream_answer(runner, loaded.tokenizer, request):  # type: ignore[arg-type]
            if isinstance(event, Piece):
                said += event.text
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except asyncio.CancelledError:
        console().print("[dim](stopped)[/dim]")
    sys.stdout.write("\n")
    return said
