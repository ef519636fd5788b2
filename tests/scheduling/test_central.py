"""The scheduler's service in the loop: real gRPC, a real store, engines that follow its plans."""

from __future__ import annotations

import itertools

from dspark.core.leases import LeaseRequest
from dspark.scheduler.store import Store
from dspark.scheduling.client import SchedulingClient

from ..verifier.toy import greedy, request, target_only
from .cluster import PATIENT_S, RULE, an_engine, enrolled, gateway, scheduling, until, verifying


async def test_a_verifier_registers_reports_and_follows_plans(store: Store) -> None:
    engine = an_engine()
    async with scheduling(store) as served, enrolled(engine, served.address) as verifier:
        number = itertools.count()

        async def guided() -> bool:
            ids = await verifier.say(request(f"r{next(number)}", [1, 2], greedy(400)))
            assert ids == target_only(RULE, [1, 2], 400)
            return engine.planner.guided_plans > 0

        await until(guided)


async def test_a_request_is_leased_a_verifier_and_gives_it_back(store: Store) -> None:
    async with (
        scheduling(store) as served,
        verifying(an_engine(), served.address, name="v1"),
        verifying(an_engine(), served.address, name="v2"),
        gateway(served.address) as front,
    ):
        await until(lambda: len(front.target.members) == 2)
        await until(lambda: len(served.scheduler.view.fleet.verifiers) == 2)
        assert await front.say(request("a", [1, 2], greedy(50))) == target_only(RULE, [1, 2], 50)
        assert front.target.local == 0
        await until(lambda: no_leases(store))


async def no_leases(store: Store) -> bool:
    return not (await store.usage()).tenants


async def test_the_same_attempt_gets_the_same_lease(store: Store) -> None:
    async with (
        scheduling(store) as served,
        verifying(an_engine(), served.address),
        SchedulingClient([served.address]) as client,
    ):
        await until(lambda: bool(served.scheduler.view.fleet.verifiers))
        asked = LeaseRequest("r", 3, "g", 0, 10)
        first = await client.acquire(asked, 5.0)
        assert await client.acquire(asked, 5.0) == first
        await client.release([first.lease_id])


async def test_a_verifier_that_changed_since_the_last_look_is_leased_all_the_same(
    memory: Store,
) -> None:
    """It has begun a new life, as all do when the store was emptied: nobody is told that all are
    full."""
    async with (
        scheduling(memory, look_s=500.0, lead_ttl_s=500.0) as served,
        verifying(an_engine(), served.address) as verifier,
        SchedulingClient([served.address]) as client,
    ):
        await until(lambda: bool(served.scheduler.view.fleet.verifiers))
        await served.scheduler.__aexit__()  # it answers, and looks no more by itself
        epoch = verifier.membership.epoch
        await memory.leave("v1", epoch)
        await until(lambda: verifier.membership.epoch > epoch)
        lease = await client.acquire(LeaseRequest("r", 0, "g", 0, 10), PATIENT_S)
        assert lease.verifier.epoch == verifier.membership.epoch
