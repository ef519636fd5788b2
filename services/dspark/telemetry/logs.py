"""Logs: one line an event, as text or as JSON, with the ids of the request that it is about.

Messages of dspark hold no prompt, no answer and no secret. Nothing but the standard library here.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, NamedTuple, TextIO


class Ids(NamedTuple):
    """Of the request that a task works on. trace_id: "" if it is not traced."""

    request_id: str = ""
    trace_id: str = ""


_NONE = Ids()
_ids: ContextVar[Ids] = ContextVar("dspark_ids", default=_NONE)

# What is longer than this in a message is cut: a log is no place for a document.
MAX_MESSAGE_CHARS = 4096


@contextmanager
def about(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Log lines of this task, and of those that it starts, are about this request."""
    token = _ids.set(Ids(request_id, trace_id))
    try:
        yield
    finally:
        try:
            _ids.reset(token)
        except ValueError:  # a generator that is closed in another context than it ran in
            _ids.set(_NONE)


def ids() -> Ids:
    return _ids.get()


class JsonFormatter(logging.Formatter):
    """ts (UTC), level, logger, message, pool, replica, and where they are known request_id,
    trace_id, error (the exception's kind) and traceback."""

    def __init__(self, pool: str = "", replica: str = "") -> None:
        super().__init__()
        self._process = {
            name: value for name, value in (("pool", pool), ("replica", replica)) if value
        }

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "ts": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
            **self._process,
            **_told(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        told = " ".join(f"{name}={value}" for name, value in _told(record).items())
        return super().format(record) + (f" [{told}]" if told else "")


def _told(record: logging.LogRecord) -> dict[str, str]:
    """Ids that a line has: its own (`extra={"request_id": …}`), else its task's."""
    known = ids()
    found = {
        name: getattr(record, name, "") or getattr(known, name)
        for name in ("request_id", "trace_id")
    }
    return {name: str(value) for name, value in found.items() if value}


def _cut(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    return f"{message[:MAX_MESSAGE_CHARS]}… ({len(message)} characters)"


def set_up_logging(
    level: str = "info",
    format: Literal["text", "json"] = "text",
    *,
    pool: str = "",
    replica: str = "",
    stream: TextIO | None = None,
) -> None:
    """The process's logging, to stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(pool, replica) if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
