"""Bounds of the HTTP front: every default once, with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dspark.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """body_bytes: of a request; a million tokens of text. body_s: seconds for all of a body to
    come; 4 MiB at 0.5 Mbit/s. head_s: seconds for a request's head, from a connection's first
    moment. idle_s: seconds a connection stays between requests; longer than proxies (60) and
    clients keep theirs, so that they close first. stalled_s: seconds a client may read nothing of
    what waits for it. drain_s: seconds that running calls get to finish when the server stops.
    """

    body_bytes: int = 4 * 2**20
    body_s: float = 60.0
    head_s: float = 15.0
    idle_s: int = 75
    stalled_s: float = 60.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}: {value!r} must be above 0")
