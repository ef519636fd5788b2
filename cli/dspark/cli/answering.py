"""The work of `dspark generate`: prompts in, answers to stdout or a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from dspark.cli.console import bar, console, put, say
from dspark.cli.inputs import Prompt, parse_line
from dspark.cli.report import as_object, as_sentence
from dspark.core.errors import DsparkError
from dspark.core.requests import Request, check_request
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.deploy.single import Loaded
    from dspark.gateway.answers import Answer
    from dspark.verifier.runner import EngineRunner

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Job:
    """What all prompts of one command share."""

    loaded: Loaded
    params: SamplingParams
    raw: bool
    system: str | None

    def requests(self, request_id: str, prompt: Prompt) -> list[Request]:
        """One a choice. Without --max-tokens it is the default, or what there is room for."""
        ids = prompt.encode(self.loaded.tokenizer, raw=self.raw, system=self.system)
        params, limits = self.params, self.loaded.engine.limits
        check_request(Request(request_id, ids, params), limits)
        if params.max_tokens is None:
            room = limits.sequence_tokens - len(ids)
            wanted = max(DEFAULT_MAX_TOKENS, params.min_tokens)
            params = replace(params, max_tokens=min(wanted, room))
        return [Request(request_id, ids, params, choice=c) for c in range(params.n)]

    async def answer_one(self, prompt: Prompt, *, as_json: bool) -> None:
        """Stream the text to stdout and its figures to stderr; all of it as JSON to stdout."""
        from dspark.verifier.runner import EngineRunner

        requests = self.requests("cli", prompt)
        async with EngineRunner(self.loaded.engine) as runner:
            if as_json:
                answers = await self._answers(runner, requests)
                put(json.dumps(as_object(requests[0], answers)) + "\n")
            elif len(requests) > 1:
                for answer in await self._answers(runner, requests):
                    put(f"--- choice {answer.choice}\n{answer.text}\n")
                    say(as_sentence(answer))
            else:
                await self._stream(runner, requests[0])

    async def _stream(self, runner: EngineRunner, request: Request) -> None:
        from dspark.gateway.answers import Piece, stream_answer

        async with aclosing(stream_answer(runner, self.loaded.tokenizer, request)) as events:
            async for event in events:
                if isinstance(event, Piece):
                    put(event.text)
                else:
                    put("\n")
                    say(as_sentence(event))

    async def _answers(self, runner: EngineRunner, requests: list[Request]) -> list[Answer]:
        from dspark.gateway.answers import whole_answer

        tokenizer = self.loaded.tokenizer
        return list(await asyncio.gather(*(whole_answer(runner, tokenizer, r) for r in requests)))

    async def answer_lines(
        self, lines: Sequence[tuple[int, bytes]], out: IO[str], concurrency: int
    ) -> int:
        """Write one object a line in input order; returns how many have an error."""
        from dspark.verifier.runner import EngineRunner

        gate = asyncio.Semaphore(concurrency)
        failed = 0

        async def answer(runner: EngineRunner, number: int, line: bytes) -> dict[str, Any]:
            async with gate:
                try:
                    requests = self.requests(f"line-{number}", parse_line(line))
                    return as_object(requests[0], await self._answers(runner, requests))
                except DsparkError as error:
                    return {"line": number, "error": str(error)}

        with bar("answers", console()) as advance:
            async with EngineRunner(self.loaded.engine) as runner:
                tasks = [asyncio.create_task(answer(runner, *line)) for line in lines]
                try:
                    for done, task in enumerate(tasks, start=1):
                        result = await task
                        failed += "error" in result
                        out.write(json.dumps(result) + "\n")
                        out.flush()
                        advance(done, len(lines))
                finally:  # Ctrl-C, or nobody reads: the rest is not begun
                    for task in tasks:
                        task.cancel()
        return failed
