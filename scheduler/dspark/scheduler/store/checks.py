"""What may enter a store: both implementations ask here first. Raises InvalidRequest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from dspark.core.drafts import DrafterCard
from dspark.core.errors import InvalidRequest
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.replicas import Card, DrafterLoad, Pool, Replica, VerifierCard
from dspark.scheduler.store.names import MAX_TTL_MS
from dspark.scheduler.store.records import Candidate, StoredReport

MAX_ID_CHARS = 512
MAX_LEASE_ID_CHARS = MAX_ID_CHARS + 20  # names.lease_id: a request's, with its attempt
MAX_BYTES = 1 << 20
# A sum of so many tokens over 4 million leases is still a whole number in a script (2^53).
MAX_TOKENS = 1 << 31
MAX_RUNS = 1 << 16
MAX_NUMBER = 1 << 53

_CARDS: Mapping[Pool, type[Card] | None] = {
    Pool.GATEWAY: None,
    Pool.VERIFIER: VerifierCard,
    Pool.DRAFTER: DrafterCard,
}


def text(field: str, value: str, empty: bool = False, limit: int = MAX_ID_CHARS) -> str:
    """Ids and addresses. Printable: a line end separates two ids in a key, and what is printable
    has UTF-8."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > limit:
        raise InvalidRequest(field, value, f"must be printable, of at most {limit} characters")
    if not (value or empty):
        raise InvalidRequest(field, value, "must not be empty")
    return value


def number(field: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(field, value, f"must be a whole number in [{low}, {high}]")
    return value


def ttl_ms(ttl_s: float) -> int:
    if not 0.001 <= ttl_s <= MAX_TTL_MS / 1000:
        raise InvalidRequest("ttl_s", ttl_s, f"must be in [0.001, {MAX_TTL_MS // 1000}] seconds")
    return round(ttl_s * 1000)


def data(field: str, value: bytes) -> bytes:
    if len(value) > MAX_BYTES:
        raise InvalidRequest(field, f"{len(value)} bytes", f"must be at most {MAX_BYTES} bytes")
    return value


def epoch(field: str, value: int) -> int:
    return number(field, value, 0, MAX_NUMBER)


def known(value: int) -> int:
    """A version that the caller has; -1 for none."""
    return number("known", value, -1, MAX_NUMBER)


def replica(field: str, value: Replica) -> None:
    text(f"{field}.replica_id", value.replica_id)
    text(f"{field}.address", value.address, empty=True)
    epoch(f"{field}.epoch", value.epoch)


def registration(pool: Pool, value: Replica, card: Card | None) -> None:
    replica("replica", value)
    wanted = _CARDS[Pool(pool)]
    if card is not None if wanted is None else not isinstance(card, wanted):
        kind = wanted.__name__ if wanted else "no card"
        raise InvalidRequest("card", type(card).__name__, f"must be {kind} in pool {pool}")


def load(value: DrafterLoad) -> None:
    number("load.sessions", value.sessions, 0, MAX_NUMBER)
    number("load.queue", value.queue, 0, MAX_NUMBER)
    for name in ("tokens_per_s", "capacity_tokens_per_s"):
        figure = getattr(value, name)
        if not (math.isfinite(figure) and figure >= 0):
            raise InvalidRequest(f"load.{name}", figure, "must be a finite number, at least 0")


def lease_request(
    request: LeaseRequest,
    tokens: int,
    candidates: Sequence[Candidate],
    tenant_tokens: int | None,
) -> None:
    text("request_id", request.request_id)
    number("attempt", request.attempt, 0, MAX_NUMBER)
    text("owner", request.owner)
    epoch("owner_epoch", request.owner_epoch)
    text("tenant", request.tenant, empty=True)
    number("choices", request.choices, 1, MAX_RUNS)
    number("tokens", tokens, 1, MAX_TOKENS)
    if tenant_tokens is not None:
        number("tenant_tokens", tenant_tokens, 0, MAX_NUMBER)
    for candidate in candidates:
        replica("candidate", candidate.verifier)
        number("candidate.kv_tokens", candidate.kv_tokens, 0, MAX_NUMBER)
        number("candidate.max_runs", candidate.max_runs, 0, MAX_NUMBER)
        if candidate.drafter is not None:
            replica("candidate.drafter", candidate.drafter)


def lease(value: Lease) -> None:
    text("lease_id", value.lease_id, limit=MAX_LEASE_ID_CHARS)
    text("request_id", value.request_id)
    text("tenant", value.tenant, empty=True)
    replica("verifier", value.verifier)
    number("tokens", value.tokens, 1, MAX_TOKENS)
    number("choices", value.choices, 1, MAX_RUNS)
    number("ttl_ms", value.ttl_ms, 0, MAX_NUMBER)
    if value.drafter is not None:
        replica("drafter", value.drafter)


def report(value: StoredReport) -> None:
    text("verifier", value.verifier)
    epoch("epoch", value.epoch)
    number("sequence", value.sequence, 0, MAX_NUMBER)
    data("report", value.data)


def plans(value: Mapping[str, bytes]) -> None:
    for verifier, plan in value.items():
        text("verifier", verifier)
        data("plan", plan)


def texts(field: str, values: Collection[str]) -> list[str]:
    return [text(field, value) for value in values]


def lease_ids(values: Collection[str]) -> list[str]:
    return [text("lease_id", value, limit=MAX_LEASE_ID_CHARS) for value in values]
