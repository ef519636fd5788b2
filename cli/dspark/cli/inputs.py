"""Prompts of `dspark generate`: from the command line or from lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.core.errors import InvalidRequest

if TYPE_CHECKING:
    from dspark.gateway import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of: a text (a user's message, or raw), messages of a chat, token ids."""

    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    ids: tuple[int, ...] | None = None

    def encode(self, tokenizer: Tokenizer, *, raw: bool, system: str | None) -> tuple[int, ...]:
        """Token ids. raw: a text goes in as it is, without the chat template."""
        if self.ids is not None:
            return self.ids
        if self.text is not None and raw:
            return tokenizer.encode(self.text)
        messages: Sequence[Mapping[str, str]] = self.messages
        if self.text is not None:
            if not self.text:
                raise InvalidRequest("prompt", "", "is empty: it must have at least 1 character")
            messages = [{"role": "user", "content": self.text}]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return tokenizer.chat(messages)


def parse_ids(text: str) -> tuple[int, ...]:
    """A JSON list of token ids."""
    try:
        ids = json.loads(text)
    except ValueError as error:
        raise InvalidRequest("prompt-ids", text, f"is not JSON: {error}") from None
    return _ids(ids, "prompt-ids")


def _ids(value: object, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InvalidRequest(field, value, "must be a list of token ids")
    return tuple(value)


def parse_line(line: str) -> Prompt:
    """`{"prompt": …}`, `{"messages": …}` or `{"prompt_ids": …}`; other keys are not looked at."""
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise InvalidRequest("line", line.strip(), f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("line", value, "must be a JSON object")
    given = [key for key in ("prompt", "messages", "prompt_ids") if key in value]
    if len(given) != 1:
        raise InvalidRequest(
            "line", sorted(value), "must have exactly one of prompt, messages, prompt_ids"
        )
    field = given[0]
    if field == "prompt_ids":
        return Prompt(ids=_ids(value[field], field))
    if field == "prompt":
        if not isinstance(value[field], str):
            raise InvalidRequest(field, value[field], "must be a string")
        return Prompt(text=value[field])
    messages = value[field]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest(field, messages, "must be a list of objects with role and content")
    return Prompt(messages=tuple(messages))


def read_lines(path: Path) -> Iterator[str]:
    """Non-empty lines; a file that is not there or not UTF-8 is an InvalidRequest."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise InvalidRequest("input", str(path), f"cannot be read: {error.strerror}") from None
    return (line for line in text.splitlines() if line.strip())
