"""Values with several forms, or of which only some are served: what validators make of them.

Each stops at the first mistake: pydantic collects them, and a body of 4 MB can hold two million.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from dspark.gateway.prompts import Prompt


def wrong(told: str, kind: str = "value") -> PydanticCustomError:
    return PydanticCustomError(kind, "{told}", {"told": told})


def only(*neutral: object) -> AfterValidator:
    """A field of OpenAI's that is not served: null and what would change nothing pass."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(same) and value == same for same in neutral):
            return value
        accepted = f", but as {' or '.join(map(repr, neutral))}" if neutral else ""
        raise wrong(f"is not served here{accepted}", "unsupported")

    return AfterValidator(check)


def stops(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if value is None or (isinstance(value, list) and all(isinstance(stop, str) for stop in value)):
        return tuple(value or ())
    raise wrong("must be a string or a list of strings")


def biases(value: Any) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in named(value).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise wrong(f"has the key {token[:40]!r}: keys must be token ids, as strings")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong(f"has no number for token {token}")
        try:
            found[int(token)] = float(bias)
        except OverflowError:
            raise wrong(f"has a number for token {token} that is too large") from None
    return found


def labels(value: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in named(value).values()):
        raise wrong("must be an object of strings")
    return dict(named(value))


def named(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("must be an object")
    return value


def content_text(value: Any) -> Any:
    """Text parts joined by newlines. A missing content is the tokenizer's to refuse."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise wrong(f"part {i} is of type {short(kind)!r}: only text parts are served")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise wrong(f'part {i} must have "type" and a string as "text", and nothing else')
    return "\n".join(part["text"] for part in value)


def prompts_of(value: Any) -> tuple[Prompt, ...]:
    match value:
        case str():
            return (Prompt(text=value),)
        case [str(), *_] if all(isinstance(text, str) for text in value):
            return tuple(Prompt(text=text) for text in value)
        case [int(), *_] if _ids(value):
            return (Prompt(ids=tuple(value)),)
        case [[*_], *_] if all(isinstance(ids, list) and _ids(ids) for ids in value):
            return tuple(Prompt(ids=tuple(ids)) for ids in value)
        case _:
            raise wrong("must be a string, token ids, or a list of strings or of token ids")


def ids_of(value: Any) -> tuple[int, ...]:
    if value is None or (isinstance(value, list) and _ids(value)):
        return tuple(value or ())
    raise wrong("must be a list of token ids")


def _ids(value: list[Any]) -> bool:
    return all(type(id) is int for id in value)


def short(value: Any, depth: int = 0) -> Any:
    """Enough of it to be shown: printing all of some values takes seconds."""
    match value:
        case str():
            return value[:100]
        case list() | dict() if depth == 2:
            return "..."
        case list():
            return [short(item, depth + 1) for item in value[:20]]
        case dict():
            first = islice(value.items(), 20)
            return {str(name)[:100]: short(item, depth + 1) for name, item in first}
        case _:
            return value
