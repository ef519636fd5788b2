"""Something that is there or not, told once when that changes."""

from __future__ import annotations

import logging


class Outage:
    """what: for the log, as in "the store". since: when it went away, None while it is there. why:
    what was said of it last while it was away. count: how often it went."""

    def __init__(self, what: str, log: logging.Logger) -> None:
        self.since: float | None = None
        self.why = ""
        self.count = 0
        self._what = what
        self._log = log

    def away(self, now: float, why: Exception) -> None:
        self.why = str(why)
        if self.since is None:
            self.since = now
            self.count += 1
            self._log.warning("%s is away: %s", self._what, why)

    def back(self, now: float) -> None:
        if self.since is not None:
            self._log.warning("%s is back after %.1f s", self._what, now - self.since)
            self.since = None
