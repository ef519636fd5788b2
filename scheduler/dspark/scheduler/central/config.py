"""Configuration of a scheduler replica: every default once, with its unit and its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from dspark.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Seconds unless said otherwise.

    heartbeat_s, ttl_s: between two signs of life, and without one until a replica counts as dead;
    two in a row may go unanswered. lease_ttl_s: of a lease whose owner says nothing; its heartbeats
    renew it. plan_interval_s: between two plans, and between two reports of a verifier; a step
    takes about as long. plan_ttl_s: a plan that is not replaced holds for so long. report_ttl_s: of
    reports.
    lead_ttl_s: without a word from the planning replica until another plans. look_s: between two
    looks at members and claims for routing. calibration_s: between two refits.
    prefill_chunk: prompt tokens of a verifier's step, for estimates. tenant_tokens: KV tokens that
    one tenant's leases may claim, 0 for no limit. shares: by tenant, what it gets beside others
    where more is asked than can be served; the rest have share 1. gamma: draft tokens of a block
    where verifiers draft by themselves.
    """

    heartbeat_s: float = 0.5
    ttl_s: float = 1.75
    lease_ttl_s: float = 5.0
    plan_interval_s: float = 0.05
    plan_ttl_s: float = 0.5
    report_ttl_s: float = 1.0
    lead_ttl_s: float = 1.0
    look_s: float = 0.1
    calibration_s: float = 5.0
    prefill_chunk: int = 256
    tenant_tokens: int = 0
    gamma: int = 7
    shares: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name not in ("shares", "tenant_tokens")):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}: {value!r} must be above 0")
        if self.tenant_tokens < 0:
            raise ConfigError(f"tenant_tokens: {self.tenant_tokens} must be at least 0")
        for tenant, share in self.shares.items():
            if not 0 < share < math.inf:
                raise ConfigError(f"shares.{tenant}: {share!r} must be above 0")
        for short, long, times, said in (
            ("heartbeat_s", "ttl_s", 3, "three times"),
            ("plan_interval_s", "plan_ttl_s", 2, "twice"),
        ):
            if getattr(self, long) < times * getattr(self, short):
                raise ConfigError(
                    f"{long}: {getattr(self, long)} must be at least {said} {short}, "
                    f"{getattr(self, short)}"
                )
