"""How far a policy is from an oracle that knows which draft tokens will be accepted.

Rules of this file. The steps are given: which requests decode together, what each has drafted, how
much of it the target would accept (for greedy answers a property of the text), and what a step
costs. A player chooses verify lengths; a round then commits 1 + min(ℓ, accepted) tokens, and the
next step is the next given one whatever was chosen. So a player is worth Σ tokens / Σ seconds of
decoding (prompts beside it are computed once, whatever is chosen), steps do not depend on each
other, and the best that anybody could do is found exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dspark.scheduler import StepCost

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class KnownRound:
    """A decoding request's part in a step. context: tokens that its anchor attends to. survival
    [n]: of its draft as the planner sees it, n = 0 without one. accepted: of those n tokens, the
    ones that the target says itself."""

    request: str
    context: int
    survival: FloatArray
    accepted: int


@dataclass(frozen=True, slots=True, eq=False)
class KnownStep:
    """prefill: P tokens. rounds: of its R decoding requests, at least one."""

    prefill: int
    rounds: tuple[KnownRound, ...]

    @property
    def context(self) -> int:
        return sum(known.context for known in self.rounds)


@dataclass(frozen=True, slots=True)
class Play:
    """What a player did in a step. lengths [R]: draft tokens verified. asked: drafts made, whether
    verified or not."""

    lengths: tuple[int, ...]
    asked: int


@dataclass(frozen=True, slots=True)
class Score:
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def score(
    steps: Sequence[KnownStep], plays: Sequence[Play], cost: StepCost, draft_s: float
) -> Score:
    """draft_s: seconds that making one draft adds to a step."""
    tokens, seconds = 0, 0.0
    for step, play in zip(steps, plays, strict=True):
        rounds = zip(step.rounds, play.lengths, strict=True)
        tokens += sum(1 + min(length, known.accepted) for known, length in rounds)
        active = len(step.rounds)
        size = step.prefill + active + sum(play.lengths)
        seconds += cost.decode_seconds(step.prefill, active, size, step.context)
        seconds += draft_s * play.asked
    return Score(tokens, seconds)


def oracle(steps: Sequence[KnownStep], cost: StepCost, draft_s: float) -> Score:
    """The most tokens a second that any lengths give on these steps: the full search (§5.2) with
    what is accepted in place of survivals.

    It verifies no token that is rejected, and asks for no draft that it does not verify. Of n
    tokens in a step the longest runs come first, so that they take the fewest drafts. Maximising a
    ratio of sums is Dinkelbach's method: given a price λ of a second, each step by itself maximises
    tokens − λ · seconds; λ becomes the ratio that this reached, until it no longer grows.
    """
    choices = [_choices(step, cost, draft_s) for step in steps]
    best, chosen = 0.0, Score(0, 1.0)
    while True:
        picks = [int((tokens - best * seconds).argmax()) for tokens, seconds in choices]
        found = Score(
            sum(int(tokens[n]) for n, (tokens, _) in zip(picks, choices, strict=True)),
            sum(float(seconds[n]) for n, (_, seconds) in zip(picks, choices, strict=True)),
        )
        if found.rate <= best:
            return chosen
        best, chosen = found.rate, found


def _choices(step: KnownStep, cost: StepCost, draft_s: float) -> tuple[FloatArray, FloatArray]:
    """tokens [N + 1], seconds [N + 1] of a step that verifies 0..N accepted tokens."""
    runs = np.cumsum(sorted((known.accepted for known in step.rounds), reverse=True))
    active, most = len(step.rounds), int(runs[-1])
    drafts = np.searchsorted(runs, np.arange(most + 1))  # whole runs before the one that n ends in
    drafts[1:] += 1
    seconds = cost.decode_curve(step.prefill, active, step.context, most) + draft_s * drafts
    return active + np.arange(most + 1, dtype=np.float64), seconds


def regret(player: Score, best: Score) -> float:
    """The share of the oracle's tokens a second that a player misses, in [0, 1)."""
    return 1 - player.rate / best.rate
