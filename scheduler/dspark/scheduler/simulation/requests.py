"""What comes in: when, of whom, how long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.core.leases import Lease
from dspark.scheduler.simulation.config import Arrivals, Lengths, SimulationConfig
from dspark.scheduler.simulation.profiles import FloatArray, IntArray

BULK = 4096


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way. tenant, domain: by number. asked_at, submitted_at, first_at, last_at:
    seconds, when it came, reached its verifier, got its first and its last token; −1 before.
    first_tokens: that came with the first. slot: its row at the verifier."""

    number: int
    tenant: int
    domain: int
    prompt: int
    answer: int
    asked_at: float
    user: int = -1
    attempt: int = 0
    lease: Lease | None = None
    submitted_at: float = -1.0
    first_at: float = -1.0
    first_tokens: int = 0
    last_at: float = -1.0
    slot: int = -1

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer


def lengths(spec: int | Lengths, n: int, rng: np.random.Generator) -> list[int]:
    if isinstance(spec, int):
        return [spec] * n
    if spec.kind == "fixed":
        drawn = np.full(n, spec.mean)
    elif spec.kind == "uniform":
        drawn = rng.integers(spec.least, spec.most + 1, n).astype(float)
    elif spec.kind == "geometric":
        drawn = rng.geometric(1 / spec.mean, n).astype(float)
    else:
        drawn = spec.mean * np.exp(spec.spread * rng.standard_normal(n) - spec.spread**2 / 2)
    whole: list[int] = np.clip(np.rint(drawn), spec.least, spec.most).astype(int).tolist()
    return whole


class Requests:
    """Endless requests, drawn in bulk. A user of a closed loop is of one tenant for good: else
    tenants would get what they ask for, by the number of requests, whatever their shares."""

    def __init__(self, config: SimulationConfig, rng: np.random.Generator) -> None:
        self._config = config
        self._rng = rng
        self._made = 0
        number = {domain.name: i for i, domain in enumerate(config.domains)}
        self._domains = [
            [number[name] for name in tenant.domains or number] for tenant in config.tenants
        ]
        traffic = np.array([tenant.traffic for tenant in config.tenants])
        self._edges = np.cumsum(traffic) / traffic.sum()
        self._tenants: list[int] = []
        self._rows: list[list[tuple[int, int, int]]] = [[] for _ in config.tenants]

    def next(self, now: float, user: int = -1) -> Job:
        tenant = self._tenant(user)
        if not self._rows[tenant]:
            self._rows[tenant] = self._draw(tenant)[::-1]
        domain, prompt, answer = self._rows[tenant].pop()
        self._made += 1
        return Job(self._made, tenant, domain, prompt, answer, now, user)

    def _tenant(self, user: int) -> int:
        if user >= 0:
            part = (user + 0.5) / self._config.arrivals.users
            return int(np.searchsorted(self._edges, part))
        if not self._tenants:
            self._tenants = _drawn(self._edges, BULK, self._rng).tolist()
        return self._tenants.pop()

    def _draw(self, tenant: int) -> list[tuple[int, int, int]]:
        config, rng = self._config, self._rng
        known = self._domains[tenant]
        share = np.array([config.domains[d].share for d in known])
        domains = np.array(known)[_drawn(np.cumsum(share) / share.sum(), BULK, rng)]
        prompts = lengths(config.arrivals.prompt, BULK, rng)
        answers = lengths(config.arrivals.answer, BULK, rng)
        return list(zip(domains.tolist(), prompts, answers, strict=True))


def _drawn(edges: FloatArray, n: int, rng: np.random.Generator) -> IntArray:
    """[n] numbers, each as often as its part of [0, 1] up to its edge is wide."""
    if len(edges) == 1:
        return np.zeros(n, np.intp)
    return np.minimum(np.searchsorted(edges, rng.random(n), side="right"), len(edges) - 1)


class Gaps:
    """Seconds between one arrival of an open loop and the next."""

    def __init__(self, arrivals: Arrivals, rng: np.random.Generator) -> None:
        self._arrivals = arrivals
        self._rng = rng
        self._on = True
        self._left = self._phase()

    def _phase(self) -> float:
        if self._arrivals.kind == "poisson":
            return float("inf")
        return float(
            self._rng.exponential(self._arrivals.on_s if self._on else self._arrivals.off_s)
        )

    def next(self) -> float:
        """Of a process whose rate changes with the phase: what is left of a phase without an
        arrival passes, and the next one starts afresh, as exponential gaps may."""
        passed = 0.0
        while True:
            rate = self._arrivals.rate if self._on else self._arrivals.quiet_rate
            gap = float(self._rng.exponential(1 / rate)) if rate > 0 else float("inf")
            if gap < self._left:
                self._left -= gap
                return passed + gap
            passed += self._left
            self._on = not self._on
            self._left = self._phase()
