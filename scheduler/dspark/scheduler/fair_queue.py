"""Who is served next when more wait than can run: tenants by share, counted in tokens.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over tenants. Each has a virtual time, the tokens
charged to it divided by its share; the waiting tenant that is least far goes next. One that comes
back from idleness starts at the virtual time of whoever was served last: nothing is saved up. While
two tenants wait all along, what they were charged, each by its share, differs by at most one item
of each. Inside a tenant higher priority goes first, then earlier arrival.

A state machine without I/O or clock. Every operation is O(log n) amortised, n items and tenants.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dspark.core.errors import InvalidRequest

Item = TypeVar("Item", bound=Hashable)

DEFAULT_SHARE = 1.0
# What a share of 0 is counted as: served when nobody else waits, and once in a million tokens.
SMALLEST_SHARE = 1e-6
# Dead entries that a heap may hold beside as many live ones before it is cleaned.
SLACK = 64


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Item]):
    """An item in line. cost: tokens charged to its tenant when it is popped."""

    item: Item
    tenant: str
    cost: float
    priority: int
    arrival: int


@dataclass(slots=True, eq=False)
class _Tenant:
    """virtual: its virtual time, tokens a share. line: heap of (−priority, arrival, ticket), items
    by ticket; a ticket that is not in `live` was removed. tokens: cost of those live. entry: its
    valid one in the order of tenants, None while nobody waits."""

    share: float
    virtual: float
    line: list[tuple[int, int, int]] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    tokens: float = 0.0
    entry: int | None = None


class FairQueue(Generic[Item]):
    """Waiting items of all tenants. Items are hashable and in it once."""

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._shares = _checked(shares or {})
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[int, Waiting[Item]] = {}
        self._ticket_of: dict[Item, int] = {}
        # (virtual time or less, entry, tenant): an entry may be behind its tenant, never ahead.
        self._order: list[tuple[float, int, str]] = []
        self._now = 0.0
        self._numbers = 0
        self._forget_at = SLACK

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: object) -> bool:
        return item in self._ticket_of

    def __iter__(self) -> Iterator[Item]:
        """Everything that waits, in the order of coming in; not the order of going out."""
        return iter([waiting.item for waiting in self._waiting.values()])

    def push(
        self,
        tenant: str,
        cost_tokens: float,
        item: Item,
        priority: int = 0,
        arrival: int | None = None,
    ) -> None:
        """Join the line. cost_tokens: what serving it is expected to take, at least 0; `charge`
        corrects it later. arrival: its place among equals of its tenant (one that was preempted
        comes back to its old one); None: behind all before it, and then for every item."""
        if item in self._ticket_of:
            raise ValueError(f"{item!r} waits already")
        if not (math.isfinite(cost_tokens) and cost_tokens >= 0):
            raise InvalidRequest("cost_tokens", cost_tokens, "must be a number of at least 0")
        arrival = self._number() if arrival is None else arrival
        state = self._tenant(tenant)
        if not state.live:
            state.virtual = max(state.virtual, self._now)
        self._insert(Waiting(item, tenant, cost_tokens, priority, arrival))

    def peek(self) -> Waiting[Item] | None:
        """What `pop` would give."""
        name = self._next_tenant()
        return None if name is None else self._waiting[self._first(self._tenants[name])]

    def pop(self) -> Waiting[Item]:
        """The next item leaves the line, its tenant is charged. `IndexError` if nobody waits."""
        name = self._next_tenant()
        if name is None:
            raise IndexError("nobody waits")
        tenant = self._tenants[name]
        waiting = self._take(tenant, self._first(tenant))
        heapq.heappop(tenant.line)
        self._now = max(self._now, tenant.virtual)
        tenant.virtual += waiting.cost / tenant.share
        if not tenant.live:
            heapq.heappop(self._order)
            tenant.entry = None
            self._forget_idle()
        return waiting

    def put_back(self, waiting: Waiting[Item]) -> None:
        """Undo a `pop` of what could not be served: back to its place, the charge returned."""
        self._insert(waiting)
        self.charge(waiting.tenant, -waiting.cost)

    def remove(self, item: Item) -> bool:
        """It does not want to be served any more; nothing is charged. Whether it waited."""
        ticket = self._ticket_of.get(item)
        if ticket is None:
            return False
        tenant = self._tenants[self._waiting[ticket].tenant]
        self._take(tenant, ticket)
        if not tenant.live:
            tenant.line.clear()
            tenant.entry = None
        elif len(tenant.line) > 2 * len(tenant.live) + SLACK:
            tenant.line = [entry for entry in tenant.line if entry[2] in tenant.live]
            heapq.heapify(tenant.line)
        return True

    def charge(self, tenant: str, tokens: float) -> None:
        """Tokens that were served beyond what `pop` charged; below 0 returns what was not used."""
        if not math.isfinite(tokens):
            raise InvalidRequest("tokens", tokens, "must be a number")
        state = self._tenant(tenant)
        state.virtual += tokens / state.share
        if tokens < 0 and state.live:
            self._enter(tenant, state)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """New shares from now on; a tenant left out has DEFAULT_SHARE. What a tenant was charged
        beyond others stays the same number of tokens. `InvalidRequest` for what is no share."""
        if (checked := _checked(shares)) == self._shares:
            return
        self._shares = checked
        for name, tenant in self._tenants.items():
            share = checked.get(name, DEFAULT_SHARE)
            ahead = tenant.virtual - self._now
            tenant.virtual = self._now + ahead * (tenant.share / share)
            tenant.share = share
        self._rebuild()

    def tokens(self, tenant: str) -> float:
        """Cost of what waits for a tenant."""
        return self._tenants[tenant].tokens if tenant in self._tenants else 0.0

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, lines and the order of tenants agree."""
        assert self._ticket_of == {w.item: ticket for ticket, w in self._waiting.items()}
        entries = {entry: (key, name) for key, entry, name in self._order}
        for name, tenant in self._tenants.items():
            mine = {t: w for t, w in self._waiting.items() if w.tenant == name}
            assert tenant.live == set(mine)
            assert tenant.live <= {ticket for _, _, ticket in tenant.line}
            assert math.isclose(tenant.tokens, sum(w.cost for w in mine.values()), abs_tol=1e-6)
            assert (tenant.entry is not None) == bool(mine)
            if tenant.entry is not None:
                key, owner = entries[tenant.entry]
                assert owner == name
                assert key <= tenant.virtual
        assert len(self._waiting) == sum(len(tenant.live) for tenant in self._tenants.values())

    def _insert(self, waiting: Waiting[Item]) -> None:
        tenant = self._tenant(waiting.tenant)
        ticket = self._number()
        self._waiting[ticket] = waiting
        self._ticket_of[waiting.item] = ticket
        heapq.heappush(tenant.line, (-waiting.priority, waiting.arrival, ticket))
        tenant.live.add(ticket)
        tenant.tokens += waiting.cost
        if tenant.entry is None:
            self._enter(waiting.tenant, tenant)

    def _take(self, tenant: _Tenant, ticket: int) -> Waiting[Item]:
        waiting = self._waiting.pop(ticket)
        del self._ticket_of[waiting.item]
        tenant.live.remove(ticket)
        tenant.tokens = tenant.tokens - waiting.cost if tenant.live else 0.0
        return waiting

    def _first(self, tenant: _Tenant) -> int:
        """Ticket of the first in a tenant's line, which then is at its top."""
        while tenant.line[0][2] not in tenant.live:
            heapq.heappop(tenant.line)
        return tenant.line[0][2]

    def _next_tenant(self) -> str | None:
        """The waiting tenant that is least far, whose entry then is at the top of the order."""
        while self._order:
            key, entry, name = self._order[0]
            tenant = self._tenants.get(name)
            if tenant is None or tenant.entry != entry:
                heapq.heappop(self._order)
            elif key < tenant.virtual:
                tenant.entry = self._number()
                heapq.heapreplace(self._order, (tenant.virtual, tenant.entry, name))
            else:
                return name
        return None

    def _enter(self, name: str, tenant: _Tenant) -> None:
        tenant.entry = self._number()
        heapq.heappush(self._order, (tenant.virtual, tenant.entry, name))
        if len(self._order) > 2 * len(self._tenants) + SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        self._order = [
            (tenant.virtual, tenant.entry, name)
            for name, tenant in self._tenants.items()
            if tenant.entry is not None
        ]
        heapq.heapify(self._order)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = _Tenant(self._shares.get(name, DEFAULT_SHARE), self._now)
            self._tenants[name] = tenant
        return tenant

    def _forget_idle(self) -> None:
        """Tenants of whom there is nothing to remember: nobody waits, nothing is owed."""
        if len(self._tenants) > self._forget_at:
            self._tenants = {
                name: tenant
                for name, tenant in self._tenants.items()
                if tenant.live or tenant.virtual > self._now
            }
            self._forget_at = 2 * len(self._tenants) + SLACK

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def _checked(shares: Mapping[str, float]) -> dict[str, float]:
    for tenant, share in shares.items():
        if not (math.isfinite(share) and share >= 0):
            raise InvalidRequest(f"shares[{tenant!r:.40}]", share, "must be a number of at least 0")
    return {tenant: max(share, SMALLEST_SHARE) for tenant, share in shares.items()}
