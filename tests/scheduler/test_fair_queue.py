"""Tenants' shares in tokens: who goes next, what idleness does not save, who never starves."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.errors import InvalidRequest
from dspark.scheduler.fair_queue import SMALLEST_SHARE, FairQueue

Queue = FairQueue[Any]


def drain(queue: Queue) -> list[Any]:
    return [queue.pop().item for _ in range(len(queue))]


# --- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_three_to_one_in_tokens_whatever_the_sizes(seed: int) -> None:
    """Saturated: both have more in line than is served. A's items are 20 times B's."""
    rng = random.Random(seed)
    queue = Queue({"a": 3.0, "b": 1.0})
    for i in range(4000):
        queue.push("a", rng.randint(200, 2000), ("a", i))
        queue.push("b", rng.randint(1, 200), ("b", i))
    served: Counter[str] = Counter()
    while served.total() < 200_000:
        waiting = queue.pop()
        served[waiting.tenant] += waiting.cost
    assert served["a"] / served["b"] == pytest.approx(3.0, rel=0.1)


@dataclass
class Slots:
    """A verifier's slots over steps: each running item commits 1 to 4 tokens a step, which are
    charged as they come; how long an answer is, nobody knows before its end."""

    queue: Queue
    slots: int
    rng: random.Random
    prompt_of: dict[str, int]
    answer_of: dict[str, int]
    running: list[list[Any]] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    ids: Any = field(default_factory=itertools.count)

    def step(self, wants: tuple[str, ...]) -> None:
        for tenant in wants:
            while self.queue.tokens(tenant) < 5000:
                self.queue.push(tenant, self.prompt_of[tenant], next(self.ids))
        while len(self.running) < self.slots and len(self.queue):
            waiting = self.queue.pop()
            left = self.rng.randint(1, 2 * self.answer_of[waiting.tenant])
            self.running.append([waiting.tenant, left])
            self.tokens[waiting.tenant] += waiting.cost
        for run in self.running:
            made = min(self.rng.randint(1, 4), run[1])
            run[1] -= made
            self.tokens[run[0]] += made
            self.queue.charge(run[0], made)
        self.running = [run for run in self.running if run[1]]


@pytest.mark.parametrize(
    ("answers", "seed"), [((100, 100), 1), ((300, 20), 2), ((20, 300), 3), ((300, 20), 4)]
)
def test_three_to_one_in_tokens_when_answers_are_charged_as_they_come(
    answers: tuple[int, int], seed: int
) -> None:
    """Prompts differ, too; a's answers are 15 times b's, or the other way round."""
    queue = Queue({"a": 3.0, "b": 1.0})
    server = Slots(
        queue, 8, random.Random(seed), {"a": 50, "b": 400}, dict(zip("ab", answers, strict=True))
    )
    for _ in range(8000):
        server.step(("a", "b"))
    queue.check_integrity()
    assert server.tokens["a"] / server.tokens["b"] == pytest.approx(3.0, rel=0.1)


costs = st.integers(1, 50)
lines = st.lists(costs, min_size=1, max_size=30)


@given(
    st.dictionaries(st.sampled_from("abcd"), lines, min_size=2),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0])),
    st.data(),
)
def test_while_two_wait_they_differ_by_one_item_of_each(
    work: dict[str, list[int]], shares: dict[str, float], data: st.DataObject
) -> None:
    """The theorem of start-time fair queueing, over every interval in which both wait."""
    queue = Queue(shares)
    for tenant, line in work.items():
        for i, cost in enumerate(line):
            queue.push(tenant, cost, (tenant, i))
    a, b = data.draw(st.sampled_from(list(itertools.combinations(sorted(work), 2))))
    share = {tenant: shares.get(tenant, 1.0) for tenant in (a, b)}
    bound = max(work[a]) / share[a] + max(work[b]) / share[b]
    lead, least, most = 0.0, 0.0, 0.0
    while queue.tokens(a) and queue.tokens(b):
        waiting = queue.pop()
        if waiting.tenant in share:
            lead += waiting.cost / share[waiting.tenant] * (1 if waiting.tenant == a else -1)
        least, most = min(least, lead), max(most, lead)
    assert most - least <= bound + 1e-9


def test_nobody_starves_however_small_the_share() -> None:
    queue = Queue({"big": 1000.0, "small": 1.0})
    queue.push("small", 10, "s0")
    queue.push("small", 10, "s1")
    waited = 0
    for i in itertools.count():
        queue.push("big", 10, i)
        if queue.pop().item == "s1":
            break
        waited += 1
    assert waited <= 1000 + 3


def test_a_share_of_zero_is_served_when_nobody_else_waits() -> None:
    queue = Queue({"none": 0.0})
    for i in range(20):
        queue.push("none", 10, ("none", i))
        queue.push("some", 10, ("some", i))
    order = [tenant for tenant, _ in drain(queue)]
    assert order.index("some") <= 1
    assert order[2:21] == ["some"] * 19
    # And what it owes is forgotten when it gets a share.
    queue.push("none", 10, 1)
    queue.push("some", 10, 2)
    queue.set_shares({"none": 1.0})
    queue.push("some", 10, 3)
    queue.push("some", 10, 4)
    assert set(drain(queue)[:3]) >= {1}
    assert SMALLEST_SHARE > 0


def test_an_idle_tenant_saves_up_nothing() -> None:
    queue = Queue()
    for i in range(100):
        queue.push("busy", 100, ("busy", i))
    for _ in range(50):
        queue.pop()
    for i in range(50):
        queue.push("idle", 100, ("idle", i))
    first = [tenant for tenant, _ in drain(queue)][:40]
    assert Counter(first)["idle"] == pytest.approx(20, abs=1)


def test_nor_does_one_pay_for_using_what_nobody_wanted() -> None:
    queue = Queue()
    for i in range(50):
        queue.push("busy", 100, ("early", i))
        queue.pop()
    for i in range(50):
        queue.push("busy", 100, ("busy", i))
        queue.push("late", 100, ("late", i))
    first = [tenant for tenant, _ in drain(queue)][:40]
    assert Counter(first)["busy"] == pytest.approx(20, abs=1)


def test_what_was_charged_and_not_used_comes_back() -> None:
    """a's requests say 1,000 tokens and take 10."""
    queue = Queue()
    for i in range(100):
        queue.push("a", 1000, ("a", i))
        queue.push("b", 10, ("b", i))
    order = []
    for _ in range(60):
        waiting = queue.pop()
        order.append(waiting.tenant)
        if waiting.tenant == "a":
            queue.charge("a", 10 - waiting.cost)
    assert Counter(order)["a"] == pytest.approx(30, abs=1)


def test_shares_change_while_they_wait() -> None:
    queue = Queue({"a": 1.0, "b": 1.0})
    for i in range(400):
        queue.push("a", 10, ("a", i))
        queue.push("b", 10, ("b", i))
    before = Counter(queue.pop().tenant for _ in range(100))
    queue.set_shares({"a": 3.0, "b": 1.0})
    after = Counter(queue.pop().tenant for _ in range(100))
    queue.check_integrity()
    assert before["a"] == pytest.approx(50, abs=1)
    assert after["a"] == pytest.approx(75, abs=2)


# --- order ---------------------------------------------------------------------------------------


def test_inside_a_tenant_priority_then_arrival() -> None:
    queue = Queue()
    for item, priority in (("b", 0), ("c", 0), ("a", 5), ("d", -1)):
        queue.push("t", 1, item, priority)
    assert drain(queue) == ["a", "b", "c", "d"]


def test_priority_does_not_reach_into_other_tenants() -> None:
    queue = Queue()
    for i in range(10):
        queue.push("loud", 1, ("loud", i), priority=100)
        queue.push("quiet", 1, ("quiet", i))
    assert Counter(tenant for tenant, _ in drain(queue)[:10])["quiet"] == 5


def test_one_that_comes_back_gets_its_old_place() -> None:
    queue = Queue()
    for i in range(3):
        queue.push("t", 5, i, arrival=i)
    assert queue.pop().item == 0
    queue.push("t", 0, 0, arrival=0)
    assert drain(queue) == [0, 1, 2]


def test_peek_and_put_back_change_nothing() -> None:
    queue, twin = Queue({"a": 3.0}), Queue({"a": 3.0})
    for q in (queue, twin):
        for i in range(40):
            q.push("ab"[i % 2], 1 + i % 7, i)
    for _ in range(20):
        for_now = [queue.pop() for _ in range(3)]
        for waiting in reversed(for_now):
            queue.put_back(waiting)
        queue.check_integrity()
        head = queue.peek()
        assert head is not None
        assert head.item == queue.pop().item == twin.pop().item


def test_a_removed_item_is_gone_and_not_charged() -> None:
    queue = Queue()
    for i in range(4):
        queue.push("a", 10, i)
    assert queue.remove(0)
    assert not queue.remove(0)
    assert 0 not in queue
    assert queue.tokens("a") == 30
    assert drain(queue) == [1, 2, 3]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_numbers_are_refused(bad: float) -> None:
    queue = Queue()
    with pytest.raises(InvalidRequest, match="cost_tokens"):
        queue.push("a", bad, 1)
    with pytest.raises(InvalidRequest, match="shares"):
        queue.set_shares({"a": bad})
    with pytest.raises(InvalidRequest, match="shares"):
        Queue({"a": bad})
    if bad != -1.0:
        with pytest.raises(InvalidRequest, match="tokens"):
            queue.charge("a", bad)
    queue.push("a", 1, 1)
    with pytest.raises(ValueError, match="waits already"):
        queue.push("b", 1, 1)
    queue.check_integrity()


# --- against a plain model -----------------------------------------------------------------------


class Plain:
    """The same rules with lists: every operation looks at everything."""

    def __init__(self, shares: dict[str, float]) -> None:
        self.shares, self.virtual, self.now = shares, dict[str, float](), 0.0
        self.items: list[
            tuple[str, int, int, int, int]
        ] = []  # tenant, -priority, arrival, item, cost
        self.ties: dict[str, int] = {}

    def share(self, tenant: str) -> float:
        return self.shares.get(tenant, 1.0)

    def waits(self, tenant: str) -> bool:
        return any(item[0] == tenant for item in self.items)

    def push(self, tenant: str, cost: int, item: int, priority: int) -> None:
        if not self.waits(tenant):
            self.virtual[tenant] = max(self.virtual.get(tenant, self.now), self.now)
        self.items.append((tenant, -priority, item, item, cost))

    def tenants(self) -> set[str]:
        """Those that may be next: least far, within rounding."""
        far = {tenant: self.virtual[tenant] for tenant, *_ in self.items}
        least = min(far.values(), default=0.0)
        return {tenant for tenant, v in far.items() if v <= least + 1e-9 * (1 + abs(least))}

    def pop(self, tenant: str) -> int:
        first = min(item for item in self.items if item[0] == tenant)
        self.items.remove(first)
        self.now = max(self.now, self.virtual[tenant])
        self.virtual[tenant] += first[4] / self.share(tenant)
        return first[3]

    def charge(self, tenant: str, tokens: int) -> None:
        self.virtual[tenant] = self.virtual.get(tenant, self.now) + tokens / self.share(tenant)

    def set_shares(self, shares: dict[str, float]) -> None:
        for tenant in self.virtual:
            ahead = self.virtual[tenant] - self.now
            self.virtual[tenant] = self.now + ahead * self.share(tenant) / shares.get(tenant, 1.0)
        self.shares = shares


names = st.sampled_from("abcde")
sharings = st.dictionaries(names, st.sampled_from([0.25, 1.0, 2.0, 3.0]))
operations = st.one_of(
    st.tuples(st.just("push"), names, st.integers(0, 40), st.integers(-1, 1)),
    st.tuples(st.just("pop")),
    st.tuples(st.just("pop, put back")),
    st.tuples(st.just("remove"), st.integers(0, 60)),
    st.tuples(st.just("charge"), names, st.integers(-20, 40)),
    st.tuples(st.just("share"), sharings),
)


@given(sharings, st.lists(operations, max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_run_goes_as_in_the_plain_model(
    shares: dict[str, float], run: list[tuple[Any, ...]]
) -> None:
    queue, plain = Queue(shares), Plain(shares)
    for number, (what, *args) in enumerate(run):
        if what == "push":
            tenant, cost, priority = args
            queue.push(tenant, cost, number, priority)
            plain.push(tenant, cost, number, priority)
        elif what == "pop" and plain.items:
            got = queue.pop()
            assert got.tenant in plain.tenants()
            assert got.item == plain.pop(got.tenant)
        elif what == "pop, put back" and plain.items:
            got = queue.pop()
            assert got.tenant in plain.tenants()
            plain.now = max(plain.now, plain.virtual[got.tenant])
            queue.put_back(got)
        elif what == "remove":
            gone = [item for item in plain.items if item[3] == args[0]]
            assert queue.remove(args[0]) == bool(gone)
            plain.items = [item for item in plain.items if item not in gone]
        elif what == "charge":
            queue.charge(*args)
            plain.charge(*args)
        elif what == "share":
            queue.set_shares(args[0])
            plain.set_shares(args[0])
        queue.check_integrity()
        assert len(queue) == len(plain.items)


# --- cost ----------------------------------------------------------------------------------------


class Counted(int):
    """A priority that counts its comparisons."""

    comparisons = 0

    def __neg__(self) -> Counted:
        return Counted(-int(self))

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("n", [256, 16_384])
def test_operations_are_logarithmic_in_the_line(n: int) -> None:
    rng = random.Random(n)
    queue = Queue()
    Counted.comparisons = 0
    for i in range(n):
        queue.push("t", 1, i, Counted(rng.randrange(1000)))
    for i in range(0, n, 3):
        queue.remove(i)
    drain(queue)
    assert Counted.comparisons / n <= 5 * math.log2(n)


def test_nothing_is_kept_of_what_is_over() -> None:
    """Removals, refunds and tenants that came once do not pile up."""
    queue = Queue()
    queue.push("resident", 1, "resident")
    for i in range(20_000):
        queue.push(f"once-{i}" if i % 2 else f"often-{i % 50}", 1, i)
        queue.charge("resident", -0.5)
        queue.charge("resident", 0.5)
        if i % 2:
            queue.remove(i)
        else:
            while queue.pop().item != i:
                queue.push("resident", 1, "resident")
    assert held(queue) < 1000


def test_nor_while_nobody_is_served() -> None:
    queue = Queue()
    queue.push("a", 1, "resident")
    for i in range(10_000):
        queue.push("a", 1, i)
        queue.charge("a", -0.5)
        queue.remove(i)
    assert held(queue) < 1000
    queue.check_integrity()


def held(queue: Queue) -> int:
    """Entries in all that it keeps."""
    tables = ("_tenants", "_order", "_waiting", "_ticket_of")
    lines = sum(len(tenant.line) + len(tenant.live) for tenant in queue._tenants.values())
    return lines + sum(len(getattr(queue, name)) for name in tables)
