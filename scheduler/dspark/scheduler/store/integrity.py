"""What must be true of a store at any moment, read off a copy of all it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dspark.core.leases import Lease
from dspark.scheduler.store.names import KEYS

# Hashes that describe a member and go with it.
OF_A_MEMBER = ("cards", "step_costs", "draining", "wanted", "loads", "reports")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """hashes, zsets: by name of KEYS; what is empty may be left out. leases: as decoded. lasting:
    names of the keys that exist and have no time to live, None where there are no such things."""

    hashes: Mapping[str, Mapping[str, str | bytes]]
    zsets: Mapping[str, Mapping[str, float]]
    leases: Mapping[str, Lease]
    lasting: frozenset[str] | None = None


def check(seen: Snapshot) -> None:
    """Raises AssertionError naming the first thing that is wrong."""
    members = seen.zsets.get("members", {})
    hashes = {name: seen.hashes.get(name, {}) for name in KEYS}
    assert members.keys() == hashes["epochs"].keys() == hashes["cards"].keys(), (
        f"members {sorted(members)}, epochs {sorted(hashes['epochs'])} and "
        f"cards {sorted(hashes['cards'])} differ"
    )
    for name in OF_A_MEMBER:
        strangers = hashes[name].keys() - members.keys()
        assert not strangers, f"{name} of no member: {sorted(strangers)}"

    expiry = seen.zsets.get("lease_expiry", {})
    assert seen.leases.keys() == expiry.keys(), "leases and their expiries differ"
    held = {f"{lease.verifier.replica_id}\n{name}" for name, lease in seen.leases.items()}
    assert held == seen.zsets.get("leases_of", {}).keys(), "leases and their index differ"
    claims = {name: Counter[str]() for name in _CLAIMS}
    for name, lease in seen.leases.items():
        verifier = lease.verifier.replica_id
        assert verifier in members, f"lease {name} is on {verifier}, which is no member"
        claims["claimed_tokens"][verifier] += lease.tokens
        claims["claimed_runs"][verifier] += lease.choices
        if lease.drafter is not None:
            claims["claimed_runs"][lease.drafter.replica_id] += lease.choices
        claims["tenant_tokens"][lease.tenant] += lease.tokens
        claims["tenant_runs"][lease.tenant] += lease.choices
    for name, counted in claims.items():
        stored = {field: int(value) for field, value in hashes[name].items()}
        assert stored == counted, f"{name}: {stored} is stored, the leases give {dict(counted)}"

    given = {
        "members": hashes["counters"].get("members", 0),
        "term": hashes["planner"].get("term", 0),
        "version": hashes["published"].get("version", 0),
        **hashes["epochs"],
    }
    last = int(hashes["counters"].get("ticket", 0))
    for name, number in given.items():
        assert int(number) <= last, f"{name} has number {int(number)}, above the last, {last}"
    if seen.lasting is not None:
        meant = {name for name, key in KEYS.items() if key.lasting}
        assert seen.lasting <= meant, f"no time to live: {sorted(seen.lasting - meant)}"


_CLAIMS = ("claimed_tokens", "claimed_runs", "tenant_tokens", "tenant_runs")
