"""The store on Redis or Valkey: each change is one script (scripts/)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Card, DrafterLoad, Pool, Replica
from dspark.scheduler.step_cost import StepCost
from dspark.scheduler.store import checks, records
from dspark.scheduler.store.config import StoreConfig
from dspark.scheduler.store.integrity import Snapshot, check
from dspark.scheduler.store.names import SWEEP, lease_id
from dspark.scheduler.store.records import (
    Candidate,
    Claim,
    Members,
    Plans,
    Refusal,
    Renewed,
    StoredCalibration,
    StoredReport,
    Taken,
    Usage,
    fenced,
    not_a_member,
)
from dspark.scheduler.store.redis_link import RedisLink

# Of one call: keeps a script at a few ms, and other callers waiting no longer.
RENEWED_AT_ONCE = 500


class RedisStore:
    """See `Store`. `async with` closes its connections; it opens them when they are needed.

    For tests: clock, seconds, instead of the server's time, which is the same for all callers;
    sweep, expired entries that one call clears away, at most.
    """

    def __init__(
        self, config: StoreConfig, clock: Callable[[], float] | None = None, sweep: int = SWEEP
    ) -> None:
        self._link = RedisLink(config, clock, sweep)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._link.close()

    async def ping(self) -> None:
        await self._link.ping()

    # --- members ---

    async def register(
        self,
        pool: Pool,
        replica: Replica,
        card: Card | None,
        step_cost: StepCost | None,
        ttl_s: float,
        calibration: Sequence[CalibrationTable] = (),
    ) -> int:
        checks.registration(pool, replica, card)
        epoch = await self._link.run(
            "register",
            replica.replica_id,
            records.card_json(pool, replica.address, card, calibration),
            step_cost.to_json() if step_cost else "",
            checks.ttl_ms(ttl_s),
        )
        return int(epoch)

    async def heartbeat(
        self, replica_id: str, epoch: int, draining: bool, load: DrafterLoad | None, ttl_s: float
    ) -> bool:
        checks.text("replica_id", replica_id)
        if load is not None:
            checks.load(load)
        status, *rest = await self._link.run(
            "heartbeat",
            replica_id,
            checks.epoch("epoch", epoch),
            int(draining),
            records.load_json(load) if load else "",
            checks.ttl_ms(ttl_s),
        )
        if status == b"unknown":
            raise not_a_member(replica_id)
        if status == b"fenced":
            raise fenced(replica_id, epoch, int(rest[0]))
        return bool(int(rest[0]))

    async def leave(self, replica_id: str, epoch: int) -> None:
        checks.text("replica_id", replica_id)
        await self._link.run("leave", replica_id, checks.epoch("epoch", epoch))

    async def want_drain(self, replica_id: str, wanted: bool) -> None:
        checks.text("replica_id", replica_id)
        if not await self._link.run("want_drain", replica_id, int(wanted)):
            raise not_a_member(replica_id)

    async def members(self, pools: Collection[Pool] = (), known: int = -1) -> Members | None:
        result = await self._link.run("members", checks.known(known))
        if result is None:
            return None
        version, *rest = result
        seen = (
            records.member(replica.decode(), int(epoch), drains == b"1", card)
            for replica, epoch, drains, card in _groups(rest, 4)
        )
        return records.members(int(version), seen, pools)

    async def step_costs(self, verifiers: Collection[str]) -> dict[str, tuple[int, StepCost]]:
        result = await self._link.run("step_costs", *checks.texts("verifier", verifiers))
        return {
            verifier.decode(): (int(epoch), StepCost.from_json(text.decode(), strict=False))
            for verifier, epoch, text in _groups(result, 3)
        }

    # --- leases ---

    async def acquire(
        self,
        request: LeaseRequest,
        tokens: int,
        candidates: Sequence[Candidate],
        ttl_s: float,
        tenant_tokens: int | None = None,
    ) -> Lease | Refusal:
        checks.lease_request(request, tokens, candidates, tenant_tokens)
        ttl_ms = checks.ttl_ms(ttl_s)
        name = lease_id(request.request_id, request.attempt)
        each: list[str | int] = []
        for candidate in candidates:
            lease = records.lease(request, tokens, candidate, ttl_ms)
            each += [candidate.verifier.replica_id, candidate.verifier.epoch]
            each += [candidate.kv_tokens, candidate.max_runs, records.lease_json(lease)]
        status, *rest = await self._link.run(
            "acquire",
            name,
            request.owner,
            request.owner_epoch,
            request.tenant,
            tokens,
            request.choices,
            "" if tenant_tokens is None else tenant_tokens,
            ttl_ms,
            *each,
        )
        if status == b"lease":
            return records.lease_from(name, rest[0])
        if status == b"fenced":
            raise fenced(request.owner, request.owner_epoch, int(rest[0]))
        return Refusal(status.decode())

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> Renewed:
        for lease in leases:
            checks.lease(lease)
        ttl_ms = checks.ttl_ms(ttl_s)
        total = Renewed()
        for first in range(0, len(leases), RENEWED_AT_ONCE):
            pairs: list[str] = []
            for lease in leases[first : first + RENEWED_AT_ONCE]:
                pairs += [lease.lease_id, records.lease_json(lease)]
            total += Renewed(*await self._link.run("renew", ttl_ms, *pairs))
        return total

    async def release(self, lease_ids: Collection[str]) -> int:
        names = checks.lease_ids(lease_ids)
        return int(await self._link.run("release", *names)) if names else 0

    async def usage(self) -> Usage:
        result = await self._link.run("usage")
        tokens, runs, tenant_tokens, tenant_runs, loads = map(_decoded, result)
        return Usage(
            _claims(tokens, runs),
            _claims(tenant_tokens, tenant_runs),
            {drafter: records.load_from(text) for drafter, text in loads.items()},
        )

    # --- reports ---

    async def put_reports(self, reports: Sequence[StoredReport], ttl_s: float) -> tuple[Taken, ...]:
        each: list[str | int | bytes] = []
        for report in reports:
            checks.report(report)
            each += [report.verifier, report.epoch, report.sequence, report.data]
        ttl_ms = checks.ttl_ms(ttl_s)
        results = await self._link.run("put_reports", ttl_ms, *each) if each else ()
        return tuple(Taken(result.decode()) for result in results)

    async def reports(self) -> list[StoredReport]:
        now, pairs = await self._link.run("reports")
        found = (records.report_from(name.decode(), text) for name, text in _groups(pairs, 2))
        return records.fresh(found, int(now))

    # --- plans ---

    async def lead(self, holder: str, ttl_s: float) -> int | None:
        term = await self._link.run("lead", checks.text("holder", holder), checks.ttl_ms(ttl_s))
        return None if term is None else int(term)

    async def resign(self, term: int) -> None:
        await self._link.run("resign", checks.epoch("term", term))

    async def publish(self, term: int, plans: Mapping[str, bytes], ttl_s: float) -> int | None:
        checks.plans(plans)
        pairs = [part for pair in plans.items() for part in pair]
        version = await self._link.run(
            "publish", checks.epoch("term", term), checks.ttl_ms(ttl_s), *pairs
        )
        return None if version is None else int(version)

    async def plans(self, verifiers: Collection[str], known: int = -1) -> Plans | None:
        result = await self._link.run(
            "plans", checks.known(known), *checks.texts("verifier", verifiers)
        )
        if result is None:
            return None
        version, *rest = result
        return Plans(int(version), {name.decode(): plan for name, plan in _groups(rest, 2)})

    # --- calibration ---

    async def set_calibration(self, term: int, version: int, data: bytes) -> bool:
        return bool(
            await self._link.run(
                "set_calibration",
                checks.epoch("term", term),
                checks.epoch("version", version),
                checks.data("calibration", data),
            )
        )

    async def calibration(self, known: int = -1) -> StoredCalibration | None:
        result = await self._link.run("calibration", checks.known(known))
        return None if result is None else StoredCalibration(int(result[0]), result[1])

    async def check_integrity(self) -> None:
        check(await self.snapshot())

    async def snapshot(self) -> Snapshot:
        """All that is stored, for tests and repair."""
        seen = await self._link.snapshot()
        hashes = {
            name: {field.decode(): value for field, value in content.items()}
            for name, (content, _) in seen.items()
            if isinstance(content, dict)
        }
        zsets = {
            name: {entry.decode(): score for entry, score in content}
            for name, (content, _) in seen.items()
            if isinstance(content, list)
        }
        leases = {name: records.lease_from(name, text) for name, text in hashes["leases"].items()}
        lasting = frozenset(name for name, (content, ttl) in seen.items() if content and ttl == -1)
        return Snapshot(hashes, zsets, leases, lasting)


def _groups(flat: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    return zip(*(flat[i::size] for i in range(size)), strict=True)


def _decoded(pairs: Sequence[bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in _groups(pairs, 2)}


def _claims(tokens: Mapping[str, str], runs: Mapping[str, str]) -> dict[str, Claim]:
    return {name: Claim(int(tokens.get(name, 0)), int(of)) for name, of in runs.items()}
