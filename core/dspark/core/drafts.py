"""What passes between a verifier and a drafter, and the promise of a drafter (drafting.proto).

A draft is a hint: nothing here may be trusted by the side that receives it (design.md §4, L5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.core.sampling import SamplingMode

PROTOCOL_VERSION = 1
# Fields are only added, so of two peers the older decides; what is older than this is not spoken.
OLDEST_PROTOCOL_VERSION = 1
MAX_SUPPORT = 128
MAX_GAMMA = 64

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the drafter must draw: the request's mode, and the noise it shares with the target."""

    mode: SamplingMode
    temperature: float = 0.0
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask for the block after the anchor, and bring what the session has not seen yet.

    tokens: committed ids at positions start..anchor (n + 1 of them; the last is the anchor).
    features: float32 [n, d] context features of positions start..anchor-1, None for a drafter that
    reads none. output_position: generated tokens before x_1 (the anchor counted). gamma: at most so
    many tokens are wanted. A session opens with start = 0, or with the first position of the window
    that the drafter reads (`DrafterLink.context_window`).
    """

    session: str
    round: int
    start: int
    tokens: tuple[int, ...]
    features: FloatArray | None
    output_position: int
    sampling: DraftSampling
    gamma: int
    support_m: int = MAX_SUPPORT
    traceparent: str = ""

    @property
    def anchor_position(self) -> int:
        return self.start + len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed block x_1..x_γ (γ may be shorter than asked, or 0).

    confidence_logits: [γ] raw, before calibration. support_ids, support_weights: [γ, M] what each
    x_k was drawn from, already rounded to float32 (rejection mode only). Without a support the
    proposal is a point mass on x_k, which is always a valid reading: it is lossless for whatever
    the drafter really did, as long as admission does not look ahead.
    looks_back_only: the whole block, confidences included, is a function of committed history, so
    nothing in it can anticipate a draw (ngram; any greedy or coupled draft behaves so).
    """

    session: str
    round: int
    ids: tuple[int, ...]
    confidence_logits: FloatArray
    support_ids: NDArray[np.int32] | None = None
    support_weights: FloatArray | None = None
    looks_back_only: bool = False


@dataclass(frozen=True, slots=True)
class NeedContext:
    """The session does not hold positions start..anchor-1: send them again from `start`."""

    session: str
    start: int


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What a drafter says of itself at registration. feature_id "" = reads tokens only."""

    drafter_id: str
    kind: str
    gamma: int
    vocab_size: int = 0
    target_id: str = ""
    tokenizer_hash: str = ""
    layer_ids: tuple[int, ...] = ()
    feature_id: str = ""
    feature_width: int = 0
    protocol_version: int = PROTOCOL_VERSION


class Drafter(Protocol):
    """Proposes blocks for many sessions at once. Not thread-safe; one caller."""

    @property
    def card(self) -> DrafterCard: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        """One reply a request, in order. A repeated round gets the same reply again."""
        ...

    def close(self, session: str) -> None:
        """Forget a session; an unknown one is fine."""
        ...


@dataclass(frozen=True, slots=True)
class Lost:
    """No draft will come for this round: the drafter is gone and its session with it, or it was
    never asked."""

    session: str
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Faulty:
    """What the drafter said to this round is no draft. It is there, and so is its session."""

    session: str
    round: int
    why: str


Answer = Draft | NeedContext | Lost | Faulty


class DrafterLink(Protocol):
    """A drafter that answers later, as one in another process does. Nothing here waits; one caller.

    Each request is answered once: what cannot be answered any more is `Lost` at once. Whoever makes
    a link gives it a bell, a callable that it rings from any thread when there is something new.
    """

    @property
    def card(self) -> DrafterCard: ...

    @property
    def context_window(self) -> int:
        """Positions before the anchor that it reads; 0: all."""
        ...

    @property
    def available(self) -> bool:
        """Whether answers can be expected now."""
        ...

    @property
    def draining(self) -> bool:
        """It is going away: open no session here, and move the ones that are."""
        ...

    def ask(self, requests: Sequence[DraftRequest]) -> None:
        """One step's worth. A newer round of a session makes the older one's answer unwanted."""
        ...

    def answers(self) -> list[Answer]:
        """What has come since the last call, in order of arrival."""
        ...

    def close(self, session: str) -> None:
        """Forget a session; an unknown one is fine."""
        ...
