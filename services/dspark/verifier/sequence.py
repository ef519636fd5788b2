"""A choice as the engine runs it: its tokens, its KV blocks, its draft session."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dspark.core.drafts import Draft, DraftRequest
from dspark.core.sequence import SequenceState
from dspark.core.traces import RunTrace
from dspark.models.verification import TokenCounts

# Weight of the newest round in a request's means.
ROUND_RATE = 0.2


def running_mean(before: float | None, now: float) -> float:
    """Begun with its first value."""
    return now if before is None else (1 - ROUND_RATE) * before + ROUND_RATE * now


@dataclass(frozen=True, slots=True)
class DraftInHand:
    """A validated draft waiting for its verify step.

    number: order of arrival at this verifier, the unit of the causal barrier. survival: float64
    [γ], non-increasing, calibrated; ends where confidence stopped making sense. source: name of who
    made it; linked: in another process. drafter_id: its checkpoint. asked_at, answered_at: seconds
    on the engine's clock.
    """

    number: int
    draft: Draft
    survival: np.ndarray
    source: str = ""
    linked: bool = False
    drafter_id: str = ""
    asked_at: float = 0.0
    answered_at: float = 0.0


@dataclass(slots=True, eq=False)
class Errand:
    """Drafts asked of one source together. at: seconds on the engine's clock. n: how many; left:
    sequences that still wait, by session. idle_s: that the engine stood still meanwhile. drafted:
    tokens that came; a reply without any may have been made in no time. context: tokens that were
    told beyond those of a round, of prompts mostly."""

    source: str
    at: float
    n: int
    left: dict[str, Sequence] = field(default_factory=dict)
    idle_s: float = 0.0
    drafted: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A round whose draft is under way. tries: times it was asked for. hopeful: asked to learn what
    it is worth or what it takes, so the best is expected of it."""

    request: DraftRequest
    errand: Errand
    tries: int
    hopeful: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """blocks: KV blocks, in order. names: digests of the full ones known to the prefix cache.
    donor: the cached block of which a part was copied at the start, None for none.

    drafter: what drafts for it, a local drafter's name or a checkpoint's id, "" for nothing;
    feature_id: what that reads ("" = tokens only). Both are fixed for its life. source: who has its
    draft session now; checkpoint: whose drafts were asked for last. sent: first position that this
    session has not been told of. asked: the round under way; while there is one it is in no step.

    saving_s: running mean of the seconds a round's draft saved, None before the first one; token_s:
    what a token cost then, 0 before (`priced`); misses:
    rounds before that in which one was asked for and none came. verifies, gains: of draft tokens
    that a round verified, and that were expected to stand. reach: how many are worth asking for,
    None before the first draft; wanted: how many are asked for now. rounds_unasked: rounds since a
    draft was last asked for. paused_at: since when its reader cannot keep up, on the engine's
    clock; None while it runs. trace: None unless it is traced.
    """

    state: SequenceState
    rng: np.random.Generator
    counts: TokenCounts | None = None
    drafter: str = ""
    gamma: int = 0
    feature_id: str = ""
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    donor: int | None = None
    draft: DraftInHand | None = None
    round: int = 0
    source: str = ""
    checkpoint: str = ""
    sent: int = 0
    asked: Asked | None = None
    saving_s: float | None = None
    token_s: float = 0.0
    misses: int = 0
    verifies: float | None = None
    gains: float | None = None
    reach: float | None = None
    wanted: int = 0
    rounds_unasked: int = 0
    paused_at: float | None = None
    trace: RunTrace | None = None

    @property
    def paused(self) -> bool:
        return self.paused_at is not None

    @property
    def linked(self) -> bool:
        """Whether this round's draft is under way elsewhere, or came from there."""
        return self.asked is not None or (self.draft is not None and self.draft.linked)

    @property
    def session(self) -> str:
        request = self.state.request
        return f"{request.request_id}/{request.choice}/{request.attempt}"

    def forget_worth(self) -> None:
        """Another drafter drafts for it: what the last one's drafts were worth says nothing."""
        self.saving_s = self.verifies = self.gains = self.reach = None
        self.misses = 0

    def priced(self, token_s: float) -> None:
        """A token costs so many seconds of plain decoding now, and what drafts save is tokens:
        among few it is more than it was among many."""
        if self.saving_s is not None and self.token_s:
            self.saving_s *= token_s / self.token_s
        self.token_s = token_s

    @property
    def probed(self) -> bool:
        """A draft asked for now would be to see what it is worth."""
        return self.rounds_unasked > 0 or self.saving_s is None

    def saved_nothing(self) -> None:
        """A draft was asked for, and none came that could be used."""
        if self.saving_s is None:
            self.misses += 1
        else:
            self.saving_s = running_mean(self.saving_s, 0.0)

    @property
    def expected_saving_s(self) -> float:
        """NaN: to be asked for because nobody knows what its drafts are worth. While none at all
        has come each try is twice as far from the last: prompt lookup finds nothing at first, a
        drafter that is broken never has anything."""
        if self.saving_s is not None:
            return self.saving_s
        return np.nan if self.rounds_unasked + 1 >= 2 ** min(self.misses, 32) else 0.0
