"""What goes into the store and comes out, and how it is written down: JSON where a script or a
later version must read it, bytes where only its sender and receiver do.

Replicas of two versions share a store during an upgrade: fields are only added, and those of a
later version are not read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from dspark.core.drafts import DrafterCard
from dspark.core.errors import Fenced, InvalidRequest, NotFound
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Card, DrafterLoad, Member, Pool, Replica, VerifierCard
from dspark.core.requests import Limits
from dspark.core.sampling import SamplingMode
from dspark.scheduler.store.names import MAX_TTL_MS, lease_id


@dataclass(frozen=True, slots=True)
class Members:
    """version: grows with every change of anything in `members`, all pools together."""

    version: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A verifier that may take a request, and the drafter that it would have. kv_tokens, max_runs:
    what its leases may claim together."""

    verifier: Replica
    kv_tokens: int
    max_runs: int
    drafter: Replica | None = None


class Refusal(StrEnum):
    """Why there is no lease."""

    FULL = "full"  # no candidate is alive, takes runs and has room
    TENANT = "tenant"  # the tenant's leases would be above its limit


@dataclass(frozen=True, slots=True)
class Renewed:
    """Leases: kept ones live on, lost ones were made again, dropped ones have no verifier."""

    kept: int = 0
    remade: int = 0
    dropped: int = 0

    def __add__(self, other: Renewed) -> Renewed:
        return Renewed(
            self.kept + other.kept, self.remade + other.remade, self.dropped + other.dropped
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """Of all leases of a verifier or tenant. Of a drafter: runs only."""

    tokens: int = 0
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """claims: by replica id; left out: none. tenants: by tenant. loads: by drafter, what it said in
    its last heartbeat."""

    claims: Mapping[str, Claim]
    tenants: Mapping[str, Claim]
    loads: Mapping[str, DrafterLoad]


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A verifier's newest report. sequence: never falls within an epoch (Report.seen_through).
    data: as its sender wrote it."""

    verifier: str
    epoch: int
    sequence: int
    data: bytes


class Taken(StrEnum):
    """What became of a report."""

    TAKEN = "taken"
    OLD = "old"  # a newer one of the same epoch is here
    UNKNOWN = "unknown"  # its verifier is not a member
    FENCED = "fenced"  # a newer epoch of its verifier exists


@dataclass(frozen=True, slots=True)
class Plans:
    """What was published last, at once for all. plans: of those asked for that have one."""

    version: int
    plans: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    version: int
    data: bytes


def not_a_member(replica_id: str) -> NotFound:
    return NotFound(f"{replica_id} is not a member: it must register again")


def fenced(replica_id: str, epoch: int, newer: int) -> Fenced:
    return Fenced(f"{replica_id} has registered again as epoch {newer}: epoch {epoch} is over")


def dumps(value: object) -> str:
    """Compact JSON. Raises InvalidRequest for NaN and ∞, which JSON has no word for."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidRequest("record", value, "must hold finite numbers") from None


def card_json(
    pool: Pool, address: str, card: Card | None, calibration: Sequence[CalibrationTable] = ()
) -> str:
    data: dict[str, object] = {
        "pool": pool,
        "address": address,
        "card": asdict(card) if card else None,
    }
    if calibration:
        data["calibration"] = [asdict(table) for table in calibration]
    return dumps(data)


def member(replica_id: str, epoch: int, draining: bool, text: str | bytes) -> Member:
    """From what `card_json` wrote."""
    data = json.loads(text)
    pool = Pool(data["pool"])
    replica = Replica(replica_id, data["address"], epoch)
    tables = tuple(map(_table, data.get("calibration", ())))
    return Member(pool, replica, _card(pool, data["card"]), draining, tables)


def _card(pool: Pool, data: dict[str, Any] | None) -> Card | None:
    if data is None:
        return None
    if pool is Pool.VERIFIER:
        limits = Limits(**_known(Limits, data["limits"]))
        return VerifierCard(**{**_known(VerifierCard, data), "limits": limits})
    return DrafterCard(**{**_known(DrafterCard, data), "layer_ids": tuple(data["layer_ids"])})


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """What this version has a field for."""
    return {field.name: data[field.name] for field in fields(cls) if field.name in data}


def _table(data: dict[str, Any]) -> CalibrationTable:
    mode, temperatures = SamplingMode(data["mode"]), tuple(data["temperatures"])
    return CalibrationTable(data["drafter_id"], mode, temperatures, tuple(data.get("offsets", ())))


def members(version: int, alive: Iterable[Member], pools: Collection[Pool]) -> Members:
    """Those of the pools, all if none is named, by id."""
    wanted = [member for member in alive if not pools or member.pool in pools]
    return Members(version, tuple(sorted(wanted, key=lambda member: member.replica.replica_id)))


def load_json(load: DrafterLoad) -> str:
    return dumps(asdict(load))


def load_from(text: str | bytes) -> DrafterLoad:
    return DrafterLoad(**_known(DrafterLoad, json.loads(text)))


def lease(request: LeaseRequest, tokens: int, candidate: Candidate, ttl_ms: int) -> Lease:
    """What a request gets on a candidate."""
    return Lease(
        lease_id(request.request_id, request.attempt),
        request.request_id,
        request.tenant,
        candidate.verifier,
        tokens,
        ttl_ms,
        candidate.drafter,
        request.choices,
    )


def lease_json(lease: Lease) -> str:
    """The id is the key it stands under. Scripts read tenant, verifier[0], tokens, choices and,
    where there is one, drafter[0]."""
    data: dict[str, object] = {
        "request_id": lease.request_id,
        "tenant": lease.tenant,
        "verifier": _replica_list(lease.verifier),
        "tokens": lease.tokens,
        "choices": lease.choices,
        "ttl_ms": lease.ttl_ms,
    }
    if lease.drafter is not None:
        data["drafter"] = _replica_list(lease.drafter)
    return dumps(data)


def lease_from(name: str, text: str | bytes) -> Lease:
    data = json.loads(text)
    drafter = data.get("drafter")
    return Lease(
        name,
        data["request_id"],
        data["tenant"],
        Replica(*data["verifier"]),
        data["tokens"],
        data["ttl_ms"],
        Replica(*drafter) if drafter else None,
        data["choices"],
    )


def report_from(verifier: str, text: bytes) -> tuple[int, StoredReport]:
    """(ms at which it is too old, report)."""
    expires, epoch, sequence, data = text.split(b" ", 3)
    return int(expires), StoredReport(verifier, int(epoch), int(sequence), data)


def report_text(expires_ms: int, report: StoredReport) -> bytes:
    """What put_reports.lua writes."""
    return b"%d %d %d %b" % (expires_ms, report.epoch, report.sequence, report.data)


def fresh(reports: Iterable[tuple[int, StoredReport]], now_ms: int) -> list[StoredReport]:
    """By verifier. What lies too far ahead was written before the clock went back."""
    kept = [report for expires, report in reports if now_ms < expires <= now_ms + MAX_TTL_MS]
    return sorted(kept, key=lambda report: report.verifier)


def _replica_list(replica: Replica) -> list[object]:
    return [replica.replica_id, replica.address, replica.epoch]
