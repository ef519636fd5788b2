"""Verify lengths at a simulated verifier: the functions that serve, called in the order in which
the verifier's engine calls them (services, `verifier/planning.py`, which also knows real drafts).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark.core.drafts import MAX_GAMMA
from dspark.core.plans import Directions, Plan
from dspark.core.sampling import SamplingMode
from dspark.scheduler.asking import (
    Beside,
    DraftCost,
    UsualSavings,
    askers,
    block,
    reach,
    supposed,
)
from dspark.scheduler.joint import SMALLEST_GAIN
from dspark.scheduler.planner import (
    Policy,
    PolicyKind,
    capacity,
    plan,
    saving,
    scaled,
)
from dspark.scheduler.simulation.profiles import FloatArray, IntArray
from dspark.scheduler.simulation.rows import Rows
from dspark.scheduler.step_cost import StepCost

# Weight of the newest round in a sequence's mean saving, as in the engine.
SAVING_RATE = 0.2


class Guide(Protocol):
    """How a verifier follows plans: the engine's own `Guidance`."""

    def registered(self, replica: str, epoch: int) -> None: ...

    def take(self, plan: Plan) -> bool: ...

    def directions(self, oldest_draft: int | None) -> Directions | None: ...

    def bypasses(self, tenant: str) -> bool: ...

    def scaling(self, drafter_id: str, mode: SamplingMode, gamma: int) -> FloatArray: ...

    def affordable(self, drafter: str, wanted: int, block: int) -> int: ...

    def spend(self, drafter: str, tokens: int) -> None: ...


MakeGuide = Callable[[Callable[[], float]], Guide]


@dataclass(frozen=True, slots=True)
class Step:
    """at: slots that decode. lengths: draft tokens of each to verify. seconds: what it should take.
    decode_s, plain_s: what decoding takes of that, and would take without drafts. joining: running
    requests whose prompts are still computed."""

    at: IntArray
    lengths: IntArray
    P: int
    R: int
    B: int
    context: int
    seconds: float
    decode_s: float
    plain_s: float
    joining: int


@dataclass(frozen=True, slots=True)
class _Past:
    survivals: list[FloatArray]
    P: int
    R: int
    context: int
    seen_through: int
    joining: int


class StepPlanner:
    """guide: None plans locally. tenants: names by number. old_steps: see `Scheduling`.
    local_plans: steps of `top-k` whose K could not come from the past. guided_plans: that took
    numbers from the centre."""

    def __init__(
        self,
        policy: Policy,
        cost: StepCost,
        tenants: Sequence[str],
        max_tokens: int,
        *,
        sampled: bool,
        old_steps: int = 1,
        guide: Guide | None = None,
    ) -> None:
        self.local_plans = 0
        self.guided_plans = 0
        self._policy = policy
        self._joint = policy.kind in (PolicyKind.EARLY_STOP, PolicyKind.TOP_K)
        self._cost = cost
        self._tenants = tenants
        self._max_tokens = max_tokens
        self._sampled = sampled
        self._usual = UsualSavings()
        self._quiet = 0  # rounds in which nobody was asked
        self._guide = guide
        self._past: deque[_Past] = deque(maxlen=old_steps)

    def plan(self, rows: Rows, at: IntArray, P: int, context: int, joining: int) -> Step:
        """The step of the decoding slots `at` beside P prefill tokens."""
        R = len(at)
        lengths = np.zeros(R, np.intp)
        if R and self._policy.kind is not PolicyKind.NONE:
            lengths = self._lengths(rows, at, P, context, joining)
        B = P + R + int(lengths.sum())
        return Step(
            at, lengths, P, R, B, context,
            seconds=self._cost.seconds(P, R, B, context),
            decode_s=self._cost.decode_seconds(P, R, B, context, joining),
            plain_s=self._cost.decode_seconds(0, R, R, context, joining),
            joining=joining,
        )  # fmt: skip

    def _lengths(self, rows: Rows, at: IntArray, P: int, context: int, joining: int) -> IntArray:
        R, caps = len(at), rows.block[at]
        drafted = caps > 0
        bound = self._sampled and bool(drafted.any())
        oldest = int(rows.number[at[drafted]].min()) if bound else None
        directions = None if self._guide is None else self._guide.directions(oldest)
        self.guided_plans += directions is not None
        K = self._capacity(directions, R, oldest)
        weights = None
        if directions is not None:
            if directions.caps:
                most = self._by_tenant(directions.caps, MAX_GAMMA)
                caps = np.minimum(caps, most[rows.tenant[at]]).astype(np.intp)
            if directions.weights:
                weights = self._by_tenant(directions.weights, 1.0)[rows.tenant[at]]
        survivals = list(rows.survival[at])
        planned = plan(
            survivals, self._cost, P, R, context, self._policy, K, caps, weights,
            lookahead=not self._sampled, max_tokens=self._max_tokens, joining=joining,
        )  # fmt: skip
        if self._joint and not self._sampled:
            tokens = R + sum(float(a[:n].sum()) for a, n in zip(survivals, planned, strict=True))
            cost = self._cost.decode_curve(P, R, context, int(planned.sum()), joining)
            if tokens / R * float(cost[0] / cost[-1]) - 1 < SMALLEST_GAIN:
                return np.zeros_like(planned)
        return planned

    def _by_tenant(self, values: Mapping[str, float], default: float) -> FloatArray:
        return np.array([values.get(name, default) for name in self._tenants], np.float64)

    def _capacity(self, directions: Directions | None, R: int, oldest: int | None) -> int | None:
        if not self._joint:
            return None
        if directions is not None and directions.capacity is not None and directions.requests > 0:
            return scaled(directions.capacity, directions.requests, R)
        # Where looking ahead is free the live search knows more than a K from the past.
        if self._policy.kind is not PolicyKind.TOP_K or not self._sampled:
            return None
        past = self._past[0] if len(self._past) == self._past.maxlen else None
        if past is None or (oldest is not None and oldest <= past.seen_through):
            self.local_plans += 1
            return None
        K = capacity(past.survivals, self._cost, past.P, past.R, past.context, joining=past.joining)
        return scaled(K, past.R, R)

    def learn(self, rows: Rows, step: Step) -> None:
        """The verdicts of a step are in."""
        at = step.at[rows.block[step.at] > 0]
        if not self._joint or not len(at):
            return
        survivals = [a[:n] for a, n in zip(rows.survival[at], rows.block[at], strict=True)]
        if self._policy.kind is PolicyKind.TOP_K:
            without = [np.empty(0)] * (step.R - len(at))
            newest = int(rows.number[at].max())
            all_of_them = [*survivals, *without]
            facts = (step.P, step.R, step.context, newest, step.joining)
            self._past.append(_Past(all_of_them, *facts))
        lengths = step.lengths[rows.block[step.at] > 0]
        stands = np.arange(rows.survival.shape[1]) < lengths[:, None]
        expected = (rows.survival[at] * stands).sum(axis=1).tolist()
        theta0 = step.R / step.plain_s
        extra_s = step.decode_s - step.plain_s
        saved = np.array(saving(expected, lengths.tolist(), theta0, extra_s))
        before = np.where(np.isnan(rows.saving[at]), saved, rows.saving[at])
        rows.saving[at] = (1 - SAVING_RATE) * before + SAVING_RATE * saved
        self._usual.learn(step.R + step.joining, rows.saving[at].tolist())
        known = np.where(np.isnan(rows.reach[at]), rows.survival.shape[1], rows.reach[at])
        rows.reach[at] = list(map(reach, known.tolist(), lengths.tolist()))

    def askers(
        self, rows: Rows, at: IntArray, costs: Sequence[DraftCost], hidden_s: float, step: Step
    ) -> IntArray:
        """Those of slots `at` to draft for; each counts as unasked until it is asked for. costs: of
        drafters, by number; hidden_s: seconds that other groups' steps take meanwhile."""
        if not self._joint:
            return at if self._policy.kind is not PolicyKind.NONE else at[:0]
        bypassed = None
        if self._guide is not None:
            bypasses = [self._guide.bypasses(name) for name in self._tenants]
            bypassed = [bypasses[tenant] for tenant in rows.tenant[at].tolist()]
        usual = self._usual.of(step.R + step.joining)
        chosen = askers(
            supposed(rows.saving[at].tolist(), usual), costs, [Beside(hidden_s)],
            unasked=(np.maximum(rows.unasked[at], self._quiet) + 1).tolist(),
            step_s=step.decode_s, bypassed=bypassed,
            drafter=rows.drafter[at].tolist() if len(costs) > 1 else None,
        )  # fmt: skip
        rows.unasked[at] += 1
        self._quiet = 0 if chosen else self._quiet + 1
        return at[chosen]

    def blocks(self, rows: Rows, at: IntArray, costs: Sequence[DraftCost], step: Step) -> IntArray:
        """Draft tokens to ask for, of those slots that are asked."""
        longest = np.minimum(rows.survival.shape[1], rows.left[at] - 1)
        if not self._joint:
            fixed = self._policy.kind is PolicyKind.FIXED
            return np.minimum(longest, self._policy.length) if fixed else longest
        whose = rows.drafter[at] if len(costs) > 1 else np.zeros(len(at), np.intp)
        n = np.bincount(whose, minlength=len(costs)).tolist()
        seconds = np.array([cost.seconds(asked) for cost, asked in zip(costs, n, strict=True)])
        probed = (rows.unasked[at] > 1) | np.isnan(rows.saving[at])
        facts = (longest, rows.reach[at], seconds[whose], probed)
        return np.array(
            [
                block(most, reached, drafting_s, step.decode_s, probed=probes)
                for most, reached, drafting_s, probes in zip(
                    *(x.tolist() for x in facts), strict=True
                )
            ],
            np.intp,
        )
