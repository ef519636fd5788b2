"""The store in memory and the one on Valkey are twins: after any history they answer alike and hold
the same, and what they hold is whole."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from dspark.core.errors import DsparkError
from dspark.core.leases import Lease
from dspark.core.replicas import Card, DrafterLoad, Pool
from dspark.scheduler.store import Candidate, MemoryStore, StoredReport
from dspark.scheduler.store.integrity import Snapshot, check
from dspark.scheduler.store.names import SWEEP
from dspark.scheduler.store.redis_store import RedisStore

from .cluster import COST, DRAFTER, VERIFIER, Clock, asks, replica
from .conftest import patient

NAMES = st.sampled_from(["v", "v1", "w", "é"])
TENANTS = st.sampled_from(["", "a", "b"])
TTLS = st.sampled_from([0.001, 0.5, 1.0, 5.0, 600.0])
CARDS: dict[Pool, Card | None] = {
    Pool.GATEWAY: None,
    Pool.VERIFIER: VERIFIER,
    Pool.DRAFTER: DRAFTER,
}
LOADS = st.none() | st.builds(
    DrafterLoad, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1e9), st.floats(0, 1e9)
)


def plain(snapshot: Snapshot) -> tuple[Any, Any, Any]:
    """Empty and missing are the same, and text is bytes to Redis."""
    hashes = {
        name: {f: v.encode() if isinstance(v, str) else v for f, v in content.items()}
        for name, content in snapshot.hashes.items()
        if content
    }
    zsets = {name: dict(content) for name, content in snapshot.zsets.items() if content}
    return hashes, zsets, snapshot.leases


class Twins(RuleBasedStateMachine):
    """Ids are few, so that histories meet; epochs are those of now, of before, and never given."""

    url = ""
    sweep = SWEEP

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.memory = MemoryStore(self.clock, self.sweep)
        self.redis = RedisStore(patient(self.url, uuid.uuid4().hex), self.clock, self.sweep)
        self.epochs = [0, 1]
        self.leases: dict[str, Lease] = {}
        self.terms = [1]
        self.versions = [-1]

    def teardown(self) -> None:
        self.loop.run_until_complete(self.redis.__aexit__(None, None, None))
        self.loop.close()

    def both(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer, or the error, of both."""
        answers = [self.loop.run_until_complete(told(call, s)) for s in (self.memory, self.redis)]
        assert answers[0] == answers[1]
        return answers[0]

    def epoch(self, data: st.DataObject) -> int:
        """Mostly one of the last."""
        number: int = data.draw(
            st.sampled_from([*self.epochs[-4:], *self.epochs[-4:], *self.epochs])
        )
        return number

    # --- time ---

    @rule(seconds=st.sampled_from([0.001, 0.499, 0.5, 1.0, 4.5, 700.0, -0.5, -30.0, -5000.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    # --- members ---

    @rule(name=NAMES, pool=st.sampled_from(Pool), ttl=TTLS, costs=st.booleans())
    def register(self, name: str, pool: Pool, ttl: float, costs: bool) -> None:
        cost = COST if costs else None
        epoch = self.both(lambda s: s.register(pool, replica(name), CARDS[pool], cost, ttl))
        assert epoch > max(self.epochs)
        self.epochs.append(epoch)

    @rule(name=NAMES, draining=st.booleans(), load=LOADS, ttl=TTLS, data=st.data())
    def heartbeat(
        self, name: str, draining: bool, load: DrafterLoad | None, ttl: float, data: st.DataObject
    ) -> None:
        epoch = self.epoch(data)
        self.both(lambda s: s.heartbeat(name, epoch, draining, load, ttl))

    @rule(name=NAMES, data=st.data())
    def leave(self, name: str, data: st.DataObject) -> None:
        epoch = self.epoch(data)
        self.both(lambda s: s.leave(name, epoch))

    @rule(name=NAMES, wanted=st.booleans())
    def want_drain(self, name: str, wanted: bool) -> None:
        self.both(lambda s: s.want_drain(name, wanted))

    @rule(pools=st.sets(st.sampled_from(Pool)), again=st.booleans())
    def members(self, pools: set[Pool], again: bool) -> None:
        known = max(self.versions) if again else -1
        seen = self.both(lambda s: s.members(pools, known))
        if seen is not None:
            self.versions.append(seen.version)

    @rule()
    def look(self) -> None:
        self.both(lambda s: s.usage())
        self.both(lambda s: s.reports())
        self.both(lambda s: s.calibration())
        self.both(lambda s: s.step_costs(["v", "v1", "w", "x"]))

    # --- leases ---

    @rule(
        name=st.sampled_from(["r", "s", "t/u"]),
        attempt=st.integers(0, 2),
        tenant=TENANTS,
        choices=st.integers(1, 3),
        tokens=st.integers(1, 60),
        places=st.lists(NAMES, max_size=3),
        limit=st.none() | st.integers(0, 100),
        ttl=TTLS,
        data=st.data(),
    )
    def acquire(
        self,
        name: str,
        attempt: int,
        tenant: str,
        choices: int,
        tokens: int,
        places: list[str],
        limit: int | None,
        ttl: float,
        data: st.DataObject,
    ) -> None:
        asked = replace(asks(name, attempt, tenant, choices), owner=data.draw(NAMES))
        asked = replace(asked, owner_epoch=self.epoch(data))
        candidates = [
            Candidate(
                replica(place, self.epoch(data)),
                data.draw(st.integers(0, 100)),
                data.draw(st.integers(0, 5)),
                data.draw(st.none() | st.just(replica("d", 7))),
            )
            for place in places
        ]
        lease = self.both(lambda s: s.acquire(asked, tokens, candidates, ttl, limit))
        if isinstance(lease, Lease):
            self.leases[lease.lease_id] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ttl=TTLS)
    def renew(self, data: st.DataObject, ttl: float) -> None:
        leases = data.draw(st.lists(st.sampled_from(list(self.leases.values())), max_size=5))
        self.both(lambda s: s.renew(leases, ttl))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from([*self.leases, "never:0"]), max_size=3))
        self.both(lambda s: s.release(names))

    # --- reports, plans, calibration ---

    @rule(
        name=NAMES, sequence=st.integers(0, 3), body=st.binary(max_size=9), ttl=TTLS, data=st.data()
    )
    def report(
        self, name: str, sequence: int, body: bytes, ttl: float, data: st.DataObject
    ) -> None:
        report = StoredReport(name, self.epoch(data), sequence, body)
        self.both(lambda s: s.put_reports([report, replace(report, verifier="v")], ttl))

    @rule(holder=st.sampled_from(["p", "q"]), ttl=TTLS)
    def lead(self, holder: str, ttl: float) -> None:
        term = self.both(lambda s: s.lead(holder, ttl))
        if term is not None:
            assert term >= max(self.terms)
            self.terms.append(term)

    @rule(data=st.data())
    def resign(self, data: st.DataObject) -> None:
        term = data.draw(st.sampled_from(self.terms[-3:]))
        self.both(lambda s: s.resign(term))

    @rule(plans=st.dictionaries(NAMES, st.binary(max_size=9)), ttl=TTLS, data=st.data())
    def publish(self, plans: dict[str, bytes], ttl: float, data: st.DataObject) -> None:
        term = data.draw(st.sampled_from(self.terms[-3:]))
        version = self.both(lambda s: s.publish(term, plans, ttl))
        if version is not None:
            self.versions.append(version)

    @rule(names=st.lists(NAMES, max_size=3), data=st.data())
    def plans(self, names: list[str], data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.versions[-3:]))
        self.both(lambda s: s.plans(names, known))

    @rule(version=st.integers(0, 4), body=st.binary(max_size=9), data=st.data())
    def calibrate(self, version: int, body: bytes, data: st.DataObject) -> None:
        term = data.draw(st.sampled_from(self.terms[-3:]))
        self.both(lambda s: s.set_calibration(term, version, body))

    @invariant()
    def hold_the_same_and_are_whole(self) -> None:
        async def seen() -> list[Snapshot]:
            return [await self.memory.snapshot(), await self.redis.snapshot()]

        memory, redis = self.loop.run_until_complete(seen())
        assert plain(memory) == plain(redis)
        check(memory)
        check(redis)


async def told(call: Callable[[Any], Awaitable[Any]], store: Any) -> Any:
    try:
        return await call(store)
    except DsparkError as error:
        return type(error), str(error)


@pytest.mark.parametrize(("steps", "most"), [(15, SWEEP), (50, 3)])
def test_the_twins_cannot_be_told_apart(valkey: str, steps: int, most: int) -> None:
    """Short histories in number; and long ones in which what expires is cleared away in steps."""

    class OnThisServer(Twins):
        url = valkey
        sweep = most

    run(
        OnThisServer,
        settings=settings(
            max_examples=800 // steps,
            stateful_step_count=steps,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
