"""`dspark generate`: answer one prompt, or a file of them."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options
from dspark.cli.console import bar, console, load_with_progress
from dspark.cli.inputs import Prompt, parse_ids, parse_line, read_lines
from dspark.core.errors import DsparkError, InvalidRequest
from dspark.core.requests import Request
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.deploy.single import Loaded
    from dspark.gateway.answers import Answer
    from dspark.verifier.runner import EngineRunner

DEFAULT_MAX_TOKENS = 256


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="A user's message; - reads it from stdin.")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='A file of {"prompt": …} or {"messages": …} lines.',
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
    backend: options.Backend = "transformers",
    drafter: options.DrafterName = "ngram",
    gamma: options.Gamma = 7,
    verify: options.Verify = "early-stop",
    dtype: options.DType = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    kv_tokens: options.KVTokens = 65_536,
    max_tokens: options.MaxTokens = None,
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
    prompts, answers are JSON objects, one a line.
    """
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_parse_bias(logit_bias),
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
    lines: list[str] | None = None
    one: Prompt | None = None
    if sum(given is not None for given in (prompt, input_file, prompt_ids)) != 1:
        raise InvalidRequest("prompt", None, "give exactly one of PROMPT, --prompt-ids, --input")
    if input_file is not None:
        lines = list(read_lines(input_file))
    elif prompt_ids is not None:
        one = Prompt(ids=parse_ids(prompt_ids))
    else:
        one = Prompt(text=sys.stdin.read() if prompt == "-" else prompt)
    if concurrency < 1:
        raise InvalidRequest("concurrency", concurrency, "must be at least 1")

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
    loaded = load_with_progress(config)
    job = _Job(loaded, params, raw, system)
    if one is not None:
        asyncio.run(job.answer_one(one, as_json=as_json))
        return
    assert lines is not None
    with _open_output(output_file) as out:
        failed = asyncio.run(job.answer_lines(lines, out, concurrency))
    if failed:
        console().print(f"{failed} of {len(lines)} lines failed; each says why in `error`")


def _parse_bias(text: str) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise InvalidRequest(
            "logit_bias", text, 'must be a JSON object of token id to number, as {"198": -100}'
        ) from None


def _open_output(path: Path | None) -> AbstractContextManager[IO[str]]:
    if path is None:
        return nullcontext(sys.stdout)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest("output", str(path), f"cannot be written: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class _Job:
    """What all prompts of one command share."""

    loaded: Loaded
    params: SamplingParams
    raw: bool
    system: str | None

    def _requests(self, request_id: str, prompt: Prompt) -> list[Request]:
        """One a choice. Without --max-tokens an answer takes the default or what there is room for."""
        from dataclasses import replace

        from dspark.core.requests import check_request

        ids = prompt.encode(self.loaded.tokenizer, raw=self.raw, system=self.system)
        limits = self.loaded.engine.limits
        params = self.params
        if params.max_tokens is None:
            room = max(limits.sequence_tokens - len(ids), 1)
            wanted = max(DEFAULT_MAX_TOKENS, params.min_tokens)
            params = replace(params, max_tokens=min(wanted, room))
        requests = [Request(request_id, ids, params, choice=c) for c in range(max(params.n, 1))]
        check_request(requests[0], limits)
        return requests

    async def answer_one(self, prompt: Prompt, *, as_json: bool) -> None:
        from dspark.gateway.answers import Piece, stream_answer
        from dspark.verifier.runner import EngineRunner

        requests = self._requests("cli", prompt)
        async with EngineRunner(self.loaded.engine) as runner:
            if as_json or len(requests) > 1:
                answers = await self._answers(runner, requests)
                if as_json:
                    typer.echo(json.dumps(_as_object(requests[0], answers)))
                    return
                for answer in answers:
                    typer.echo(f"--- choice {answer.choice}\n{answer.text}")
                    _tell(answer)
                return
            async for event in stream_answer(runner, self.loaded.tokenizer, requests[0]):
                if isinstance(event, Piece):
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                else:
                    sys.stdout.write("\n")
                    _tell(event)

    async def _answers(self, runner: EngineRunner, requests: list[Request]) -> list[Answer]:
        from dspark.gateway.answers import whole_answer

        tokenizer = self.loaded.tokenizer
        return list(await asyncio.gather(*(whole_answer(runner, tokenizer, r) for r in requests)))

    async def answer_lines(self, lines: list[str], out: IO[str], concurrency: int) -> int:
        """Write one object a line in input order; returns how many have an error."""
        from dspark.verifier.runner import EngineRunner

        gate = asyncio.Semaphore(concurrency)
        failed = 0

        async def answer(runner: EngineRunner, index: int, line: str) -> dict[str, Any]:
            async with gate:
                try:
                    requests = self._requests(f"line-{index}", parse_line(line))
                    return _as_object(requests[0], await self._answers(runner, requests))
                except DsparkError as error:
                    return {"line": index + 1, "error": str(error)}

        with bar("answers", console()) as advance:
            async with EngineRunner(self.loaded.engine) as runner:
                tasks = [
                    asyncio.create_task(answer(runner, i, line)) for i, line in enumerate(lines)
                ]
                for done, task in enumerate(tasks, start=1):
                    result = await task
                    failed += "error" in result
                    out.write(json.dumps(result, ensure_ascii=False) + "\n")
                    out.flush()
                    advance(done, len(lines))
        return failed


def _as_object(request: Request, answers: list[Answer]) -> dict[str, Any]:
    """The output object of interfaces.md; several choices stand in `choices` beside the first."""
    whole = {**_choice(answers[0]), "prompt_token_ids": list(request.prompt_ids)}
    if len(answers) > 1:
        whole["choices"] = [_choice(answer) for answer in answers]
    return whole


def _choice(answer: Answer) -> dict[str, Any]:
    figures = answer.speculation
    choice: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason.value,
        "usage": asdict(answer.usage),
        "speculation": {**asdict(figures), "accepted_length": figures.accepted_length},
        "timing": asdict(answer.timing),
    }
    if answer.logprobs:
        choice["logprobs"] = [
            {"logprob": token.logprob, "top": [list(pair) for pair in token.top]}
            for token in answer.logprobs
        ]
    return choice


def _tell(answer: Answer) -> None:
    """The figures of one answer, for a person."""
    figures, usage, timing = answer.speculation, answer.usage, answer.timing
    speed = f"{1 / timing.tpot_s:.1f} tokens/s after it" if timing.tpot_s else "one token"
    console().print(
        f"[dim]{usage.prompt_tokens} prompt + {usage.completion_tokens} answer tokens, "
        f"{answer.finish_reason.value}; first token {timing.ttft_s:.2f} s, {speed}; "
        f"{figures.rounds} rounds: {figures.drafted} drafted, {figures.verified} verified, "
        f"{figures.accepted} accepted, {figures.accepted_length:.2f} tokens a round[/dim]"
    )
