"""Every failure as OpenAI's error object: the one place where an error becomes a status."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from dspark.core.errors import (
    Cancelled,
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

log = logging.getLogger(__name__)

# Told where nobody knows how long starting or draining takes.
UNAVAILABLE_RETRY_S = 1.0
# What nginx logs for a client that hung up; HTTP itself has no status for it.
CLIENT_GONE = 499


class BadField(InvalidRequest):
    """A field that the schema refuses. code: OpenAI's word for why."""

    def __init__(self, field: str, value: object, limit: str, code: str) -> None:
        self.code = code
        super().__init__(field, value, limit)


class Refused(DsparkError):
    """What only HTTP can get wrong: a route, a method, a media type, a size, a pace."""

    def __init__(self, status: int, message: str, code: str, *, close: bool = False) -> None:
        self.status = status
        self.code = code
        self.close = close
        super().__init__(message)


class ClientGone(DsparkError):
    """The connection is closed: nobody is left to be told anything."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told. status: of the response, if it has not begun."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def failure(error: Exception) -> Failure:
    """How to tell of `error`. One that nobody expected is logged whole and told without detail."""
    match error:
        case InvalidRequest():
            code = error.code if isinstance(error, BadField) else "invalid_value"
            return Failure(400, str(error), "invalid_request_error", code, error.field)
        case Refused():
            headers = {"connection": "close"} if error.close else {}
            return Failure(
                error.status, str(error), "invalid_request_error", error.code, headers=headers
            )
        case Unauthenticated():
            headers = {"www-authenticate": "Bearer"}
            return Failure(
                401, str(error), "invalid_request_error", "invalid_api_key", headers=headers
            )
        case NotFound():
            return Failure(404, str(error), "invalid_request_error", "model_not_found", "model")
        case Overloaded():
            headers = retry_after(error.retry_after_s)
            return Failure(
                429, str(error), "rate_limit_error", "rate_limit_exceeded", headers=headers
            )
        case DeadlineExceeded():
            # The time that the caller gave is over: its client need not try again by itself.
            headers = {"x-should-retry": "false"}
            return Failure(504, str(error), "timeout_error", "deadline_exceeded", headers=headers)
        case Cancelled():
            return Failure(CLIENT_GONE, str(error), "invalid_request_error", "cancelled")
        case Unavailable():
            # Its own words are the operator's: they may carry what a step raised.
            log.info("a call ended as unavailable: %s", error)
            return Failure(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "this server cannot answer now: it is starting, stopping or recovering; try again",
                "server_error",
                "unavailable",
                headers=retry_after(UNAVAILABLE_RETRY_S),
            )
        case _:
            log.error("a call failed", exc_info=error)
            return Failure(500, "the server made an error", "server_error", "internal_error")


def retry_after(seconds: float) -> dict[str, str]:
    """In whole seconds, as HTTP has it, and in the milliseconds that OpenAI's clients prefer."""
    milliseconds = max(math.ceil(seconds * 1000), 1)
    return {
        "retry-after": str(math.ceil(milliseconds / 1000)),
        "retry-after-ms": str(milliseconds),
    }
