"""A request's claim on a verifier, and what a gateway says to get one."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.core.replicas import Replica
from dspark.core.requests import Speculation


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Ask for a verifier, and a drafter for its drafts. The same request_id and attempt again get
    the same lease again.

    owner, owner_epoch: the gateway that will hold it. prompt_tokens: committed ids of a replay
    included. max_tokens: None if unknown. choices: that will run under it. prefix_hashes: of the
    prompt's first whole blocks, in order. floor_tps: tokens a second each choice should never fall
    below, 0 for none. deadline_s: seconds left, None for no deadline. exclude: verifiers not to
    name, those that just failed this request.
    """

    request_id: str
    attempt: int
    owner: str
    owner_epoch: int
    prompt_tokens: int
    model: str = ""
    tenant: str = ""
    priority: int = 0
    max_tokens: int | None = None
    choices: int = 1
    prefix_hashes: tuple[bytes, ...] = ()
    speculation: Speculation = field(default_factory=Speculation)
    floor_tps: float = 0.0
    deadline_s: float | None = None
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """tokens: that it claims of the verifier's KV pool. drafter: None for plain decoding or
    whatever drafter the verifier has itself. ttl_ms: until it expires unless its owner's heartbeat
    renews it. choices: runs under it."""

    lease_id: str
    request_id: str
    tenant: str
    verifier: Replica
    tokens: int
    ttl_ms: int
    drafter: Replica | None = None
    choices: int = 1
