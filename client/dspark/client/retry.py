"""When to try again: a policy, and the count of one request's tries against it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from dspark.core.errors import (
    ConfigError,
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class Retry:
    """What to do about a server that cannot be reached, stops, or loses the stream (UNAVAILABLE).

    attempts: tries in a row that bring no token, the first one counted; 1 never tries again. The
    wait before try n + 1 doubles from first_s up to most_s (seconds), less a random part of up to
    half, so that clients of a server that restarts do not come all at once. The defaults outlast
    5 to 11 s.
    """

    attempts: int = 8
    first_s: float = 0.1
    most_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts: {self.attempts} must be at least 1")
        if not 0 <= self.first_s <= self.most_s:
            raise ConfigError(f"first_s: {self.first_s} must be in [0, most_s = {self.most_s}]")

    def wait_s(self, failures: int, chance: float) -> float:
        """failures: tries that failed in a row, at least 1. chance: random in [0, 1)."""
        doubled = self.first_s * 2.0 ** min(failures - 1, 64)
        return min(self.most_s, doubled) * (1 - chance / 2)


class Tries:
    """Those of one request, and the deadline over all of them. attempt: counts from 0."""

    def __init__(
        self,
        retry: Retry,
        deadline_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if deadline_s is not None and not deadline_s > 0:
            raise InvalidRequest("deadline_s", deadline_s, "must be above 0 seconds")
        self.attempt = 0
        self._retry = retry
        self._deadline_s = deadline_s
        self._deadline = None if deadline_s is None else clock() + deadline_s
        self._clock = clock
        self._chance = chance
        self._failures = 0

    def left_s(self) -> float | None:
        """Seconds to the deadline. Raises DeadlineExceeded when it has passed."""
        if self._deadline is None:
            return None
        left = self._deadline - self._clock()
        if left <= 0:
            raise self._too_late()
        return left

    def progressed(self) -> None:
        """Something came that need not be sent again."""
        self._failures = 0

    def failed(self, error: DsparkError, *, accepted: bool = False) -> float:
        """Seconds to wait before the next try; raises `error` if there is to be none.

        accepted: an earlier try was, and brought ids: then a server that is too busy to go on is
        waited for too.
        """
        self._failures += 1
        waits = isinstance(error, Overloaded) and accepted
        if not (waits or isinstance(error, Unavailable)) or self._failures >= self._retry.attempts:
            if self.attempt:
                error.add_note(f"after {self.attempt + 1} attempts")
            raise error
        wait = self._retry.wait_s(self._failures, self._chance())
        if isinstance(error, Overloaded):
            wait = max(wait, error.retry_after_s)
        if self._deadline is not None and self._clock() + wait >= self._deadline:
            raise self._too_late() from error
        self.attempt += 1
        return wait

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the answer was not there within {self._deadline_s:g} s")
