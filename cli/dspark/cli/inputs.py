"""Prompts of `dspark generate`: from the command line, from stdin or from lines of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.core.errors import InvalidRequest

if TYPE_CHECKING:
    from dspark.gateway import Tokenizer

STDIN = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of: a text (a user's message, or raw), messages of a chat, token ids."""

    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    ids: tuple[int, ...] | None = None

    def check(self, *, raw: bool, system: str | None) -> None:
        """What is wrong whatever the tokenizer; raises InvalidRequest."""
        if self.text == "":
            raise InvalidRequest("prompt", "", "is empty: it must have at least 1 character")
        if system is not None and (self.ids is not None or (raw and self.text is not None)):
            raise InvalidRequest("system", system, "needs a chat: neither --raw nor token ids")

    def encode(self, tokenizer: Tokenizer, *, raw: bool, system: str | None) -> tuple[int, ...]:
        """Token ids. raw: a text goes in as it is, without the chat template. system: put before
        messages that do not begin with a system message themselves."""
        self.check(raw=raw, system=system)
        if self.ids is not None:
            return self.ids
        if self.text is not None and raw:
            return tokenizer.encode(self.text)
        messages = list(self.messages)
        if self.text is not None:
            messages = [{"role": "user", "content": self.text}]
        if system is not None and not (messages and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": system}, *messages]
        return tokenizer.chat(messages)


def read_prompt(argument: str, *, raw: bool) -> Prompt:
    """PROMPT; `-` is what stdin says, to the letter with raw, else without its last line break."""
    if argument != STDIN:
        return Prompt(text=argument)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", STDIN, f"is not UTF-8 text: {error}") from None
    return Prompt(text=text if raw else text.removesuffix("\n"))


def parse_ids(text: str) -> Prompt:
    """A JSON list of token ids."""
    return Prompt(ids=_ids(_json(text, "prompt_ids"), "prompt_ids"))


def parse_bias(text: str) -> dict[int, float]:
    """A JSON object of token id to number."""
    value = _json(text, "logit_bias")
    try:
        return {int(token): float(number) for token, number in value.items()}
    except (ValueError, TypeError, AttributeError):
        raise InvalidRequest(
            "logit_bias", text, 'must be a JSON object of token id to number, as {"198": -100}'
        ) from None


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """(number, line) of each line that is not blank; `-` is stdin. Ends of line are line feeds
    alone: a JSON string may hold what Unicode also calls one."""
    try:
        data = sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
    except OSError as error:
        raise InvalidRequest("input", str(path), f"cannot be read: {error.strerror}") from None
    lines = data.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def parse_line(line: bytes) -> Prompt:
    """`{"prompt": …}`, `{"messages": …}` or `{"prompt_ids": …}`; other keys are not looked at."""
    value = _json(line, "line")
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


def _json(text: str | bytes, field: str) -> Any:
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        raise InvalidRequest(field, shown.strip(), f"is not JSON: {error}") from None


def _ids(value: object, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InvalidRequest(field, value, "must be a list of token ids")
    return tuple(value)
