"""`dspark chat`: talk to a model in the terminal."""

from __future__ import annotations

import asyncio
import io
import sys
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.console import load_with_progress, put, say
from dspark.cli.report import as_sentence
from dspark.core.config import EngineConfig
from dspark.core.errors import DsparkError
from dspark.core.requests import Limits, Request, check_request
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.deploy.single import Loaded
    from dspark.gateway import Tokenizer

# Tokens an answer should have room for where --max-tokens does not say.
ANSWER_ROOM = 256

Message = dict[str, str]


def chat(
    model: options.Model = "smollm2-135m",
    system: options.System = None,
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
            help="Tokens of an answer at most; default: what the context has room for.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    repetition_penalty: options.Repetition = 1.0,
    seed: options.Seed = None,
) -> None:
    """Chat until Ctrl-D; a line is a turn. Ctrl-C stops an answer.

    What was said before stays in the prefix cache. A chat that outgrows the context forgets its
    oldest turns, with a note; the system message stays. A turn that does not fit even alone is
    refused, and the chat goes on.
    """
    params = options.checked(
        SamplingParams(
            temperature=temperature,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            max_tokens=max_tokens,
        )
    )

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
    first = [] if system is None else [{"role": "system", "content": system}]
    talk = Conversation(loaded.tokenizer, loaded.engine.limits, params, first)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while (said := _next_turn()) is not None:
        if not said.strip():
            continue
        try:
            request, forgotten = talk.ask(said)
            if forgotten:
                say(f"(the context is full; turns forgotten, oldest first: {forgotten})")
            talk.answered(said, asyncio.run(_answer(loaded, request)))
        except DsparkError as error:
            say(str(error), style="red")


@dataclass
class Conversation:
    """What was said so far, without I/O. first: the system message, if any.

    Raises InvalidRequest if the tokenizer's chat template does not take such a chat at all.
    """

    tokenizer: Tokenizer
    limits: Limits
    params: SamplingParams
    first: list[Message]
    turns: list[Message] = field(default_factory=list)  # user and assistant in turn
    asked: int = 0

    def __post_init__(self) -> None:
        self._prompt([{"role": "user", "content": "?"}])

    def _prompt(self, turns: list[Message]) -> tuple[int, ...]:
        return self.tokenizer.chat([*self.first, *turns])

    def ask(self, said: str) -> tuple[Request, int]:
        """The request for the next answer, and how many turns had to be forgotten to make room.

        Raises InvalidRequest, and forgets nothing, if `said` does not even fit alone.
        """
        kept, latest = self.turns, {"role": "user", "content": said}
        room = self.params.max_tokens or min(ANSWER_ROOM, self.limits.sequence_tokens // 4)
        ids = self._prompt([*kept, latest])
        while kept and len(ids) + room > self.limits.sequence_tokens:
            kept = kept[2:]
            ids = self._prompt([*kept, latest])
        request = Request(f"turn-{self.asked}", ids, self.params)
        check_request(request, self.limits)
        forgotten = (len(self.turns) - len(kept)) // 2
        self.turns, self.asked = kept, self.asked + 1
        return request, forgotten

    def answered(self, said: str, answer: str) -> None:
        """A turn is remembered once something was answered."""
        if answer:
            self.turns += [
                {"role": "user", "content": said},
                {"role": "assistant", "content": answer},
            ]


def _next_turn() -> str | None:
    """The next line typed or piped, None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` editing and a history)
    try:
        return input("you> ")
    except EOFError:
        put("\n")
        return None
    except KeyboardInterrupt:
        say("\n(Ctrl-D ends the chat)")
        return ""


async def _answer(loaded: Loaded, request: Request) -> str:
    """Stream one answer to stdout; Ctrl-C ends it and keeps what was said."""
    from dspark.gateway.answers import Piece, stream_answer
    from dspark.verifier.runner import EngineRunner

    said = ""
    try:
        async with (
            EngineRunner(loaded.engine) as runner,
            aclosing(stream_answer(runner, loaded.tokenizer, request)) as events,
        ):
            async for event in events:
                if isinstance(event, Piece):
                    said += event.text
                    put(event.text)
                else:
                    put("\n")
                    say(as_sentence(event))
    except asyncio.CancelledError:  # what asyncio.run makes of Ctrl-C
        put("\n")
        say("(stopped)")
    return said
