"""Who is in the cluster: replicas of the pools, what they say of themselves, and who is alive."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dspark.core.drafts import DrafterCard
from dspark.core.plans import CalibrationTable
from dspark.core.requests import Limits


class Pool(StrEnum):
    """What an operator scales on its own."""

    GATEWAY = "gateway"
    VERIFIER = "verifier"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Replica:
    """A process that others may call. address: host:port. epoch: fencing number, 0 if it never
    registered (single process)."""

    replica_id: str = ""
    address: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class VerifierCard:
    """backend: with precision and device, what a step cost is valid for. block_size: tokens of a KV
    block. max_sequences: of a step. max_waiting: runs that wait before new ones are refused."""

    model: str
    target_id: str
    tokenizer_hash: str
    backend: str
    limits: Limits
    block_size: int
    max_sequences: int
    max_waiting: int


Card = VerifierCard | DrafterCard


@dataclass(frozen=True, slots=True)
class Described:
    """A verifier's answer to Describe. drafters: that it can ask. heartbeat_s: between two signs of
    life while a run is open."""

    replica: Replica
    card: VerifierCard
    drafters: tuple[DrafterCard, ...]
    draining: bool
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that is alive. card: None for a gateway. draining: it finishes what it has and
    takes nothing new. calibration: a drafter's, shipped with its checkpoint; who watches members is
    not told (a drafter tells its verifiers itself)."""

    pool: Pool
    replica: Replica
    card: Card | None = None
    draining: bool = False
    calibration: tuple[CalibrationTable, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """A drafter since its last heartbeat. sessions: held. queue: requests that wait for a forward
    pass now. tokens_per_s: draft tokens made; capacity_tokens_per_s: that it could make, never
    idle."""

    sessions: int = 0
    queue: int = 0
    tokens_per_s: float = 0.0
    capacity_tokens_per_s: float = 0.0
