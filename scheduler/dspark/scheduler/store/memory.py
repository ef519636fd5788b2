"""The store in one process: the twin of `RedisStore`, step by step the same, for tests, the
simulator and a cluster of one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Card, DrafterLoad, Member, Pool, Replica
from dspark.scheduler.step_cost import StepCost
from dspark.scheduler.store import checks, records
from dspark.scheduler.store.expiry import Expiry
from dspark.scheduler.store.integrity import Snapshot, check
from dspark.scheduler.store.lease_book import LeaseBook
from dspark.scheduler.store.names import MAX_TTL_MS, SWEEP, lease_id
from dspark.scheduler.store.records import (
    Candidate,
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


@dataclass(slots=True)
class _Life:
    """A member. said, wanted: to drain, by itself and by an operator."""

    member: Member
    step_cost: StepCost | None
    said: bool = False
    wanted: bool = False
    load: DrafterLoad | None = None
    report: tuple[int, StoredReport] | None = None

    @property
    def drains(self) -> bool:
        return self.said or self.wanted


class MemoryStore:
    """See `Store`. clock: seconds. sweep: expired entries that one call clears away, at most."""

    def __init__(self, clock: Callable[[], float] = time.time, sweep: int = SWEEP) -> None:
        self._clock = clock
        self._sweep = sweep
        self._ticket = 0
        self._version = 0
        self._latest = 0
        self._lives: dict[str, _Life] = {}
        self._expiry = Expiry()
        self._book = LeaseBook()
        self._planner: tuple[str, int, int] | None = None  # holder, term, expires
        self._plans: tuple[Plans, int] | None = None
        self._calibration: StoredCalibration | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    async def ping(self) -> None:
        return None

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
        ttl = checks.ttl_ms(ttl_s)
        now = self._swept()
        name = replica.replica_id
        last = self._alive(name, now)
        wanted = last is not None and last.wanted
        if name in self._lives:
            self._book.free_of(name)
            self._forget(name, now)
        epoch = self._next(now)
        replica = replace(replica, epoch=epoch)
        member = Member(pool, replica, card, calibration=tuple(calibration))
        self._lives[name] = _Life(member, step_cost, wanted=wanted)
        self._expiry.set(name, now + ttl)
        self._version = self._next(now)
        return epoch

    async def heartbeat(
        self, replica_id: str, epoch: int, draining: bool, load: DrafterLoad | None, ttl_s: float
    ) -> bool:
        checks.text("replica_id", replica_id)
        if load is not None:
            checks.load(load)
        checks.epoch("epoch", epoch)
        ttl = checks.ttl_ms(ttl_s)
        now = self._swept()
        life = self._alive(replica_id, now)
        current = life.member.replica.epoch if life else 0
        if life is None or current < epoch:
            raise not_a_member(replica_id)
        if current > epoch:
            raise fenced(replica_id, epoch, current)
        self._expiry.set(replica_id, now + ttl)
        if life.said != draining:
            life.said = draining
            self._version = self._next(now)
        if load is not None:
            life.load = load
        return life.wanted

    async def leave(self, replica_id: str, epoch: int) -> None:
        checks.text("replica_id", replica_id)
        checks.epoch("epoch", epoch)
        now = self._swept()
        life = self._lives.get(replica_id)
        if life is not None and life.member.replica.epoch == epoch:
            self._book.free_of(replica_id)
            self._forget(replica_id, now)

    async def want_drain(self, replica_id: str, wanted: bool) -> None:
        checks.text("replica_id", replica_id)
        now = self._swept()
        life = self._alive(replica_id, now)
        if life is None:
            raise not_a_member(replica_id)
        if life.wanted != wanted:
            life.wanted = wanted
            self._version = self._next(now)

    async def members(self, pools: Collection[Pool] = (), known: int = -1) -> Members | None:
        checks.known(known)
        now = self._swept()
        if self._version == known:
            return None
        seen = (
            replace(life.member, draining=life.drains)
            for name, life in self._lives.items()
            if self._expiry[name] > now
        )
        return records.members(self._version, seen, pools)

    async def step_costs(self, verifiers: Collection[str]) -> dict[str, tuple[int, StepCost]]:
        now = self._now()
        lives = {name: self._alive(name, now) for name in checks.texts("verifier", verifiers)}
        return {
            name: (life.member.replica.epoch, life.step_cost)
            for name, life in lives.items()
            if life is not None and life.step_cost is not None
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
        ttl = checks.ttl_ms(ttl_s)
        now = self._swept()
        owner = self._lives.get(request.owner)
        if owner is not None and owner.member.replica.epoch > request.owner_epoch:
            raise fenced(request.owner, request.owner_epoch, owner.member.replica.epoch)
        name = lease_id(request.request_id, request.attempt)
        if name in self._book.leases:
            self._book.expiry.set(name, now + ttl)
            return self._book.leases[name]
        leased = self._book.tenants.tokens[request.tenant]
        if tenant_tokens is not None and leased + tokens > tenant_tokens:
            return Refusal.TENANT
        for candidate in candidates:
            verifier = candidate.verifier
            life = self._alive(verifier.replica_id, now)
            if (
                life is not None
                and life.member.replica.epoch == verifier.epoch
                and not life.drains
                and self._book.claims.tokens[verifier.replica_id] + tokens <= candidate.kv_tokens
                and self._book.claims.runs[verifier.replica_id] + request.choices
                <= candidate.max_runs
            ):
                lease = records.lease(request, tokens, candidate, ttl)
                self._book.grant(lease, now + ttl)
                return lease
        return Refusal.FULL

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> Renewed:
        for lease in leases:
            checks.lease(lease)
        ttl = checks.ttl_ms(ttl_s)
        if not leases:
            return Renewed()
        now = self._swept()
        total = Renewed()
        for lease in leases:
            if lease.lease_id in self._book.leases:
                self._book.expiry.set(lease.lease_id, now + ttl)
                total += Renewed(kept=1)
            elif self._alive(lease.verifier.replica_id, now) is not None:
                self._book.grant(lease, now + ttl)
                total += Renewed(remade=1)
            else:
                total += Renewed(dropped=1)
        return total

    async def release(self, lease_ids: Collection[str]) -> int:
        return sum(self._book.free(name) for name in checks.lease_ids(lease_ids))

    async def usage(self) -> Usage:
        self._swept()
        loads = {name: life.load for name, life in self._lives.items() if life.load is not None}
        return Usage(self._book.claims.seen(), self._book.tenants.seen(), loads)

    # --- reports ---

    async def put_reports(self, reports: Sequence[StoredReport], ttl_s: float) -> tuple[Taken, ...]:
        for report in reports:
            checks.report(report)
        ttl = checks.ttl_ms(ttl_s)
        now = self._now()
        return tuple(self._put(report, now, ttl) for report in reports)

    def _put(self, report: StoredReport, now: int, ttl: int) -> Taken:
        life = self._alive(report.verifier, now)
        if life is None or life.member.replica.epoch < report.epoch:
            return Taken.UNKNOWN
        if life.member.replica.epoch > report.epoch:
            return Taken.FENCED
        if life.report is not None and life.report[1].sequence > report.sequence:
            return Taken.OLD
        life.report = now + ttl, report
        return Taken.TAKEN

    async def reports(self) -> list[StoredReport]:
        now = self._swept()
        found = (life.report for life in self._lives.values() if life.report is not None)
        return records.fresh(found, now)

    # --- plans ---

    async def lead(self, holder: str, ttl_s: float) -> int | None:
        checks.text("holder", holder)
        ttl = checks.ttl_ms(ttl_s)
        now = self._now()
        if self._planner is not None and self._planner[0] == holder:
            term = self._planner[1]
        elif self._planner is not None and now < self._planner[2] <= now + MAX_TTL_MS:
            return None
        else:
            term = self._next(now)
        self._planner = holder, term, now + ttl
        return term

    def _leads(self, term: int) -> bool:
        return self._planner is not None and self._planner[1] == term

    async def resign(self, term: int) -> None:
        if self._leads(checks.epoch("term", term)):
            self._planner = None

    async def publish(self, term: int, plans: Mapping[str, bytes], ttl_s: float) -> int | None:
        checks.plans(plans)
        checks.epoch("term", term)
        ttl = checks.ttl_ms(ttl_s)
        now = self._now()
        if not self._leads(term):
            return None
        version = self._next(now)
        self._plans = Plans(version, dict(plans)), now + ttl
        return version

    async def plans(self, verifiers: Collection[str], known: int = -1) -> Plans | None:
        names = checks.texts("verifier", verifiers)
        checks.known(known)
        now = self._now()
        if self._plans is None:
            return None
        published, expires = self._plans
        if not now < expires <= now + MAX_TTL_MS or published.version <= known:
            return None
        plans = {name: published.plans[name] for name in names if name in published.plans}
        return Plans(published.version, plans)

    # --- calibration ---

    async def set_calibration(self, term: int, version: int, data: bytes) -> bool:
        checks.epoch("term", term)
        checks.epoch("version", version)
        checks.data("calibration", data)
        last = self._calibration.version if self._calibration else -1
        if not self._leads(term) or last >= version:
            return False
        self._calibration = StoredCalibration(version, data)
        return True

    async def calibration(self, known: int = -1) -> StoredCalibration | None:
        checks.known(known)
        found = self._calibration
        return found if found is not None and found.version > known else None

    async def check_integrity(self) -> None:
        check(await self.snapshot())

    async def snapshot(self) -> Snapshot:
        """All that is stored, as `RedisStore` would show it."""
        lives = self._lives
        counters = {"ticket": self._ticket, "members": self._version}
        hashes: dict[str, dict[str, str | bytes]] = {
            "counters": {name: str(number) for name, number in counters.items() if number},
            "epochs": {name: str(life.member.replica.epoch) for name, life in lives.items()},
            "cards": {name: _card(life.member) for name, life in lives.items()},
            "step_costs": {
                n: cost.to_json() for n, life in lives.items() if (cost := life.step_cost)
            },
            "draining": {name: "1" for name, life in lives.items() if life.said},
            "wanted": {name: "1" for name, life in lives.items() if life.wanted},
            "loads": {
                n: records.load_json(load) for n, life in lives.items() if (load := life.load)
            },
            "leases": {
                name: records.lease_json(lease) for name, lease in self._book.leases.items()
            },
            "claimed_tokens": _texts(self._book.claims.tokens),
            "claimed_runs": _texts(self._book.claims.runs),
            "tenant_tokens": _texts(self._book.tenants.tokens),
            "tenant_runs": _texts(self._book.tenants.runs),
            "reports": {
                name: records.report_text(*life.report)
                for name, life in lives.items()
                if life.report
            },
        }
        if self._planner is not None:
            holder, term, expires = self._planner
            hashes["planner"] = {"holder": holder, "term": str(term), "expires": str(expires)}
        if self._plans is not None:
            published, expires = self._plans
            hashes["published"] = {"version": str(published.version), "expires": str(expires)}
            hashes["plans"] = dict(published.plans)
        if self._calibration is not None:
            version = str(self._calibration.version)
            hashes["calibration"] = {"version": version, "data": self._calibration.data}
        zsets: dict[str, dict[str, float]] = {
            "members": dict(self._expiry.all),
            "lease_expiry": dict(self._book.expiry.all),
            "leases_of": {f"{verifier}\n{name}": 0 for verifier, name in self._book.held()},
        }
        return Snapshot(hashes, zsets, dict(self._book.leases))

    # --- what the scripts share (scripts/prelude.lua) ---

    def _now(self) -> int:
        return round(self._clock() * 1000)

    def _next(self, now: int) -> int:
        self._ticket = max(self._ticket + 1, now)
        return self._ticket

    def _alive(self, name: str, now: int) -> _Life | None:
        life = self._lives.get(name)
        return life if life is not None and self._expiry[name] > now else None

    def _forget(self, name: str, now: int) -> None:
        del self._lives[name]
        self._expiry.drop(name)
        self._version = self._next(now)

    def _swept(self) -> int:
        """Clear away what has expired, a bounded number, the oldest first; the time, ms."""
        now = self._now()
        if now < self._latest:  # the clock went back: nobody stays for longer than MAX_TTL_MS
            for expiry in (self._expiry, self._book.expiry):
                for name in expiry.beyond(now + MAX_TTL_MS, self._sweep):
                    expiry.set(name, now + MAX_TTL_MS)
        self._latest = max(self._latest, now)
        left = self._sweep
        for name in self._expiry.over(now, left):
            left -= self._book.free_of(name, left)
            if left <= 0:
                return now
            self._forget(name, now)
            left -= 1
        for name in self._book.expiry.over(now, left):
            self._book.free(name)
        return now


def _card(member: Member) -> str:
    return records.card_json(member.pool, member.replica.address, member.card)


def _texts(counter: Counter[str]) -> dict[str, str | bytes]:
    return {name: str(count) for name, count in counter.items()}
