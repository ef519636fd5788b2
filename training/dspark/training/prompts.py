"""Lines of prompts, and of answers to them, as training data is made from.

A line is a JSON object with one of `prompt` (a user's message), `messages`, `prompt_ids`; it may
name its `domain` and `source`, and bring `answer_ids` that the target only has to read.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.core.errors import DsparkError, InvalidRequest
from dspark.training.errors import DataError

# Messages of a chat -> token ids up to where the answer begins.
Encode = Callable[[Sequence[Mapping[str, str]]], tuple[int, ...]]

_FORMS = ("prompt", "messages", "prompt_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """line: where it stands in its file, from 1. ids: encoded. answer_ids: given, or None."""

    line: int
    ids: tuple[int, ...]
    domain: str = ""
    source: str = ""
    answer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Room:
    """What a target can take. context: tokens of prompt and answer together."""

    vocab_size: int
    context: int


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is not blank, from a file or a gzip of one."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:  # the latter two: a gzip cut short
        raise DataError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def read_prompts(
    path: Path, encode: Encode, room: Room, *, skip_bad: bool = False
) -> tuple[list[Prompt], list[BadLine]]:
    """All prompts of a file, and the lines left out because something is wrong with them.

    Raises `DataError` for an unreadable file or one without a usable line, and unless `skip_bad`
    for the bad lines, the first few by number and reason.
    """
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    for number, line in read_lines(path):
        try:
            prompts.append(_parse(number, line, encode, room))
        except DsparkError as error:
            bad.append(BadLine(number, str(error)))
    if bad and not skip_bad:
        raise DataError(f"{path}: {told(bad)}; --skip-bad leaves such lines out")
    if not prompts:
        raise DataError(f"{path}: has no line to use{f': {told(bad)}' if bad else ''}")
    return prompts, bad


def told(bad: Sequence[BadLine], most: int = 3) -> str:
    """The first few bad lines, and how many there are."""
    more = f" and {len(bad) - most} more" if len(bad) > most else ""
    return "; ".join(map(str, bad[:most])) + more


def _parse(number: int, line: bytes, encode: Encode, room: Room) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end
        raise InvalidRequest(
            "line", line[:60].decode(errors="replace"), f"is no JSON: {error}"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("line", value, "must be a JSON object")
    given = [form for form in _FORMS if form in value]
    if len(given) != 1:
        raise InvalidRequest("line", sorted(value), f"must have exactly one of {', '.join(_FORMS)}")
    answer = None
    if "answer_ids" in value:
        answer = _ids("answer_ids", value["answer_ids"], room)
        if not answer:
            raise InvalidRequest("answer_ids", [], "is an empty answer")
    ids = _prompt_ids(given[0], value[given[0]], encode, room)
    if not ids:
        raise InvalidRequest(given[0], "", "is empty")
    total = len(ids) + (1 if answer is None else len(answer))
    if total > room.context:
        what = "leaves no room to answer" if answer is None else "and its answer do not fit"
        raise InvalidRequest(
            given[0], f"{total} tokens", f"{what}: the target's context is {room.context}"
        )
    return Prompt(number, ids, _label(value, "domain"), _label(value, "source"), answer)


def _prompt_ids(form: str, value: Any, encode: Encode, room: Room) -> tuple[int, ...]:
    if form == "prompt_ids":
        return _ids(form, value, room)
    if form == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise InvalidRequest("prompt", value, "must be a string that is not blank")
        return encode([{"role": "user", "content": value}])
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise InvalidRequest("messages", value, "must be a list of objects with role and content")
    return encode(value)


def _ids(name: str, value: Any, room: Room) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InvalidRequest(name, value, "must be a list of token ids")
    for token in value:
        if not 0 <= token < room.vocab_size:
            raise InvalidRequest(name, token, f"is no id of the vocabulary [0, {room.vocab_size})")
    return tuple(value)


def _label(value: Mapping[str, Any], name: str) -> str:
    label = value.get(name, "")
    if not isinstance(label, str):
        raise InvalidRequest(name, label, "must be a string")
    return label


def domains(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts by domain, in the order they were met."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.domain, []).append(prompt)
    return found
