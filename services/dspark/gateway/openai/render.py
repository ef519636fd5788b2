"""What the gateway says, as the JSON of one call: whole, or chunk by chunk.

The hot path is `delta` and `event`: plain dicts and one `dumps` a step, no validation of our own
output.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dspark.core.requests import SpeculationFigures, TokenLogprob
from dspark.gateway.answers import Answer
from dspark.gateway.gateway import Chunk
from dspark.gateway.openai.tokens import CompletionLogprobs, TokenTexts, chat_logprobs

DONE = b"data: [DONE]\n\n"

# JSON leaves them as they are, but to Python's `splitlines`, which many SSE readers use, they end
# a line.
_LINE_ENDS = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})


def dumps(value: object) -> bytes:
    """Compact JSON in UTF-8, one line by any reader's rules."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return (text if text.isascii() else text.translate(_LINE_ENDS)).encode()


def error_event(body: dict[str, Any]) -> bytes:
    """The end of a stream that failed; no [DONE] follows."""
    return b"event: error\ndata: " + dumps(body) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one call begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def of(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True, slots=True)
class Shown:
    """What a call wants to see. prompts: their ids, filled in as they become known; the n choices
    of prompt i are numbered from i * n. echo: text that the answers to each prompt begin with,
    filled in likewise; none at all if it is not wanted."""

    prompts: MutableSequence[tuple[int, ...]]
    n: int = 1
    echo: MutableSequence[str] = field(default_factory=list)
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False


class Rendering(ABC):
    """One call's answers; it remembers which choices have begun."""

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, head: Head, shown: Shown, texts: TokenTexts) -> None:
        self._head = head
        self._shown = shown
        self._texts = texts
        self._begun: set[int] = set()
        self._before = b"data: " + dumps(head.of(self.chunk_kind))[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if shown.usage else b"]}\n\n"

    def whole(self, answers: Iterable[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        ordered = sorted(answers, key=lambda answer: answer.choice)
        choices = [self._finish(self._choice(answer), answer) for answer in ordered]
        return self._head.of(self.whole_kind) | {
            "choices": choices,
            "usage": usage(ordered, self._shown.n),
        }

    def delta(self, chunk: Chunk) -> bytes:
        """The event of a chunk; nothing if there is nothing to see in it."""
        first = self._begins(chunk.choice)
        if not (first or chunk.text or self._shown.logprobs or self._shown.token_ids):
            return b""
        delta = self._delta(chunk.choice, chunk.text, first)
        if self._shown.logprobs and chunk.ids:
            delta["logprobs"] = self._logprobs(chunk.choice, chunk.ids, chunk.logprobs)
        return self._event(self._with_ids(delta, chunk.choice, chunk.ids, first))

    def end(self, answer: Answer) -> bytes:
        """The event that ends a choice."""
        first = self._begins(answer.choice)
        delta = self._delta(answer.choice, "", first, last=True)
        delta["finish_reason"] = answer.finish_reason.value
        return self._event(self._with_ids(delta, answer.choice, (), first))

    def last(self, answers: Iterable[Answer]) -> bytes:
        """The end of a stream that went well."""
        if not self._shown.usage:
            return DONE
        chunk = self._head.of(self.chunk_kind) | {
            "choices": [],
            "usage": usage(answers, self._shown.n),
        }
        return b"data: " + dumps(chunk) + b"\n\n" + DONE

    @abstractmethod
    def _choice(self, answer: Answer) -> dict[str, Any]:
        """All of a choice but its log-probabilities and ids."""

    @abstractmethod
    def _delta(self, choice: int, text: str, first: bool, last: bool = False) -> dict[str, Any]:
        """What a chunk adds to a choice."""

    @abstractmethod
    def _logprobs(
        self, choice: int, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> dict[str, Any]: ...

    def _finish(self, choice: dict[str, Any], answer: Answer) -> dict[str, Any]:
        choice["finish_reason"] = answer.finish_reason.value
        if self._shown.logprobs:
            choice["logprobs"] = self._logprobs(answer.choice, answer.token_ids, answer.logprobs)
        return self._with_ids(choice, answer.choice, answer.token_ids, True)

    def _with_ids(
        self, choice: dict[str, Any], index: int, ids: tuple[int, ...], first: bool
    ) -> dict[str, Any]:
        if self._shown.token_ids:
            choice["token_ids"] = ids
            if first:
                choice["prompt_token_ids"] = self._shown.prompts[index // self._shown.n]
        return choice

    def _begins(self, choice: int) -> bool:
        first = choice not in self._begun
        self._begun.add(choice)
        return first

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._before + dumps(choice) + self._after


class ChatRendering(Rendering):
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": answer.choice, "message": message, "logprobs": None}

    def _delta(self, choice: int, text: str, first: bool, last: bool = False) -> dict[str, Any]:
        delta = {} if last and not first else {"content": text}
        if first:
            delta = {"role": "assistant", **delta}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(
        self, choice: int, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> dict[str, Any]:
        return chat_logprobs(self._texts, ids, logprobs)


class CompletionRendering(Rendering):
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, head: Head, shown: Shown, texts: TokenTexts) -> None:
        super().__init__(head, shown, texts)
        self._grown: dict[int, CompletionLogprobs] = {}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        text = self._echo(answer.choice) + answer.text
        return {"index": answer.choice, "text": text, "logprobs": None}

    def _delta(self, choice: int, text: str, first: bool, last: bool = False) -> dict[str, Any]:
        text = self._echo(choice) + text if first else text
        return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(
        self, choice: int, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> dict[str, Any]:
        if choice not in self._grown:
            self._grown[choice] = CompletionLogprobs(self._texts)
        return self._grown[choice].of(ids, logprobs)

    def _echo(self, choice: int) -> str:
        return self._shown.echo[choice // self._shown.n] if self._shown.echo else ""


def usage(answers: Iterable[Answer], n: int) -> dict[str, Any]:
    """Tokens of a call. A prompt is counted once, and as cached what its luckless choice found:
    what the other choices found was in part that one's own work."""
    told: dict[int, list[Answer]] = {}
    for answer in answers:
        told.setdefault(answer.choice // n, []).append(answer)
    prompt_tokens = sum(choices[0].usage.prompt_tokens for choices in told.values())
    cached = sum(min(a.usage.cached_tokens for a in choices) for choices in told.values())
    every = [answer for choices in told.values() for answer in choices]
    completion_tokens = sum(answer.usage.completion_tokens for answer in every)
    figures = sum((answer.speculation for answer in every), SpeculationFigures())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculation": {
            "rounds": figures.rounds,
            "drafted": figures.drafted,
            "verified": figures.verified,
            "accepted": figures.accepted,
            "accepted_length": figures.accepted_length,
        },
    }
