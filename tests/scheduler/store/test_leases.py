"""Claims on verifiers: never above their room, never lost, never left over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from dspark.core.errors import Fenced
from dspark.core.leases import Lease
from dspark.core.replicas import Pool, Replica
from dspark.scheduler.store import Claim, MemoryStore, Refusal, Renewed
from dspark.scheduler.store.names import SWEEP

from .cluster import TTL, Clock, asks, join, on

LONG = 100.0  # outlives every lease here


async def lease(store: MemoryStore, name: str, tokens: int, *places: Replica) -> Lease:
    found = await store.acquire(asks(name), tokens, [on(place) for place in places], TTL)
    assert isinstance(found, Lease)
    return found


async def claimed(store: MemoryStore) -> dict[str, tuple[int, int]]:
    claims = (await store.usage()).claims
    return {name: (claim.tokens, claim.runs) for name, claim in claims.items()}


async def test_a_lease_says_what_was_claimed_where(store: MemoryStore) -> None:
    v, d = await join(store, "v"), await join(store, "d", Pool.DRAFTER)
    asked = asks("a/r", 2, "tenant", choices=3)
    found = await store.acquire(asked, 60, [on(v, drafter=d)], TTL)
    assert found == Lease("a/r:2", "a/r", "tenant", v, 60, 5000, d, 3)
    usage = await store.usage()
    assert usage.claims == {"v": Claim(60, 3), "d": Claim(0, 3)}
    assert usage.tenants == {"tenant": Claim(60, 3)}
    assert await store.release(["a/r:2"]) == 1
    assert (await store.usage()).claims == (await store.usage()).tenants == {}


async def test_the_first_candidate_with_room_is_taken(store: MemoryStore) -> None:
    v, w = await join(store, "v"), await join(store, "w")
    assert (await lease(store, "1", 60, v, w)).verifier == v
    assert (await lease(store, "2", 60, v, w)).verifier == w
    assert (await lease(store, "3", 40, v, w)).verifier == v  # just fits
    assert await store.acquire(asks("4"), 41, [on(v), on(w)], TTL) is Refusal.FULL
    assert (await lease(store, "5", 40, v, w)).verifier == w
    assert await store.acquire(asks("6"), 1, [on(v), on(w)], TTL) is Refusal.FULL
    assert await claimed(store) == {"v": (100, 2), "w": (100, 2)}


async def test_runs_are_bounded_as_tokens_are(store: MemoryStore) -> None:
    v = await join(store, "v")
    assert isinstance(await store.acquire(asks("1", choices=2), 1, [on(v, runs=3)], TTL), Lease)
    assert await store.acquire(asks("2", choices=2), 1, [on(v, runs=3)], TTL) is Refusal.FULL
    assert isinstance(await store.acquire(asks("3"), 1, [on(v, runs=3)], TTL), Lease)
    assert await store.acquire(asks("4"), 1, [on(v, runs=3)], TTL) is Refusal.FULL


async def test_who_cannot_serve_is_passed_over(store: MemoryStore, clock: Clock) -> None:
    dead = await join(store, "dead", ttl_s=1.0)
    old, says, wanted, fine = [await join(store, n) for n in ("old", "says", "wanted", "fine")]
    await join(store, "old")
    await store.heartbeat("says", says.epoch, True, None, TTL)
    await store.want_drain("wanted", True)
    clock.now += 1.0
    stranger = Replica("stranger", "", 1)
    places = (dead, old, says, wanted, stranger, fine)
    assert (await lease(store, "r", 1, *places)).verifier == fine
    assert await store.acquire(asks("s"), 1, [on(p) for p in places[:-1]], TTL) is Refusal.FULL
    assert await store.acquire(asks("s"), 1, [], TTL) is Refusal.FULL


async def test_the_same_attempt_gets_the_same_lease_again(store: MemoryStore, clock: Clock) -> None:
    v, w = await join(store, "v", ttl_s=LONG), await join(store, "w", ttl_s=LONG)
    first = await lease(store, "r", 60, v)
    clock.now += TTL - 0.001
    assert await store.acquire(asks("r"), 999, [on(w)], TTL) == first
    clock.now += TTL - 0.001  # it was renewed
    assert await lease(store, "r", 60, w) == first
    other = await store.acquire(asks("r", attempt=1), 10, [on(w)], TTL)
    assert isinstance(other, Lease)
    assert other.verifier == w
    assert await claimed(store) == {"v": (60, 1), "w": (10, 1)}


async def test_a_tenant_stays_within_its_limit(store: MemoryStore) -> None:
    v = await join(store, "v")

    async def ask(name: str, tenant: str, tokens: int) -> Lease | Refusal:
        return await store.acquire(asks(name, tenant=tenant), tokens, [on(v)], TTL, 50)

    assert isinstance(await ask("1", "a", 30), Lease)
    assert await ask("2", "a", 21) is Refusal.TENANT
    assert isinstance(await ask("3", "a", 20), Lease)
    assert isinstance(await ask("4", "", 50), Lease)
    assert (await store.usage()).tenants == {"a": Claim(50, 2), "": Claim(50, 1)}
    await store.release(["1:0"])
    assert isinstance(await ask("5", "a", 30), Lease)
    assert await ask("6", "b", 1) is Refusal.FULL  # the verifier is, not the tenant
    assert await ask("7", "a", 1) is Refusal.TENANT


async def test_what_expires_frees_its_claim_before_the_next_one(
    store: MemoryStore, clock: Clock
) -> None:
    v = await join(store, "v", ttl_s=LONG)
    await lease(store, "r", 100, v)
    clock.now += TTL - 0.001
    assert await store.acquire(asks("s"), 100, [on(v)], TTL) is Refusal.FULL
    clock.now += 0.001
    assert (await lease(store, "s", 100, v)).request_id == "s"
    assert await claimed(store) == {"v": (100, 1)}


async def test_owners_keep_what_they_renew(store: MemoryStore, clock: Clock) -> None:
    v = await join(store, "v", ttl_s=LONG)
    kept, left = await lease(store, "kept", 1, v), await lease(store, "left", 2, v)
    clock.now += TTL / 2
    assert await store.renew([kept, kept], TTL) == Renewed(kept=2)
    clock.now += TTL / 2
    assert await claimed(store) == {"v": (1, 1)}
    assert await store.release([left.lease_id, "unknown:0"]) == 0
    assert await store.release([kept.lease_id, kept.lease_id]) == 1
    assert await store.release([]) == 0
    assert await store.renew([], TTL) == Renewed()


async def test_only_the_verifiers_own_leases_end_with_it(store: MemoryStore, clock: Clock) -> None:
    """Ids that begin alike are told apart."""
    v, v1, w = [await join(store, n, ttl_s=t) for n, t in (("v", 9), ("v1", 9), ("w", 2))]
    for i, place in enumerate((v, v1, v1, w)):
        await store.acquire(asks(f"{i}"), 5, [on(place)], 9)
    clock.now += 2
    assert await claimed(store) == {"v": (5, 1), "v1": (10, 2)}
    again = await join(store, "v")
    assert await claimed(store) == {"v1": (10, 2)}
    await store.acquire(asks("5"), 5, [on(again)], 9)
    await store.leave("v", again.epoch)
    assert await claimed(store) == {"v1": (10, 2)}
    clock.now += 7
    assert await claimed(store) == {}


async def test_a_fenced_gateway_gets_no_lease(store: MemoryStore) -> None:
    v, old = await join(store, "v"), await join(store, "g", Pool.GATEWAY)
    new = await join(store, "g", Pool.GATEWAY)
    with pytest.raises(Fenced, match="g has registered again"):
        await store.acquire(replace(asks("r"), owner_epoch=old.epoch), 1, [on(v)], TTL)
    assert await claimed(store) == {}
    asked = replace(asks("r"), owner_epoch=new.epoch)
    assert isinstance(await store.acquire(asked, 1, [on(v)], TTL), Lease)


async def test_a_store_that_lost_everything_is_rebuilt_from_heartbeats(
    store: MemoryStore, clock: Clock, lose: Callable[[], Awaitable[None]]
) -> None:
    v, d = await join(store, "v"), await join(store, "d", Pool.DRAFTER)
    asked = asks("r", choices=2)
    first = await store.acquire(asked, 60, [on(v, drafter=d)], TTL)
    assert isinstance(first, Lease)
    second = await lease(store, "s", 10, v)
    usage = await store.usage()
    await lose()
    assert await store.renew([first, second], TTL) == Renewed(dropped=2)  # v is not back yet
    clock.now += 0.1
    again = await join(store, "v")
    assert again.epoch > v.epoch
    assert await store.renew([first, second], TTL) == Renewed(remade=2)
    assert await store.usage() == usage
    assert await store.acquire(asked, 60, [on(again)], TTL) == first
    assert await store.acquire(asks("t"), 31, [on(again)], TTL) is Refusal.FULL


async def test_expired_leases_are_cleared_a_bounded_number_at_a_time(
    store: MemoryStore, clock: Clock
) -> None:
    """So that no call waits for thousands; until then they count, which is the safe side."""
    many = 2 * SWEEP + SWEEP // 2
    v = await join(store, "v", ttl_s=LONG)
    made = [Lease(f"{i:04}:0", f"{i:04}", "t", v, 2, 5000) for i in range(many)]
    assert await store.renew(made, TTL) == Renewed(remade=many)
    clock.now += TTL
    left = []
    for _ in range(4):
        left.append((await claimed(store)).get("v", (0, 0))[1])
        await store.check_integrity()
    assert left == [many - SWEEP, many - 2 * SWEEP, 0, 0]


async def test_a_dead_verifier_with_very_many_leases_goes_in_steps(
    store: MemoryStore, clock: Clock
) -> None:
    v, w = await join(store, "v", ttl_s=1), await join(store, "w", ttl_s=1)
    made = [Lease(f"{i:04}:0", f"{i:04}", "t", v, 1, 5000) for i in range(SWEEP + 9)]
    await store.renew(made, TTL)
    await store.renew([Lease("w:0", "w", "t", w, 1, 5000)], TTL)
    clock.now += 1
    assert await claimed(store) == {"v": (9, 9), "w": (1, 1)}
    listed = await store.members()
    assert listed is not None
    assert listed.members == ()  # dead is dead, cleared away or not
    assert await claimed(store) == {}


async def test_sums_are_exact_however_large(store: MemoryStore) -> None:
    v = await join(store, "v")
    most = 2**31
    for i in range(3):
        asked = asks(f"{i}", choices=2**16)
        found = await store.acquire(asked, most, [on(v, tokens=3 * most, runs=2**20)], TTL)
        assert isinstance(found, Lease)
    assert await claimed(store) == {"v": (3 * most, 3 * 2**16)}
    full = await store.acquire(asks("9"), 1, [on(v, tokens=3 * most, runs=2**20)], TTL)
    assert full is Refusal.FULL
    assert await store.release(["0:0", "1:0"]) == 2
    assert await claimed(store) == {"v": (most, 2**16)}
