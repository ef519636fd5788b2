"""Every error a user of dspark can meet, drawn as one tree.

Three families: what the caller did (`InvalidRequest`, `Unauthenticated`, `NotFound`, `Cancelled`),
what the system could not do now (`Overloaded`, `DeadlineExceeded`, `Unavailable`, `Fenced`), what
an operator must repair (`ConfigError`, `ModelError`). Each maps to a status in one place, at the
edge.
"""

from __future__ import annotations


class DsparkError(Exception):
    """Root of all errors that are expected and told to somebody."""


class InvalidRequest(DsparkError):
    """A request that can never be served: the field, its value, and the limit it breaks."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field}: {shown} {limit}")


class Unauthenticated(DsparkError):
    """No API key came with the call, or one that belongs to no tenant."""


class NotFound(DsparkError):
    """The call names something that is not here: a model that is not served."""


class Overloaded(DsparkError):
    """A bounded queue is full or a tenant's limit reached; try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExceeded(DsparkError):
    """The request's own deadline passed before it was finished."""


class Cancelled(DsparkError):
    """The caller hung up."""


class Unavailable(DsparkError):
    """This replica cannot serve now (starting, draining, lost); another may."""


class Fenced(DsparkError):
    """A newer life of this replica has registered: the older one must stop serving."""


class ConfigError(DsparkError):
    """A configuration value that is unknown or out of range, found at start."""


class ModelError(DsparkError):
    """A checkpoint that cannot be found, read or served."""
