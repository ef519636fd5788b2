"""What routing and admission know of verifiers and drafters: cards, claims, reports, costs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import MAX_GAMMA, DrafterCard
from dspark.core.replicas import DrafterLoad, Replica, VerifierCard
from dspark.core.reports import Report
from dspark.scheduler.step_cost import StepCost

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# Busier than this a drafter is as good as never idle: waits grow without bound from here.
MOST_BUSY = 0.99
# Rounds of a verifier's own report that weigh as much as what all report together. One interval is
# a step or two, and its luck must not draw every request there; who was idle has nothing to tell.
USUAL_ROUNDS = 100.0
# The kind of drafter that knows no model: prompt lookup.
LOOKUP = "ngram"
# Draft tokens a second of a drafter that has not measured itself.
UNKNOWN_CAPACITY = 1000.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What a decoding request does in a verifier's step, as its newest report has it. tau: tokens
    committed. drafts: draft tokens verified. context: tokens attended to. prefill: P beside it."""

    tau: float = 1.0
    drafts: float = 0.0
    context: float = 0.0
    prefill: float = 0.0

    @classmethod
    def of(cls, report: Report | None) -> Pace:
        """Draft tokens verified are not told: taken for those that stood and one that fell, at most
        what came. Without a decoding step: plain decoding."""
        rounds = 0.0 if report is None else report.steps * report.requests
        if report is None or not rounds > 0:
            return cls()
        drafted = sum(use.drafted for use in report.drafters)
        tau = sum(tenant.tokens for tenant in report.tenants) / rounds
        tau = min(max(tau, 1.0), 1.0 + MAX_GAMMA)
        return cls(
            tau=tau,
            drafts=min(drafted / rounds, tau, float(MAX_GAMMA)),
            context=report.context / report.requests,
            prefill=report.prefill_tokens,
        )


@dataclass(frozen=True, slots=True)
class VerifierState:
    """A verifier as the store has it. claimed_tokens, claimed_runs: of leases on it. report: its
    newest, checked; None before the first. step_cost: None if it was not profiled."""

    replica: Replica
    card: VerifierCard
    claimed_tokens: int = 0
    claimed_runs: int = 0
    draining: bool = False
    report: Report | None = None
    step_cost: StepCost | None = None

    @property
    def runs(self) -> int:
        """Running or waiting: leases, or what it reports where leases are not known (yet)."""
        if self.report is None:
            return self.claimed_runs
        return max(self.claimed_runs, round(self.report.requests) + self.report.queue)

    def step_seconds(self, R: int, pace: Pace, extra_context: int = 0) -> float | None:
        """T of a step with R decoding requests at this pace; None if nothing is known of it."""
        if self.step_cost is None:
            return None
        P = round(pace.prefill)
        B = P + R + round(R * pace.drafts)
        return self.step_cost.seconds(P, R, B, round(R * pace.context) + extra_context)


@dataclass(frozen=True, slots=True)
class DrafterState:
    """A drafter as the store has it."""

    replica: Replica
    card: DrafterCard
    load: DrafterLoad = field(default_factory=DrafterLoad)
    draining: bool = False

    @property
    def busy(self) -> float:
        """ρ, at most MOST_BUSY."""
        return min(self.load.tokens_per_s / self._capacity, MOST_BUSY)

    @property
    def wait(self) -> float:
        """How long a request waits, in no unit: grows with its queue, and as 1 / (1 − ρ) with how
        busy it is, falls with how fast it is."""
        return (1 + self.load.queue) / (self._capacity * (1 - self.busy))

    @property
    def _capacity(self) -> float:
        return self.load.capacity_tokens_per_s or UNKNOWN_CAPACITY

    def serves(self, card: VerifierCard) -> bool:
        """Whether it was made for a verifier's target. What its card leaves empty fits all (a
        drafter that reads tokens only needs the vocabulary at most)."""
        own = self.card
        return (
            own.target_id in ("", card.target_id)
            and own.vocab_size in (0, card.limits.vocab_size)
            and own.tokenizer_hash in ("", card.tokenizer_hash)
        )


class Fleet:
    """Verifiers as arrays, in the order given, for many requests between two looks at the store.

    Made anew when members, claims or reports changed; between that, `claim` keeps the leases that
    this process gave. gain: [V] tokens a second that one more request adds, Θ(R + 1) − Θ(R) with
    Θ = R τ / T; of a full verifier 0 − the steps' worth of runs that wait, in units of
    max_sequences. rate: [V] tokens a second of each request then, ∞ if not known.
    """

    def __init__(
        self, verifiers: Sequence[VerifierState], drafters: Sequence[DrafterState] = ()
    ) -> None:
        self.verifiers = tuple(verifiers)
        self.drafters = tuple(drafters)
        self.index = {v.replica.replica_id: i for i, v in enumerate(self.verifiers)}
        self._wishes = {None} | {w for d in drafters for w in (d.card.drafter_id, d.card.kind)}
        self._fitting: dict[tuple[object, ...], tuple[DrafterState, ...]] = {}
        self._longest: dict[tuple[object, ...], int] = {}
        self._versions: dict[tuple[object, ...], tuple[tuple[DrafterState, ...], ...]] = {}
        self.models = {v.card.model for v in self.verifiers}
        self.hashes = np.fromiter((_hash(v.replica.replica_id) for v in self.verifiers), np.uint64)
        self._model = np.array([v.card.model for v in self.verifiers], object)
        self.draining = np.array([v.draining for v in self.verifiers], np.bool_)
        self.kv_tokens = _numbers(v.card.limits.kv_tokens for v in self.verifiers)
        self.sequence_tokens = _numbers(v.card.limits.sequence_tokens for v in self.verifiers)
        self.block_size = _numbers(v.card.block_size for v in self.verifiers)
        self.max_sequences = _numbers(v.card.max_sequences for v in self.verifiers)
        self.max_runs = self.max_sequences + _numbers(v.card.max_waiting for v in self.verifiers)
        self.claimed_tokens = _numbers(v.claimed_tokens for v in self.verifiers)
        self.runs = _numbers(v.runs for v in self.verifiers)
        self._pace = paces([v.report for v in self.verifiers])
        self.gain = np.empty(len(self.verifiers))
        self.rate = np.empty(len(self.verifiers))
        for i in range(len(self.verifiers)):
            self._weigh(i)
        # What is not known of a verifier is taken to be as it is elsewhere.
        known = self.gain[self.gain > 0]  # NaN is not above 0
        self._usual_gain = float(np.median(known)) if len(known) else 1.0
        self.gain[np.isnan(self.gain)] = self._usual_gain

    def serving(self, model: str) -> BoolArray:
        """[V] verifiers of a model."""
        same: BoolArray = self._model == model
        return same

    def fitting(self, card: VerifierCard, wish: str | None) -> tuple[DrafterState, ...]:
        """Drafters made for a verifier's target that take new sessions, of one id or kind if that
        is wished."""
        if wish not in self._wishes:
            return ()
        key = (*_target(card), wish)
        if key not in self._fitting:
            self._fitting[key] = tuple(
                drafter
                for drafter in self.drafters
                if not drafter.draining
                and wish in (None, drafter.card.drafter_id, drafter.card.kind)
                and drafter.serves(card)
            )
        return self._fitting[key]

    def versions(
        self, card: VerifierCard, wish: str | None
    ) -> tuple[tuple[DrafterState, ...], ...]:
        """The same by version, the newest first and prompt lookup last. A version is as old as the
        oldest of its replicas that is here, so one of an older version that starts again does not
        make it the newest."""
        if wish not in self._wishes:
            return ()
        key = (*_target(card), wish)
        if key not in self._versions:
            fit = self.fitting(card, wish)
            since: dict[str, int] = {}
            for drafter in fit:
                first = since.get(drafter.card.drafter_id, drafter.replica.epoch)
                since[drafter.card.drafter_id] = min(first, drafter.replica.epoch)
            by_age: dict[tuple[bool, int], list[DrafterState]] = {}
            for drafter in fit:
                age = drafter.card.kind != LOOKUP, since[drafter.card.drafter_id]
                by_age.setdefault(age, []).append(drafter)
            self._versions[key] = tuple(tuple(by_age[a]) for a in sorted(by_age, reverse=True))
        return self._versions[key]

    def longest_block(self, card: VerifierCard) -> int:
        """γ of a verifier's drafters, the longest; 0 without any."""
        key = _target(card)
        if key not in self._longest:
            fit = self.fitting(card, None)
            self._longest[key] = max((drafter.card.gamma for drafter in fit), default=0)
        return self._longest[key]

    def claim(self, replica_id: str, tokens: int, runs: int) -> None:
        """A lease was given on a verifier (or given back, below 0); an unknown one is fine."""
        i = self.index.get(replica_id)
        if i is not None:
            self.claimed_tokens[i] = max(self.claimed_tokens[i] + tokens, 0)
            self.runs[i] = max(self.runs[i] + runs, 0)
            self._weigh(i)
            if math.isnan(self.gain[i]):
                self.gain[i] = self._usual_gain

    def _weigh(self, i: int) -> None:
        """gain and rate of one verifier; NaN and ∞ where its step cost is not known."""
        verifier, pace = self.verifiers[i], self._pace[i]
        runs, most = int(self.runs[i]), verifier.card.max_sequences
        R = min(runs, most - 1)
        before, after = verifier.step_seconds(R, pace), verifier.step_seconds(R + 1, pace)
        if before is None or after is None:
            self.rate[i], self.gain[i] = math.inf, math.nan
        else:
            self.rate[i] = pace.tau / after
            self.gain[i] = pace.tau * ((R + 1) / after - R / before)
        if runs >= most:
            self.gain[i] = (most - 1 - runs) / most


def paces(reports: Sequence[Report | None]) -> list[Pace]:
    """How a request goes on at each of several verifiers: what was seen there, shrunk to what was
    seen everywhere."""
    own = [Pace.of(report) for report in reports]
    rounds = np.array([r.steps * r.requests if r is not None else 0.0 for r in reports])
    if not rounds.sum():
        return own
    seen = np.array([(pace.tau, pace.drafts, pace.context) for pace in own])
    weight = (rounds / (rounds + USUAL_ROUNDS))[:, None]
    mixed = weight * seen + (1 - weight) * (rounds @ seen / rounds.sum())
    return [
        Pace(tau, drafts, was.context if n else context, was.prefill)
        for (tau, drafts, context), was, n in zip(mixed.tolist(), own, rounds.tolist(), strict=True)
    ]


def _target(card: VerifierCard) -> tuple[object, ...]:
    """What a drafter must have been made for."""
    return card.target_id, card.tokenizer_hash, card.limits.vocab_size


def _hash(replica_id: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), digest_size=8).digest(), "little")


def _numbers(values: Iterable[int]) -> FloatArray:
    return np.fromiter(values, np.float64)
