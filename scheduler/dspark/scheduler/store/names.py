"""Every key of the store: its name, its type, what it holds. Written here and nowhere else.

All keys of a cluster carry one hash tag, so that a script may touch any of them on Redis Cluster.
There is a fixed set of keys, whatever the cluster's size: entries expire by what is stored in them,
not by Redis, because an expiry has consequences (a dead verifier frees its leases' claims).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dspark.core.errors import ConfigError

# No entry lives longer without a sign of life; bounds what a jump of the clock can do.
MAX_TTL_MS = 600_000
# Redis drops a key by itself when nothing was written to it for so long: a cluster that was shut
# down leaves no garbage. Above MAX_TTL_MS, so that entries always go first.
KEEP_MS = 3_600_000
# Expired entries that one call clears away, at most: a script stays below some 10 ms.
SWEEP = 500


@dataclass(frozen=True, slots=True)
class Key:
    """type: of Redis. holds: for people, and for the headers of the scripts. lasting: it has no
    time to live of its own."""

    type: str
    holds: str
    lasting: bool = False


KEYS: Mapping[str, Key] = {
    "counters": Key(
        "hash",
        "ticket: last number given to an epoch, term, plan or list of members; "
        "members: number of the list of members",
        lasting=True,
    ),
    "members": Key("zset", "replica -> ms at which it counts as dead"),
    "epochs": Key("hash", "replica -> its epoch"),
    "cards": Key("hash", "replica -> JSON: pool, address, card, calibration"),
    "step_costs": Key("hash", "verifier -> JSON of its step cost"),
    "draining": Key("hash", "replica -> 1 if it says that it drains"),
    "wanted": Key("hash", "replica -> 1 if it is wanted to drain"),
    "loads": Key("hash", "drafter -> JSON of its load"),
    "leases": Key("hash", "lease -> JSON"),
    "lease_expiry": Key("zset", "lease -> ms at which it expires"),
    "leases_of": Key("zset", "<verifier>LF<lease>, score 0: a verifier's leases by prefix"),
    "claimed_tokens": Key("hash", "verifier -> tokens of its leases"),
    "claimed_runs": Key("hash", "verifier or drafter -> runs of its leases"),
    "tenant_tokens": Key("hash", "tenant -> tokens of its leases"),
    "tenant_runs": Key("hash", "tenant -> runs of its leases"),
    "reports": Key("hash", "verifier -> <ms at which it is too old> <epoch> <sequence> <report>"),
    "planner": Key("hash", "holder, term, expires (ms): who plans"),
    "published": Key("hash", "version, expires (ms): of the plans"),
    "plans": Key("hash", "verifier -> its plan"),
    "calibration": Key("hash", "version, data", lasting=True),
}


def key(cluster: str, name: str) -> str:
    """What Redis calls the key `name` of KEYS."""
    return f"{{dspark:{cluster}}}:{name}"


def check_cluster(cluster: str) -> None:
    """Braces would move the hash tag. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", cluster):
        raise ConfigError(
            f"cluster: {cluster!r} must be 1 to 64 letters, digits, dots, dashes or underscores"
        )


def lease_id(request_id: str, attempt: int) -> str:
    """The same request and attempt has the same lease, also in a store that forgot it."""
    return f"{request_id}:{attempt}"
