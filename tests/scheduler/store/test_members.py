"""Who is in the cluster: epochs, signs of life, drains; the same promises for both stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dspark.core.errors import Fenced, InvalidRequest, NotFound
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import DrafterLoad, Member, Pool, Replica
from dspark.core.sampling import SamplingMode
from dspark.scheduler.store import MAX_TTL_MS, Candidate, Claim, Members, MemoryStore, StoredReport

from .cluster import COST, DRAFTER, TTL, VERIFIER, Clock, asks, join, on, replica

Lose = Callable[[], Awaitable[None]]
LOAD = DrafterLoad(3, 1, 100.5, 4e3)


def names(members: Members | None) -> list[str]:
    assert members is not None
    return [member.replica.replica_id for member in members.members]


async def test_members_come_back_as_they_registered(store: MemoryStore) -> None:
    verifier, drafter = await join(store, "v"), await join(store, "d", Pool.DRAFTER)
    gateway = await join(store, "gé", Pool.GATEWAY)
    listed = await store.members()
    assert listed is not None
    assert listed.members == (
        Member(Pool.DRAFTER, drafter, DRAFTER),
        Member(Pool.GATEWAY, gateway),
        Member(Pool.VERIFIER, verifier, VERIFIER),
    )
    assert names(await store.members([Pool.VERIFIER, Pool.GATEWAY])) == ["gé", "v"]


async def test_what_a_drafter_ships_comes_back(store: MemoryStore) -> None:
    tables = tuple(
        CalibrationTable("d", mode, (0.1, 1 / 3, 7.0), (0.5, -1 / 3, 0.0)) for mode in SamplingMode
    )
    await store.register(Pool.DRAFTER, Replica("d", "h:1"), DRAFTER, None, TTL, tables)
    listed = await store.members()
    assert listed is not None
    assert [member.calibration for member in listed.members] == [tables]


async def test_epochs_grow_over_all_lives_of_a_replica(
    store: MemoryStore, clock: Clock, lose: Lose
) -> None:
    epochs = [(await join(store, "v")).epoch, (await join(store, "v")).epoch]
    clock.now += TTL  # dead
    epochs.append((await join(store, "v")).epoch)
    await store.leave("v", epochs[-1])
    epochs.append((await join(store, "v")).epoch)
    await lose()
    clock.now += 0.1
    epochs.append((await join(store, "v")).epoch)
    assert epochs == sorted(set(epochs))
    assert epochs[0] > 0


async def test_dies_without_a_sign_of_life_at_the_end_of_its_time(
    store: MemoryStore, clock: Clock
) -> None:
    v = await join(store, "v")
    clock.now += TTL - 0.001
    assert await store.heartbeat("v", v.epoch, False, None, TTL) is False
    clock.now += TTL - 0.001
    assert names(await store.members()) == ["v"]
    clock.now += 0.001
    assert names(await store.members()) == []
    with pytest.raises(NotFound, match="v is not a member"):
        await store.heartbeat("v", v.epoch, False, None, TTL)


async def test_an_older_life_is_fenced_and_changes_nothing(store: MemoryStore) -> None:
    old, new = await join(store, "v"), await join(store, "v")
    with pytest.raises(Fenced, match=f"epoch {new.epoch}: epoch {old.epoch} is over"):
        await store.heartbeat("v", old.epoch, True, None, TTL)
    await store.leave("v", old.epoch)
    assert await store.members() == Members(
        (await store.members()).version,  # type: ignore[union-attr]
        (Member(Pool.VERIFIER, new, VERIFIER),),
    )
    with pytest.raises(NotFound):  # an epoch that was never given: of a store that was lost
        await store.heartbeat("v", new.epoch + 1, False, None, TTL)
    with pytest.raises(NotFound):
        await store.heartbeat("nobody", 1, False, None, TTL)
    await store.leave("nobody", 1)


async def test_draining_shows_whoever_wants_it(store: MemoryStore) -> None:
    v = await join(store, "v")

    async def drains() -> bool:
        listed = await store.members()
        assert listed is not None
        return listed.members[0].draining

    assert not await drains()
    await store.want_drain("v", True)
    assert await drains()
    assert await store.heartbeat("v", v.epoch, True, None, TTL) is True
    await store.want_drain("v", False)
    assert await drains()  # it still does, by itself
    assert await store.heartbeat("v", v.epoch, False, None, TTL) is False
    assert not await drains()
    with pytest.raises(NotFound):
        await store.want_drain("nobody", True)


async def test_a_wish_to_drain_ends_with_the_life(store: MemoryStore, clock: Clock) -> None:
    await join(store, "v")
    await store.want_drain("v", True)
    again = await join(store, "v")  # restarted before it was missed: still the one that was named
    assert await store.heartbeat("v", again.epoch, False, None, TTL) is True
    clock.now += TTL
    later = await join(store, "v")
    assert await store.heartbeat("v", later.epoch, False, None, TTL) is False


async def test_the_list_is_sent_only_if_it_changed(store: MemoryStore, clock: Clock) -> None:
    v = await join(store, "v")
    seen = await store.members()
    assert seen is not None

    async def changed() -> bool:
        nonlocal seen
        found = await store.members(known=seen.version)
        if found is None:
            return False
        assert found.version > seen.version
        seen = found
        return True

    assert not await changed()
    await store.heartbeat("v", v.epoch, False, LOAD, TTL)
    await store.acquire(asks("r"), 1, [on(v)], TTL)
    await store.want_drain("v", False)
    assert not await changed()
    await store.heartbeat("v", v.epoch, True, None, TTL)
    assert await changed()
    await store.heartbeat("v", v.epoch, True, None, TTL)
    assert not await changed()
    await store.want_drain("v", True)
    assert await changed()
    d = await join(store, "d", Pool.DRAFTER)
    assert await changed()
    await store.leave("d", d.epoch)
    assert await changed()
    clock.now += TTL
    assert await changed()
    assert not await changed()


async def test_step_costs_of_those_alive_with_their_epoch(store: MemoryStore, clock: Clock) -> None:
    v = await join(store, "v", cost=COST)
    await join(store, "w")
    assert await store.step_costs(["v", "w", "x"]) == {"v": (v.epoch, COST)}
    again = await join(store, "v")
    assert again.epoch > v.epoch
    assert await store.step_costs(["v"]) == {}
    assert await store.step_costs([]) == {}
    await join(store, "v", cost=COST)
    clock.now += TTL
    assert await store.step_costs(["v"]) == {}


async def test_loads_of_drafters_are_the_last_they_said(store: MemoryStore, clock: Clock) -> None:
    d = await join(store, "d", Pool.DRAFTER)
    assert (await store.usage()).loads == {}
    await store.heartbeat("d", d.epoch, False, LOAD, TTL)
    await store.heartbeat("d", d.epoch, False, None, TTL)
    assert (await store.usage()).loads == {"d": LOAD}
    clock.now += TTL
    assert (await store.usage()).loads == {}


async def test_a_clock_that_jumps_heals(store: MemoryStore, clock: Clock) -> None:
    v = await join(store, "v")
    await store.acquire(asks("r"), 7, [on(v)], TTL)
    clock.now -= 86_400  # nobody is lost
    assert names(await store.members()) == ["v"]
    assert (await store.usage()).claims == {"v": Claim(7, 1)}
    w = await join(store, "w", ttl_s=MAX_TTL_MS / 1000)  # and numbers do not fall
    assert w.epoch > v.epoch
    clock.now += MAX_TTL_MS / 1000 - 1
    await store.heartbeat("w", w.epoch, False, None, 2.0)
    clock.now += 1  # but nobody stays for the day either
    assert names(await store.members()) == ["w"]
    assert (await store.usage()).claims == {}
    clock.now += 86_400
    with pytest.raises(NotFound):
        await store.heartbeat("w", w.epoch, False, None, TTL)


async def test_a_lease_does_not_outstay_a_clock_that_went_back(
    store: MemoryStore, clock: Clock
) -> None:
    v = await join(store, "v")
    await store.acquire(asks("r"), 7, [on(v)], TTL)
    clock.now -= 86_400
    assert await store.heartbeat("v", v.epoch, False, None, TTL) is False
    clock.now += TTL / 2
    for _ in range(MAX_TTL_MS // 1000 // 4):
        await store.heartbeat("v", v.epoch, False, None, TTL)
        clock.now += 4
    assert (await store.usage()).claims == {}
    assert names(await store.members()) == ["v"]


NAN = float("nan")
G = Pool.GATEWAY
BAD: list[tuple[str, Callable[[MemoryStore], Awaitable[Any]]]] = [
    ("replica.replica_id", lambda s: s.register(G, Replica(), None, None, 1)),
    ("replica.replica_id", lambda s: s.register(G, Replica("a\nb"), None, None, 1)),
    ("replica.replica_id", lambda s: s.register(G, Replica("\ud800"), None, None, 1)),
    ("replica.replica_id", lambda s: s.register(G, Replica("x" * 513), None, None, 1)),
    ("replica.address", lambda s: s.register(G, Replica("a", "\x00"), None, None, 1)),
    ("card", lambda s: s.register(G, replica("a"), VERIFIER, None, 1)),
    ("card", lambda s: s.register(Pool.VERIFIER, replica("a"), None, None, 1)),
    ("card", lambda s: s.register(Pool.DRAFTER, replica("a"), VERIFIER, None, 1)),
    ("ttl_s", lambda s: s.register(G, replica("a"), None, None, NAN)),
    ("ttl_s", lambda s: s.register(G, replica("a"), None, None, 0)),
    ("ttl_s", lambda s: s.heartbeat("v", 1, False, None, 600.1)),
    ("epoch", lambda s: s.heartbeat("v", -1, False, None, 1)),
    ("epoch", lambda s: s.heartbeat("v", 2**53 + 1, False, None, 1)),
    ("epoch", lambda s: s.leave("v", NAN)),  # type: ignore[arg-type]
    ("load.tokens_per_s", lambda s: s.heartbeat("v", 1, False, DrafterLoad(0, 0, NAN), 1)),
    (
        "load.capacity_tokens_per_s",
        lambda s: s.heartbeat("v", 1, False, DrafterLoad(0, 0, 0, float("inf")), 1),
    ),
    ("load.queue", lambda s: s.heartbeat("v", 1, False, DrafterLoad(0, -1), 1)),
    ("request_id", lambda s: s.acquire(asks(""), 1, [], 1)),
    ("attempt", lambda s: s.acquire(asks("r", -1), 1, [], 1)),
    ("choices", lambda s: s.acquire(asks("r", choices=0), 1, [], 1)),
    ("tokens", lambda s: s.acquire(asks("r"), 0, [], 1)),
    ("tokens", lambda s: s.acquire(asks("r"), 2**31 + 1, [], 1)),
    ("tokens", lambda s: s.acquire(asks("r"), NAN, [], 1)),  # type: ignore[arg-type]
    ("tokens", lambda s: s.acquire(asks("r"), True, [], 1)),
    ("tenant_tokens", lambda s: s.acquire(asks("r"), 1, [], 1, -1)),
    ("tenant", lambda s: s.acquire(asks("r", tenant="\n"), 1, [], 1)),
    (
        "candidate.kv_tokens",
        lambda s: s.acquire(asks("r"), 1, [Candidate(replica("v"), 10**30, 1)], 1),
    ),
    ("lease_id", lambda s: s.release(["a\nb"])),
    ("verifier", lambda s: s.put_reports([StoredReport("", 1, 0, b"")], 1)),
    ("sequence", lambda s: s.put_reports([StoredReport("v", 1, -1, b"")], 1)),
    ("report", lambda s: s.put_reports([StoredReport("v", 1, 0, bytes(2**20 + 1))], 1)),
    ("holder", lambda s: s.lead("", 1)),
    ("ttl_s", lambda s: s.publish(1, {}, NAN)),
    ("verifier", lambda s: s.publish(1, {"": b""}, 1)),
    ("plan", lambda s: s.publish(1, {"v": bytes(2**20 + 1)}, 1)),
    ("calibration", lambda s: s.set_calibration(1, 1, bytes(2**20 + 1))),
    ("version", lambda s: s.set_calibration(1, -1, b"")),
    ("known", lambda s: s.members(known=-2)),
    ("known", lambda s: s.plans(["v"], NAN)),  # type: ignore[arg-type]
    ("known", lambda s: s.calibration(NAN)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("field", "call"), BAD)
async def test_bad_input_is_refused_by_name_and_changes_nothing(
    store: MemoryStore, field: str, call: Callable[[MemoryStore], Awaitable[Any]]
) -> None:
    await join(store, "v")
    before = await store.snapshot()
    with pytest.raises(InvalidRequest) as refused:
        await call(store)
    assert refused.value.field == field
    assert await store.snapshot() == before
