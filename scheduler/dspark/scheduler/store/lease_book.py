"""Leases in one process, with the sums over them kept beside."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from dspark.core.leases import Lease
from dspark.scheduler.store.expiry import Expiry
from dspark.scheduler.store.records import Claim


@dataclass(slots=True)
class Claims:
    """Sums over leases, kept beside them. What comes to 0 is left out."""

    tokens: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, tokens: int, runs: int) -> None:
        for counter, amount in ((self.tokens, tokens), (self.runs, runs)):
            counter[name] += amount
            if counter[name] <= 0:
                del counter[name]

    def seen(self) -> dict[str, Claim]:
        return {name: Claim(self.tokens[name], runs) for name, runs in self.runs.items()}


class LeaseBook:
    """claims: of verifiers, and runs of drafters; tenants: of tenants."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.expiry = Expiry()
        self.claims = Claims()
        self.tenants = Claims()
        self._held: defaultdict[str, set[str]] = defaultdict(set)

    def grant(self, lease: Lease, expires: int) -> None:
        self.leases[lease.lease_id] = lease
        self.expiry.set(lease.lease_id, expires)
        self._held[lease.verifier.replica_id].add(lease.lease_id)
        self._count(lease, 1)

    def free(self, name: str) -> bool:
        """Whether there was such a lease."""
        lease = self.leases.pop(name, None)
        if lease is None:
            return False
        self.expiry.drop(name)
        held = self._held[lease.verifier.replica_id]
        held.remove(name)
        if not held:
            del self._held[lease.verifier.replica_id]
        self._count(lease, -1)
        return True

    def free_of(self, verifier: str, most: int | None = None) -> int:
        """Free at most so many leases of a verifier, by name; how many they were."""
        names = sorted(self._held.get(verifier, ()))[:most]
        for name in names:
            self.free(name)
        return len(names)

    def held(self) -> Iterator[tuple[str, str]]:
        """(verifier, lease)."""
        return ((verifier, name) for verifier, names in self._held.items() for name in names)

    def _count(self, lease: Lease, sign: int) -> None:
        runs = sign * lease.choices
        self.claims.add(lease.verifier.replica_id, sign * lease.tokens, runs)
        if lease.drafter is not None:
            self.claims.add(lease.drafter.replica_id, 0, runs)
        self.tenants.add(lease.tenant, sign * lease.tokens, runs)
