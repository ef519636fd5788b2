"""What a verifier has asked of a drafter and not heard yet, and how long is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.core.drafts import DraftRequest, Lost
from dspark.core.sampling import SamplingMode

# Ticks of the bound on silence.
TICKS = 6
# How often its usual reply time a drafter may be silent before it counts as lost.
USUAL_TIMES = 3.0
# Weight of the newest reply in the usual reply time.
NEWEST = 0.1
# Seconds after which a single round is given up while others are answered.
ROUND_S = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What is kept of a request until its answer comes. start: the first position that it brings.
    at: when it was asked."""

    round: int
    start: int
    gamma: int
    mode: SamplingMode
    support_m: int
    at: float


class OpenRounds:
    """One round a session, in order of being asked; each leaves once. Times are in seconds on the
    caller's clock.

    Silence is counted in ticks and not in seconds: a caller that stood still itself has not
    listened, and makes one tick of it only. usual_s: running mean of reply times.
    """

    def __init__(self, silent_s: float, usual_s: float = 0.0) -> None:
        self.silent_s = silent_s
        self.usual_s = usual_s
        self._asked: dict[str, Asked] = {}
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def tick_s(self) -> float:
        """Seconds from tick to tick."""
        return self.silent_s / TICKS

    @property
    def bound_s(self) -> float:
        """Of silence, while rounds are open."""
        return max(self.silent_s, USUAL_TIMES * self.usual_s)

    def add(self, request: DraftRequest, now: float) -> None:
        """The round before of its session is not waited for any more."""
        if not self._asked:
            self._ticks = 0  # until now nothing was to be heard
        self._asked.pop(request.session, None)
        self._asked[request.session] = Asked(
            request.round,
            request.start,
            request.gamma,
            request.sampling.mode,
            request.support_m,
            now,
        )

    def drop(self, session: str) -> None:
        self._asked.pop(session, None)

    def unsay(self, session: str, round_: int) -> bool:
        """A round could not be asked; False if nobody waits for it any more."""
        asked = self._asked.get(session)
        if asked is None or asked.round != round_:
            return False
        del self._asked[session]
        return True

    def drafted(self, session: str, round_: int, now: float) -> Asked | None:
        """A draft has come: of which round; None if nobody waits for it."""
        asked = self._asked.get(session)
        return None if asked is None or asked.round != round_ else self._take(session, now)

    def needed(self, session: str, start: int, now: float) -> Asked | None:
        """Context is wanted from start on; None if nobody waits, or it is on its way already."""
        asked = self._asked.get(session)
        return None if asked is None or start >= asked.start else self._take(session, now)

    def heard(self) -> None:
        """The drafter has said something."""
        self._ticks = 0

    def tick(self) -> bool:
        """Whether the drafter has been silent for too long."""
        self._ticks += 1
        return bool(self._asked) and self._ticks * self.tick_s > self.bound_s

    def late(self, now: float) -> list[Lost]:
        """Rounds that are given up alone: others are answered, so the drafter is there."""
        late = [s for s, asked in self._asked.items() if now - asked.at > ROUND_S]
        return self._lose(late, f"no reply in {ROUND_S:g} s")

    def lose(self, why: str) -> list[Lost]:
        """All of them."""
        return self._lose(list(self._asked), why)

    def _take(self, session: str, now: float) -> Asked:
        asked = self._asked.pop(session)
        took = now - asked.at
        self.usual_s += (NEWEST if self.usual_s else 1.0) * (took - self.usual_s)
        return asked

    def _lose(self, sessions: Sequence[str], why: str) -> list[Lost]:
        return [Lost(session, self._asked.pop(session).round, why) for session in sessions]
