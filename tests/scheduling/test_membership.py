"""A replica's place in the cluster, outages aside: its lives, its streams, and being refused."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from dspark.core.drafts import DrafterCard
from dspark.core.errors import Fenced, NotFound, Unavailable
from dspark.core.leases import LeaseRequest
from dspark.core.plans import Plan
from dspark.core.replicas import DrafterLoad, Member, Pool, Replica
from dspark.core.reports import Report
from dspark.scheduler.central import Registration
from dspark.scheduler.store import Store
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership

from .cluster import PATIENT_S, Served, an_engine, enrolled, scheduling, until, verifying
from .door import Door, Mode


def a_gateway(name: str = "g") -> Member:
    return Member(Pool.GATEWAY, Replica(name))


async def ids(store: Store) -> set[str]:
    members = await store.members()
    assert members is not None
    return {member.replica.replica_id for member in members.members}


async def test_who_is_forgotten_begins_a_new_life(memory: Store) -> None:
    lives: list[int] = []
    ended: list[int] = []

    async def alive(told: Registration) -> None:
        lives.append(told.epoch)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(told.epoch)

    async with (
        scheduling(memory) as served,
        SchedulingClient([served.address]) as client,
        Membership(client, a_gateway(), alive=alive) as member,
    ):
        await until(lambda: len(lives) == 1)
        await memory.leave("g", lives[0])
        await until(lambda: len(lives) == 2)
        assert lives[1] > lives[0]
        assert ended == lives[:1]
        assert member.epoch == lives[1]
        assert await ids(memory) == {"g"}
    assert ended == lives
    assert await ids(memory) == set()


async def test_a_newer_life_elsewhere_ends_this_one(memory: Store) -> None:
    fenced: list[bool] = []
    async with (
        scheduling(memory) as served,
        SchedulingClient([served.address]) as client,
        Membership(client, a_gateway(), on_fenced=lambda: fenced.append(True)) as old,
    ):
        await until(lambda: old.epoch > 0)
        async with Membership(client, a_gateway()) as new:
            await until(lambda: bool(fenced))
            assert new.epoch > old.epoch
            assert await ids(memory) == {"g"}


class Beating(SchedulingClient):
    """Counts heartbeats, and those that nobody answered."""

    beats = lost = 0

    async def heartbeat(self, *args: Any, **rest: Any) -> bool:
        try:
            return await super().heartbeat(*args, **rest)
        except Unavailable:
            self.lost += 1
            raise
        finally:
            self.beats += 1


async def test_a_scheduler_that_takes_a_heartbeat_and_never_answers_costs_no_life(
    memory: Store,
) -> None:
    """Whatever time a call may take else: there is another replica, and it is asked in time."""
    paced = {"heartbeat_s": 1.0, "ttl_s": 3.5}
    async with (
        scheduling(memory, "s1", **paced) as s1,
        scheduling(memory, "s2", **paced) as s2,
        Door(s1.address) as one,
        Door(s2.address) as two,
        Beating([one.address, two.address], call_s=PATIENT_S) as client,
        Membership(client, a_gateway()) as member,
    ):
        await until(lambda: client.beats > 0)
        epoch = member.epoch
        for door in (one, two):  # it asks one of them
            door.turn(Mode.SILENT)
            seen = client.beats
            await until(lambda seen=seen: client.beats >= seen + 3)  # type: ignore[misc]
            door.turn(Mode.OPEN)
        assert client.lost > 0
        assert member.epoch == epoch
        assert await ids(memory) == {"g"}


async def test_an_operators_wish_to_drain_is_heard_once(memory: Store) -> None:
    heard: list[bool] = []
    async with (
        scheduling(memory) as served,
        SchedulingClient([served.address]) as client,
        Membership(client, a_gateway(), on_drain=lambda: heard.append(True)) as member,
    ):
        await until(lambda: member.epoch > 0)
        with pytest.raises(NotFound, match="nobody"):
            await client.drain("nobody")
        await client.drain("g")
        await until(lambda: member.draining)

        async def said() -> bool:
            members = await memory.members()
            return members is not None and members.members[0].draining

        await until(said)
        assert heard == [True]


async def test_who_does_not_fit_is_told_once_and_goes_on_asking(
    memory: Store, caplog: pytest.LogCaptureFixture
) -> None:
    card = DrafterCard("d", "dspark", 7, target_id="other")
    async with (
        scheduling(memory) as served,
        verifying(an_engine(), served.address) as verifier,
        SchedulingClient([served.address]) as client,
    ):
        await until(lambda: bool(served.scheduler.view.fleet.verifiers))
        async with Membership(client, Member(Pool.DRAFTER, Replica("d1", "h:1"), card)):
            await until(lambda: bool(errors(caplog)))
            await verifier.membership.__aexit__(None, None, None)  # then it does fit
            await until(lambda: has(memory, "d1"))
    (line,) = errors(caplog)
    assert "d1 is not let in: drafter d: target_id is 'other', of the verifiers 'toy'" in line


async def has(store: Store, name: str) -> bool:
    return name in await ids(store)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_bug_in_what_a_member_does_is_told_once_and_it_begins_again(
    memory: Store, caplog: pytest.LogCaptureFixture
) -> None:
    lives: list[int] = []

    async def alive(told: Registration) -> None:
        lives.append(told.epoch)
        if len(lives) < 3:
            raise ZeroDivisionError("a bug")
        await asyncio.Event().wait()

    async with (
        scheduling(memory) as served,
        SchedulingClient([served.address]) as client,
        Membership(client, a_gateway(), alive=alive) as member,
    ):
        await until(lambda: len(lives) == 3)
        assert lives == sorted(set(lives))
        assert member.epoch == lives[-1]
        assert await has(memory, "g")
    assert errors(caplog) == ["a life of g has failed"]


async def test_what_a_member_does_may_fail_with_any_word(
    memory: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that is stopped, or somebody else fenced, says nothing about this membership."""
    lives: list[int] = []
    fenced: list[bool] = []

    async def alive(told: Registration) -> None:
        lives.append(told.epoch)
        if len(lives) == 1:
            raise Fenced("somebody else")
        await asyncio.Event().wait()

    async with (
        scheduling(memory) as served,
        SchedulingClient([served.address]) as client,
        Membership(client, a_gateway(), alive=alive, on_fenced=lambda: fenced.append(True)),
    ):
        await until(lambda: len(lives) == 2)
    assert not fenced
    assert errors(caplog) == ["a life of g has failed"]


async def test_a_load_that_cannot_be_told_once_ends_no_membership(
    memory: Store, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bool] = []

    def load() -> DrafterLoad:
        asked.append(True)
        if len(asked) == 1:
            raise ZeroDivisionError("a bug")
        return DrafterLoad(sessions=len(asked))

    member = Member(Pool.DRAFTER, Replica("d1", "h:1"), DrafterCard("d", "dspark", 7))
    async with (
        scheduling(memory) as served,
        SchedulingClient([served.address]) as client,
        Membership(client, member, load=load),
    ):
        await until(lambda: len(asked) > 2)
        assert await has(memory, "d1")
        assert (await memory.usage()).loads["d1"].sessions > 1
    assert errors(caplog) == ["a life of d1 has failed"]


# --- a verifier's stream --------------------------------------------------------------------------


async def test_a_verifier_that_is_done_leaves_no_follower(memory: Store) -> None:
    async with scheduling(memory) as served:
        for number in range(3):
            async with enrolled(an_engine(), served.address, name=f"v{number}") as verifier:
                await until(lambda v=verifier: v.guidance.plan is not None)  # type: ignore[misc]
            await until(lambda: served.scheduler.following == 0)


async def test_reports_that_break_off_end_the_stream_with_a_word(memory: Store) -> None:
    """gRPC's own word for it is that somebody cancelled, which looks like the reader's own end."""

    async def breaks() -> AsyncIterator[Report]:
        yield Report("v1", 1, 1, 0.05)
        raise ZeroDivisionError("a bug")

    async with scheduling(memory) as served, SchedulingClient([served.address]) as client:
        with pytest.raises(Unavailable):
            await anext(client.follow(breaks()))


async def test_a_replica_that_has_no_plans_is_left_for_one_that_has(memory: Store) -> None:
    """It takes the stream and says nothing, as one behind a network that swallows everything."""
    turned = 0

    class Counting(SchedulingClient):
        async def follow(self, reports: AsyncIterator[Report]) -> AsyncGenerator[Plan, None]:
            nonlocal turned
            turned += 1
            async for plan in super().follow(reports):
                if turned > 2:
                    yield plan

    async with (
        scheduling(memory) as served,
        enrolled(an_engine(), served.address, client=Counting, silent_s=0.2) as verifier,
    ):
        await until(lambda: verifier.guidance.plan is not None)
        assert turned > 2


async def test_replicas_share_what_they_are_asked(store: Store) -> None:
    """A lease from one is given back at another, and each sees the members of the other."""
    async with (
        scheduling(store, "s1") as s1,
        scheduling(store, "s2") as s2,
        verifying(an_engine(), s1.address, name="v1"),
        verifying(an_engine(), s2.address, name="v2"),
        SchedulingClient([s1.address]) as one,
        SchedulingClient([s2.address]) as two,
    ):
        await until(lambda: all(len(s.scheduler.view.fleet.verifiers) == 2 for s in (s1, s2)))
        asked = LeaseRequest(uuid.uuid4().hex, 0, "g", 0, 10)
        lease = await one.acquire(asked, PATIENT_S)
        assert await two.acquire(asked, PATIENT_S) == lease
        await two.release([lease.lease_id])
        assert not (await store.usage()).tenants
        lists: Any = one.watch((Pool.VERIFIER,))
        assert {m.replica.replica_id for m in await anext(lists)} == {"v1", "v2"}
        await lists.aclose()


async def test_members_are_told_at_once_and_after_each_change(memory: Store) -> None:
    async with scheduling(memory) as served, SchedulingClient([served.address]) as client:
        lists: Any = client.watch()
        assert await anext(lists) == ()
        async with Membership(client, a_gateway()):
            (member,) = await anext(lists)
            assert (member.pool, member.replica.replica_id) == (Pool.GATEWAY, "g")
        assert await anext(lists) == ()
        await lists.aclose()


async def test_a_replica_that_stops_sends_its_followers_away_at_once(memory: Store) -> None:
    async with (
        scheduling(memory, "s1") as s1,
        SchedulingClient([s1.address]) as client,
    ):
        assert isinstance(s1, Served)
        lists: Any = client.watch()
        await anext(lists)
        next_list = asyncio.ensure_future(anext(lists))
        await s1.stop()
        with pytest.raises(Unavailable, match="stopping"):
            await next_list
