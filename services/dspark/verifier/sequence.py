"""A choice as the engine runs it: its tokens, its KV blocks, its draft session."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dspark.core.drafts import Draft
from dspark.core.sequence import SequenceState
from dspark.models.verification import TokenCounts


@dataclass(frozen=True, slots=True)
class DraftInHand:
    """A validated draft waiting for its verify step.

    number: order of arrival at this verifier, the unit of the causal barrier. survival: float64
    [γ], non-increasing, calibrated; ends where confidence stopped making sense.
    """

    number: int
    draft: Draft
    survival: np.ndarray


@dataclass(slots=True, eq=False)
class Sequence:
    """blocks: KV blocks, in order. names: digests of the full ones known to the prefix cache.

    feature_id: what its drafter reads ("" = tokens only), fixed for its life. sent: first position
    its draft session has not been told of. saving_s: running mean of the seconds a round's draft
    saved, None before the first one. rounds_unasked: rounds since a draft was last asked for.
    paused_at: since when its reader cannot keep up, on the engine's clock; None while it runs.
    """

    state: SequenceState
    rng: np.random.Generator
    counts: TokenCounts | None = None
    drafter: str = ""
    gamma: int = 0
    feature_id: str = ""
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    draft: DraftInHand | None = None
    round: int = 0
    sent: int = 0
    saving_s: float | None = None
    rounds_unasked: int = 0
    paused_at: float | None = None

    @property
    def paused(self) -> bool:
        return self.paused_at is not None

    @property
    def session(self) -> str:
        request = self.state.request
        return f"{request.request_id}/{request.choice}/{request.attempt}"
