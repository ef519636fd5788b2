"""Bounds of the HTTP front: every default once, with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """body_bytes: of a request; a million tokens of text. body_s: seconds for all of a body to
    come; 4 MiB at 0.5 Mbit/s. head_s: seconds for a request's head, from a connection's first
    moment. idle_s: seconds a connection stays between requests; longer than proxies (60) and
    clients keep theirs, so that they close first. stall_timeout_s: the gateway's, seconds after
    which a call ends whose client takes nothing. drain_s: seconds that running calls get to finish
    when the server stops.
    """

    body_bytes: int = 4 * 2**20
    body_s: float = 60.0
    head_s: float = 15.0
    idle_s: int = 75
    stall_timeout_s: float = EngineConfig().stall_timeout_s
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}: {value!r} must be above 0")

    @property
    def cut_off_s(self) -> float:
        """Seconds after which a connection is cut that takes nothing: as long again as its call
        had, for the client to come back and read how that ended."""
        return 2 * self.stall_timeout_s
