"""What a scheduler replica knows of the cluster at one moment, for people and scripts that ask."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.core.replicas import DrafterLoad, Member
from dspark.core.sampling import SamplingMode


@dataclass(frozen=True, slots=True)
class VerifierLoad:
    """Of a verifier's newest report; rates are of the interval that it covers.

    running, waiting: its runs in steps and waiting. free_blocks, blocks: of KV. tokens_per_s:
    committed. accepted_length: tokens a round committed (τ). drafted_per_s: draft tokens received.
    draft_wait_s: mean seconds that a round waited for its draft. step_residual_s: measured minus
    predicted step time, mean.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    blocks: int = 0
    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    accepted_length: float = 0.0
    drafted_per_s: float = 0.0
    draft_wait_s: float = 0.0
    step_residual_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """runs, claimed_tokens: of all leases on it. load: None before it said anything, and for a
    gateway."""

    member: Member
    runs: int = 0
    claimed_tokens: int = 0
    load: VerifierLoad | DrafterLoad | None = None


@dataclass(frozen=True, slots=True)
class CalibrationDrift:
    """How far a drafter's confidences are from their newest verdicts: expected calibration error,
    and what a perfect table would show of so few, both in [0, 1]."""

    drafter_id: str
    mode: SamplingMode
    error: float
    noise: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """As one scheduler replica sees it. scheduler: its name. leads: whether it plans. seen_s: age
    of what it saw, seconds; None if it has seen nothing yet. store_away_s: since the store went
    away, None while it is there. plans: that it has published. following: verifiers that get their
    plans from it. calibration, drift: of the one that plans."""

    scheduler: str
    leads: bool
    members: tuple[MemberStatus, ...] = ()
    seen_s: float | None = None
    store_away_s: float | None = None
    plans: int = 0
    following: int = 0
    calibration: int = 0
    drift: tuple[CalibrationDrift, ...] = ()
