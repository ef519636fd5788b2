"""The central scheduler in the loop: the one that serves, on the store's twin in this process, told
the simulated time. Its rounds are made here, one by one, as `Scheduler` makes them by the clock."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import Calibration, Plan
from dspark.core.replicas import DrafterLoad, Member, Pool, Replica
from dspark.core.reports import Report
from dspark.scheduler.central.config import SchedulerConfig
from dspark.scheduler.central.scheduler import Scheduler
from dspark.scheduler.simulation.config import SimulationConfig
from dspark.scheduler.simulation.drafters import drafter_card
from dspark.scheduler.simulation.requests import Job
from dspark.scheduler.simulation.verifier import MODEL, Verifier
from dspark.scheduler.store import MemoryStore, Store, StoredReport

GATEWAY = "gateway"
DRAFTER = "drafter"


class Carried(bytes):
    """Bytes for the store that carry the thing itself: nobody here needs it written down. Equal to
    themselves only, as what they carry may differ."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = bytes.__hash__


class ObjectCodec:
    """`Codec` of a scheduler that talks to nobody else."""

    def report(self, report: Report) -> bytes:
        return _carried(report)

    def read_report(self, data: bytes) -> Report:
        return cast(Report, cast(Carried, data).value)

    def plan(self, plan: Plan) -> bytes:
        return _carried(plan)

    def read_plan(self, data: bytes) -> Plan:
        return cast(Plan, cast(Carried, data).value)

    def calibration(self, calibration: Calibration) -> bytes:
        return _carried(calibration)

    def read_calibration(self, data: bytes) -> Calibration:
        return cast(Calibration, cast(Carried, data).value)


def _carried(value: object) -> Carried:
    carried = Carried(b"-")
    carried.value = value
    return carried


class CountingStore:
    """A store, and how often each of its methods was called; each is one script on a server."""

    def __init__(self, store: Store) -> None:
        self.calls: Counter[str] = Counter()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        calls = self.calls

        async def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return await method(*args, **kwargs)

        self.__dict__[name] = counted
        return counted


@dataclass(slots=True)
class Timings:
    """Processor seconds of this process, one entry a round: seeing the cluster anew, planning for
    it. Not wall time: simulated time stands still anyway, and other processes may be busy."""

    look_s: list[float] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)


class Centre:
    """clock: simulated seconds."""

    def __init__(
        self, config: SimulationConfig, clock: Callable[[], float], rng: random.Random, gamma: int
    ) -> None:
        self.timings = Timings()
        self.gateways = [f"{GATEWAY}-{i}" for i in range(config.scheduler.gateways)]
        self._codec = ObjectCodec()
        self._counted = CountingStore(MemoryStore(clock))
        self._store = cast(Store, self._counted)
        self._config = _scheduler_config(config, gamma)
        self._scheduler = Scheduler(
            self._store, self._codec, self._config, "scheduler-0", clock=clock, rng=rng
        )
        self._tenants = config.tenants
        self._epochs: dict[str, int] = {}
        self._gamma = gamma

    @property
    def store_calls(self) -> Mapping[str, int]:
        return self._counted.calls

    async def join(self, verifiers: Sequence[Verifier], drafters: Sequence[str]) -> None:
        members: list[tuple[Member, Any]] = [
            (Member(Pool.VERIFIER, Replica(v.name), v.card), v.cost) for v in verifiers
        ]
        members += [
            (Member(Pool.DRAFTER, Replica(name), drafter_card(self._gamma)), None)
            for name in drafters
        ]
        members += [(Member(Pool.GATEWAY, Replica(name)), None) for name in self.gateways]
        for member, cost in members:
            registration = await self._scheduler.register(member, cost)
            self._epochs[member.replica.replica_id] = registration.epoch
        for verifier in verifiers:
            verifier.epoch = self._epochs[verifier.name]
        await self._look()

    async def heartbeat(
        self, replica: str, load: DrafterLoad | None = None, leases: Sequence[Lease] = ()
    ) -> None:
        await self._scheduler.heartbeat(replica, self._epochs[replica], False, leases, load)

    async def acquire(self, job: Job) -> Lease:
        """Raises what the scheduler raises: `Overloaded`, `DeadlineExceeded`, …"""
        tenant = self._tenants[job.tenant]
        owner = self.gateways[job.number % len(self.gateways)]
        return await self._scheduler.acquire(
            LeaseRequest(
                request_id=str(job.number),
                attempt=job.attempt,
                owner=owner,
                owner_epoch=self._epochs[owner],
                prompt_tokens=job.prompt,
                model=MODEL,
                tenant=tenant.name,
                priority=tenant.priority,
                max_tokens=job.answer,
                floor_tps=tenant.floor_tps,
                deadline_s=tenant.deadline_s or None,
            )
        )

    async def release(self, lease: Lease) -> None:
        await self._scheduler.release([lease.lease_id])

    async def round(self, reports: Sequence[Report], plans: bool) -> dict[str, Plan]:
        """Reports in, look, plan, plans out."""
        await self._store.put_reports(
            [
                StoredReport(r.verifier, r.epoch, r.seen_through, self._codec.report(r))
                for r in reports
            ],
            self._config.report_ttl_s,
        )
        planner = self._scheduler.planner
        leads = plans and await planner.lead()
        await self._look()
        if not leads:
            return {}
        begin = time.process_time()
        await planner.plan(self._scheduler.view)
        self.timings.plan_s.append(time.process_time() - begin)
        found = await self._store.plans([report.verifier for report in reports])
        if found is None:
            return {}
        return {
            name: replace(self._codec.read_plan(data), version=found.version)
            for name, data in found.plans.items()
        }

    async def _look(self) -> None:
        begin = time.process_time()
        await self._scheduler.view.look(self._store, self._codec)
        self.timings.look_s.append(time.process_time() - begin)


def _scheduler_config(config: SimulationConfig, gamma: int) -> SchedulerConfig:
    interval_s, heartbeat_s = config.scheduler.interval_s, config.scheduler.heartbeat_s
    usual = SchedulerConfig()
    return replace(
        usual,
        heartbeat_s=heartbeat_s,
        ttl_s=max(usual.ttl_s, 3.5 * heartbeat_s),
        lease_ttl_s=max(usual.lease_ttl_s, 10 * heartbeat_s),
        plan_interval_s=interval_s,
        plan_ttl_s=max(usual.plan_ttl_s, 4 * interval_s),
        report_ttl_s=max(usual.report_ttl_s, 4 * interval_s),
        prefill_chunk=max(kind.prefill_chunk for kind in config.verifiers),
        gamma=gamma,
        shares={tenant.name: tenant.share for tenant in config.tenants},
    )
