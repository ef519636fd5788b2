"""Reports up, plans down, one planner at a time, a calibration that only gets newer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dspark.scheduler.store import MemoryStore, Plans, StoredCalibration, StoredReport, Taken

from .cluster import TTL, Clock, join

Lose = Callable[[], Awaitable[None]]
BYTES = bytes(range(256)) + b"7 8 9 \r\n"


# --- reports -------------------------------------------------------------------------------------


async def test_a_report_comes_back_byte_for_byte(store: MemoryStore) -> None:
    v, w = await join(store, "v"), await join(store, "w")
    put = [StoredReport("w", w.epoch, 0, b""), StoredReport("v", v.epoch, 2**53, BYTES)]
    assert await store.put_reports(put, TTL) == (Taken.TAKEN, Taken.TAKEN)
    assert await store.reports() == [put[1], put[0]]
    assert await store.put_reports([], TTL) == ()


async def test_late_double_and_foreign_reports_change_nothing(store: MemoryStore) -> None:
    old, v = await join(store, "v"), await join(store, "v")

    async def put(epoch: int, sequence: int, data: bytes, name: str = "v") -> Taken:
        (taken,) = await store.put_reports([StoredReport(name, epoch, sequence, data)], TTL)
        return taken

    assert await put(v.epoch, 5, b"5") is Taken.TAKEN
    assert await put(v.epoch, 4, b"4") is Taken.OLD
    assert await put(old.epoch, 9, b"9") is Taken.FENCED
    assert await put(v.epoch + 1, 9, b"9") is Taken.UNKNOWN
    assert await put(1, 9, b"9", "nobody") is Taken.UNKNOWN
    assert [report.data for report in await store.reports()] == [b"5"]
    assert await put(v.epoch, 5, b"5, and no draft since") is Taken.TAKEN
    assert [report.data for report in await store.reports()] == [b"5, and no draft since"]
    new = await join(store, "v")
    assert await store.reports() == []
    assert await put(new.epoch, 0, b"a new life counts anew") is Taken.TAKEN


async def test_reports_go_with_their_time_and_their_verifier(
    store: MemoryStore, clock: Clock
) -> None:
    v, w = await join(store, "v", ttl_s=9), await join(store, "w", ttl_s=1)
    for replica in (v, w):
        await store.put_reports([StoredReport(replica.replica_id, replica.epoch, 1, b"x")], 2)
    clock.now += 1
    dead = StoredReport("w", w.epoch, 1, b"x")
    assert await store.put_reports([dead], 2) == (Taken.UNKNOWN,)
    assert [report.verifier for report in await store.reports()] == ["v"]
    clock.now += 1
    assert await store.reports() == []


# --- the planning lease --------------------------------------------------------------------------


async def test_one_leads_until_its_time_is_over(store: MemoryStore, clock: Clock) -> None:
    term = await store.lead("a", 1)
    assert term is not None
    assert await store.lead("b", 1) is None
    clock.now += 0.999
    assert await store.lead("a", 1) == term
    clock.now += 0.999
    assert await store.lead("b", 1) is None
    clock.now += 0.001
    later = await store.lead("b", 1)
    assert later is not None
    assert later > term
    assert await store.lead("a", 1) is None
    clock.now += 5
    assert await store.lead("b", 1) == later  # nobody took it in between
    await store.resign(term)  # an earlier term is nobody's business
    assert await store.lead("a", 1) is None
    await store.resign(later)
    again = await store.lead("a", 1)
    assert again is not None
    assert again > later


async def test_only_the_current_term_publishes(store: MemoryStore, clock: Clock) -> None:
    term = await store.lead("a", 1)
    assert term is not None
    assert await store.publish(term, {"v": BYTES, "w": b""}, TTL) is not None
    clock.now += 2
    assert await store.publish(term, {"v": b"2"}, TTL) is not None  # over, but nobody took it
    later = await store.lead("b", 1)
    assert later is not None
    assert await store.publish(term, {"v": b"3"}, TTL) is None
    seen = await store.plans(["v"])
    assert seen is not None
    assert seen.plans == {"v": b"2"}
    assert await store.publish(later, {"v": b"4"}, TTL) is not None
    await store.resign(later)
    assert await store.publish(later, {"v": b"5"}, TTL) is None


async def test_terms_and_versions_grow_over_the_loss_of_the_store(
    store: MemoryStore, clock: Clock, lose: Lose
) -> None:
    term = await store.lead("a", 1)
    assert term is not None
    version = await store.publish(term, {"v": b"1"}, TTL)
    assert version is not None
    await lose()
    assert await store.publish(term, {"v": b"2"}, TTL) is None  # it must lead again
    clock.now += 0.1
    again = await store.lead("a", 1)
    assert again is not None
    assert again > term
    newer = await store.publish(again, {"v": b"3"}, TTL)
    assert newer is not None
    assert newer > version


async def test_plans_are_replaced_as_a_whole_and_sent_once(
    store: MemoryStore, clock: Clock
) -> None:
    assert await store.plans(["v"]) is None
    term = await store.lead("a", 1) or 0
    one = await store.publish(term, {"v": BYTES, "w": b"w"}, 2)
    assert one is not None
    assert await store.plans(["w", "x", "v"]) == Plans(one, {"v": BYTES, "w": b"w"})
    assert await store.plans(["v"], known=one) is None
    two = await store.publish(term, {"w": b"w2"}, 2)
    assert two is not None
    assert two > one
    assert await store.plans(["v", "w"], known=one) == Plans(two, {"w": b"w2"})
    three = await store.publish(term, {}, 2)
    assert await store.plans(["v", "w"], known=two) == Plans(three or 0, {})
    clock.now += 2
    assert await store.plans(["v", "w"]) is None


# --- calibration ---------------------------------------------------------------------------------


async def test_a_calibration_only_gets_newer_and_outlives_its_planner(
    store: MemoryStore, clock: Clock
) -> None:
    assert await store.calibration() is None
    assert await store.set_calibration(1, 1, b"nobody leads") is False
    term = await store.lead("a", 1) or 0
    assert await store.set_calibration(term, 3, BYTES) is True
    assert await store.set_calibration(term, 3, b"again") is False
    assert await store.set_calibration(term, 2, b"older") is False
    assert await store.calibration() == StoredCalibration(3, BYTES)
    assert await store.calibration(known=3) is None
    clock.now += 10_000
    later = await store.lead("b", 1) or 0
    assert await store.set_calibration(term, 4, b"of an earlier term") is False
    assert await store.calibration(known=2) == StoredCalibration(3, BYTES)
    assert await store.set_calibration(later, 4, b"4") is True
