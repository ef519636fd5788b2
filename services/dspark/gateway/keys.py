"""Who may call: API keys, the tenants they belong to, and what each tenant may use.

One strict file, YAML or JSON:

    tenants:
      acme:
        share: 2                    # weight beside other tenants under load; default 1
        keys: [2bb80d53...]         # SHA-256 of each key, 64 hex digits (`new_key` makes both)
        limits:                     # a limit left out does not hold, except max_priority
          requests_per_minute: 600
          tokens_per_minute: 100000 # of prompts and answers together
          concurrent_requests: 32
          max_priority: 0           # higher wishes are lowered to it; default 0

Limits hold for all keys of a tenant together, in this process. Keys are random and long, so a plain
hash keeps them; neither a key nor a hash ever appears in an error or a log.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from dspark.core.errors import ConfigError, Overloaded, Unauthenticated
from dspark.gateway.strict_file import Strict, read_strict

OPEN_TENANT = "default"

# Told where nobody knows when a running request ends.
CONCURRENCY_RETRY_S = 1.0

# Seconds of a wait that are rounding, not waiting.
NO_WAIT_S = 1e-6

Clock = Callable[[], float]

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_KeyHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class TenantLimits(Strict):
    """None: no limit."""

    requests_per_minute: PositiveFloat | None = None
    tokens_per_minute: PositiveFloat | None = None
    concurrent_requests: PositiveInt | None = None
    max_priority: _Priority = 0


class _TenantEntry(Strict):
    keys: list[_KeyHash]
    share: PositiveFloat = 1.0
    limits: TenantLimits = TenantLimits()


class _KeyFile(Strict):
    tenants: dict[_Name, _TenantEntry] = Field(min_length=1)


class Bucket:
    """A minute's allowance that refills evenly. Taking may leave a debt, which is waited out: so an
    answer's tokens are taken when they are known, and the rate holds in the long run."""

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self._rate = per_minute / 60
        self._most = max(per_minute, 1.0)
        self._level = self._most
        self._clock = clock
        self._seen = clock()

    def wait_s(self) -> float:
        """Seconds until there is 1 to take; 0 if there is."""
        self._refill()
        wait = (1 - self._level) / self._rate
        return wait if wait > NO_WAIT_S else 0.0

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._seen) * self._rate)
        self._seen = now


class Tenant:
    """Whose call it is, and what it has used. For one event loop."""

    def __init__(
        self,
        name: str,
        share: float = 1.0,
        limits: TenantLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.share = share
        self.limits = limits or TenantLimits()
        self.running = 0
        self._requests = _bucket(self.limits.requests_per_minute, clock)
        self._tokens = _bucket(self.limits.tokens_per_minute, clock)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Counts as one running request inside. Raises `Overloaded`: then nothing is used up."""
        most = self.limits.concurrent_requests
        if most is not None and self.running >= most:
            raise Overloaded(
                f"{self.running} requests of tenant {self.name} are running, the limit is {most}",
                CONCURRENCY_RETRY_S,
            )
        for bucket, limit, what in (
            (self._requests, self.limits.requests_per_minute, "requests"),
            (self._tokens, self.limits.tokens_per_minute, "tokens"),
        ):
            if bucket is not None and (wait_s := bucket.wait_s()):
                raise Overloaded(
                    f"tenant {self.name} has used its {limit:g} {what} a minute; "
                    f"there is more in {math.ceil(wait_s)} s",
                    wait_s,
                )
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def spend(self, tokens: int) -> None:
        """Tokens of a prompt or an answer. What is spent beyond the limit delays later calls."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def priority(self, wish: int) -> int:
        return min(wish, self.limits.max_priority)


def _bucket(per_minute: float | None, clock: Clock) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


class KeyRing:
    """`KeyRing()` lets everybody in as tenant "default"; `KeyRing.load(file)` asks for a key.

    tenants: by key hash.
    """

    def __init__(self, tenants: Mapping[str, Tenant] | None = None) -> None:
        self._tenants = tenants
        self._open = Tenant(OPEN_TENANT, limits=TenantLimits(max_priority=2**31 - 1))

    @classmethod
    def load(cls, path: str | Path, clock: Clock = time.monotonic) -> KeyRing:
        """Raises `ConfigError` naming the file, the field, and what it must be."""
        tenants: dict[str, Tenant] = {}
        for name, entry in read_strict(Path(path), _KeyFile).tenants.items():
            tenant = Tenant(name, entry.share, entry.limits, clock)
            for i, known in enumerate(entry.keys):
                if known in tenants:
                    raise ConfigError(
                        f"{path}: tenants.{name}.keys.{i}: is a key of tenant "
                        f"{tenants[known].name} already"
                    )
                tenants[known] = tenant
        if not tenants:
            raise ConfigError(f"{path}: tenants: no tenant has a key, so nobody could call")
        return cls(tenants)

    @property
    def shares(self) -> dict[str, float]:
        """By tenant, for the scheduler."""
        return {tenant.name: tenant.share for tenant in (self._tenants or {}).values()}

    def authenticate(self, header: str | None) -> Tenant:
        """header: of `authorization`, "Bearer KEY". Raises `Unauthenticated`."""
        if self._tenants is None:
            return self._open
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("an API key is needed: send `authorization: Bearer KEY`")
        given = key_hash(key.strip())
        found = None
        for known, tenant in self._tenants.items():  # all of them: time tells nothing of a hash
            if hmac.compare_digest(known, given):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def new_key() -> tuple[str, str]:
    """(a fresh key, to be given to its user and nobody else; its hash, for the file)."""
    key = f"dspark-{secrets.token_urlsafe(32)}"
    return key, key_hash(key)
