"""How well drafts are accepted, and what their confidence says of it.

Each draft token has a true acceptance rate θ, given that all before it stood, drawn anew from a
Beta distribution; it stands with probability θ. Its confidence logit is logit θ, made noisy and
stretched. So confidences are informative (they know θ), but not of the outcome, and as wrong as
they are asked to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.core.errors import ConfigError
from dspark.scheduler.simulation.strict import number
from dspark.scheduler.sts import confidence

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

# Rates this near to 0 and 1 have a logit.
_EDGE = 1e-6
# Blocks drawn at once: arrays are made in bulk, and handed out in order.
BULK = 4096


@dataclass(frozen=True, slots=True)
class Domain:
    """A kind of request. share: of the requests, by weight. acceptance: mean of θ by position, the
    last for all later ones. spread: standard deviation of θ. noise: of the confidence logit.
    temperature: what the logit is multiplied by, and so the divisor that calibrates it; above 1
    confidences are too sure of themselves."""

    name: str
    acceptance: float | tuple[float, ...] = number(least=0, most=1)
    share: float = number(1.0, above=0)
    spread: float = number(0.0, 0, 0.5)
    noise: float = number(0.0, 0, 10)
    temperature: float = number(1.0, above=0)

    def __post_init__(self) -> None:
        if not self.means:
            raise ConfigError("acceptance: must have at least one entry")
        for mean in self.means:
            most = math.sqrt(mean * (1 - mean))
            if self.spread and self.spread >= most:
                raise ConfigError(
                    f"spread: {self.spread:g} must be below {most:.4g}, the most that rates can "
                    f"spread about {mean:g}"
                )

    @property
    def means(self) -> tuple[float, ...]:
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    def by_position(self, gamma: int) -> FloatArray:
        """[gamma] means."""
        known = np.array(self.means[:gamma])
        return np.pad(known, (0, gamma - len(known)), mode="edge")


@dataclass(frozen=True, slots=True)
class Blocks:
    """n draft blocks. logits: [n, γ] raw, of confidence. stands: [n] tokens that would be accepted
    if the whole block were verified."""

    logits: FloatArray
    stands: IntArray


def draw(domain: Domain, n: int, gamma: int, rng: np.random.Generator) -> Blocks:
    mean = np.broadcast_to(domain.by_position(gamma), (n, gamma))
    rate: FloatArray = mean
    if domain.spread:
        total = mean * (1 - mean) / domain.spread**2 - 1  # a + b of Beta(a, b)
        rate = rng.beta(np.maximum(mean * total, 1e-9), np.maximum((1 - mean) * total, 1e-9))
    fell = rng.random((n, gamma)) >= rate
    stands = np.where(fell.any(axis=1), fell.argmax(axis=1), gamma)
    inner = np.clip(rate, _EDGE, 1 - _EDGE)
    logits = np.log(inner) - np.log1p(-inner)
    if domain.noise:
        logits = logits + domain.noise * rng.standard_normal((n, gamma))
    return Blocks(logits * domain.temperature, stands)


class Source:
    """Endless blocks of each domain."""

    def __init__(
        self, domains: tuple[Domain, ...], gamma: int, rng: np.random.Generator, bulk: int = BULK
    ) -> None:
        self._domains = domains
        self._gamma = gamma
        self._rng = rng
        self._bulk = bulk
        self._drawn = [draw(domain, 0, gamma, rng) for domain in domains]
        self._used = [0] * len(domains)

    def take(self, domain: IntArray) -> Blocks:
        """One block for each of [n] domains."""
        if len(self._domains) == 1:
            return self._of(0, len(domain))
        logits = np.empty((len(domain), self._gamma))
        stands = np.empty(len(domain), np.intp)
        for d in range(len(self._domains)):
            at = np.flatnonzero(domain == d)
            if len(at):
                blocks = self._of(d, len(at))
                logits[at], stands[at] = blocks.logits, blocks.stands
        return Blocks(logits, stands)

    def _of(self, d: int, n: int) -> Blocks:
        if self._used[d] + n > len(self._drawn[d].stands):
            self._drawn[d] = draw(self._domains[d], max(self._bulk, n), self._gamma, self._rng)
            self._used[d] = 0
        rows = slice(self._used[d], self._used[d] + n)
        self._used[d] += n
        return Blocks(self._drawn[d].logits[rows], self._drawn[d].stands[rows])


def survival(logits: FloatArray, scaling: FloatArray) -> FloatArray:
    """Logits [n, γ], scaling [2, γ] -> [n, γ] a_k = ∏_{i<=k} σ(z_i / t_i + b_i)."""
    alive: FloatArray = np.cumprod(confidence(logits, scaling), axis=1, dtype=np.float64)
    return alive
