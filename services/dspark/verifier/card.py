"""What a verifier says of itself, and where it is found (verification.proto). Light to import."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.core.drafts import DrafterCard
from dspark.core.requests import Limits


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


@dataclass(frozen=True, slots=True)
class Described:
    """A verifier's answer to Describe. drafters: that it can ask. heartbeat_s: between two signs of
    life while a run is open."""

    replica: Replica
    card: VerifierCard
    drafters: tuple[DrafterCard, ...]
    draining: bool
    heartbeat_s: float
