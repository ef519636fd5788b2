"""What the scheduler's replicas share: members, leases, reports, plans, calibration.

Two implementations behave alike: `RedisStore`, one script a change, and `MemoryStore`, its twin in
one process. Every method may raise `InvalidRequest` naming a bad argument and, of a store that
others can reach, `Unavailable`: it is down, too slow, full, read-only or still loading, and the
call may or may not have happened. All may be called again.

Times to live are seconds in [0.001, 600]. What is not renewed is gone when its time is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Card, DrafterLoad, Pool, Replica
from dspark.scheduler.step_cost import StepCost
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
)


class Store(Protocol):
    """Epochs, terms, versions of plans and of lists of members come from one counter that also
    never lags the store's clock in ms: they grow over all lives of a replica or holder, and over
    the loss of everything stored."""

    async def ping(self) -> None:
        """Raises `Unavailable` if the store cannot be used now, `ConfigError` if it never can:
        too old a server, a password or certificate that does not fit."""
        ...

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
        """A replica begins a new life; its epoch, above every earlier one of any replica. Leases
        on an earlier life are freed. replica.epoch is not read. calibration: Member's."""
        ...

    async def heartbeat(
        self, replica_id: str, epoch: int, draining: bool, load: DrafterLoad | None, ttl_s: float
    ) -> bool:
        """A sign of life; whether it is wanted to drain. load: None leaves the last one.

        Raises `NotFound` if it is not a member (any more): register again. Raises `Fenced` if a
        newer life has registered."""
        ...

    async def leave(self, replica_id: str, epoch: int) -> None:
        """For good. An unknown replica or another epoch than its own changes nothing."""
        ...

    async def want_drain(self, replica_id: str, wanted: bool) -> None:
        """Told in its next heartbeat; from now on it gets no leases. Ends with its life.
        Raises `NotFound` if it is not a member."""
        ...

    async def members(self, pools: Collection[Pool] = (), known: int = -1) -> Members | None:
        """Who is alive, by id. pools: empty for all. known: version of a list that the caller has;
        None if nothing changed since."""
        ...

    async def step_costs(self, verifiers: Collection[str]) -> dict[str, tuple[int, StepCost]]:
        """(epoch, step cost) of those that are alive and have one. It stays the same for as long
        as the epoch does, so ask once."""
        ...

    # --- leases ---

    async def acquire(
        self,
        request: LeaseRequest,
        tokens: int,
        candidates: Sequence[Candidate],
        ttl_s: float,
        tenant_tokens: int | None = None,
    ) -> Lease | Refusal:
        """The lease that (request_id, attempt) has, renewed; else one on the first candidate that
        is alive in that epoch, does not drain and has room for `tokens` and the request's choices.

        tenant_tokens: what all leases of the tenant may claim. Raises `Fenced` if a newer life of
        the owner has registered; an owner that is not a member may lease."""
        ...

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> Renewed:
        """Their owner still holds them. Those that the store lost are made again, room or not, if
        their verifier is alive in whatever epoch. One that was released a moment ago comes back
        for one time to live."""
        ...

    async def release(self, lease_ids: Collection[str]) -> int:
        """How many of them there were."""
        ...

    async def usage(self) -> Usage: ...

    # --- reports ---

    async def put_reports(self, reports: Sequence[StoredReport], ttl_s: float) -> tuple[Taken, ...]:
        """One answer each. A report replaces its verifier's last one."""
        ...

    async def reports(self) -> list[StoredReport]:
        """Of all verifiers that are alive and reported within the time to live, by id."""
        ...

    # --- plans ---

    async def lead(self, holder: str, ttl_s: float) -> int | None:
        """Take or keep the planning lease; its term, None if another holds it. The term grows when
        the holder changes."""
        ...

    async def resign(self, term: int) -> None:
        """Another may lead at once. An earlier term changes nothing."""
        ...

    async def publish(self, term: int, plans: Mapping[str, bytes], ttl_s: float) -> int | None:
        """Replace all plans; their version, above every earlier one. None: the term is over."""
        ...

    async def plans(self, verifiers: Collection[str], known: int = -1) -> Plans | None:
        """None if nothing above version `known` is published or its time is over."""
        ...

    # --- calibration ---

    async def set_calibration(self, term: int, version: int, data: bytes) -> bool:
        """False, and nothing changes, unless the term is the current one and the version higher
        than what is stored. Lives as long as the store does."""
        ...

    async def calibration(self, known: int = -1) -> StoredCalibration | None:
        """None if nothing above version `known` is stored."""
        ...

    async def check_integrity(self) -> None:
        """What must be true of all that is stored (integrity.py). Raises AssertionError."""
        ...
