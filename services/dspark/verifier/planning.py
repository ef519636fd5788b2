"""Verify lengths of one step: pure planner functions, fed with what the barrier allows (L2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import MAX_GAMMA
from dspark.core.plans import Directions
from dspark.core.sampling import SamplingMode
from dspark.scheduler import (
    WAITING,
    Beside,
    DraftCost,
    OnlineStepCost,
    Policy,
    PolicyKind,
    UsualSavings,
    askers,
    block,
    capacity,
    plan,
    reach,
    saving,
    scaled,
    supposed,
)
from dspark.verifier.batcher import Item
from dspark.verifier.guidance import Guidance
from dspark.verifier.sequence import Sequence, running_mean

# A step cost is known to a few percent, and judging drafts is not in it; promises smaller than this
# share of Θ lost 4 % on chat prompts at R = 4 (docs/results). Only where looking ahead is free.
SMALLEST_GAIN = 0.05
# Of so many steps with drafts in a row the next goes without. What drafts are weighed against is a
# plain step, and only such a one shows what that costs now; a table that was a quarter too high
# there let four requests lose 7 % by drafting. At most 1 % of the steps' time, as for probes.
PLAIN_EVERY = 64
# After so many rounds in which nobody was asked only every so many are looked into: a look takes
# 0.15 ms at 16 requests, and where drafts take their time a probe is due after many more. A request
# with a policy of its own that comes meanwhile is drafted for up to three rounds later.
QUIET, LOOK_EVERY = 8, 4
# What one level of priority multiplies the weight of a request's tokens by, and the levels that
# count: Θ is told who matters more, but not that the others do not matter.
PRIORITY_WEIGHT = 1.5
PRIORITY_LEVELS = 4


@dataclass(frozen=True, slots=True)
class PastDrafts:
    """Survivals [R] of a step whose verdicts are in: what a capacity K is made from. Usable for
    drafts that came after number `seen_through`."""

    survivals: list[NDArray[np.float64]]
    P: int
    context: int
    seen_through: int
    joining: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """lengths: draft tokens to verify, one a step item. seconds: what the step should take.
    joining: running requests whose prompts are still computed; away: those that decode, but not in
    this step, most because their drafts are under way."""

    lengths: list[int]
    P: int
    R: int
    B: int
    context: int
    seconds: float
    joining: int = 0
    away: int = 0


def free_to_look_ahead(item: Item) -> bool:
    """Whether any truncation of this draft is lossless: greedy and coupled ones, and those that are
    a function of committed history."""
    draft = item.sequence.draft
    return (
        draft is None
        or draft.draft.looks_back_only
        or item.sequence.state.request.sampling.mode is not SamplingMode.REJECTION
    )


class StepPlanner:
    """Plans each step, and learns what drafts are worth from steps whose verdicts are in.

    guidance: the scheduler's numbers where the barrier lets them in. guided_plans: steps that used
    them. local_plans: steps whose capacity K could not come from the past.
    """

    def __init__(
        self, cost: OnlineStepCost, policy: Policy, max_tokens: int, guidance: Guidance
    ) -> None:
        self.cost = cost
        self.guided_plans = 0
        self.local_plans = 0
        self._guidance = guidance
        self._default = policy
        self._max_tokens = max_tokens
        self._past: PastDrafts | None = None
        self._usual = UsualSavings()
        self._quiet = 0  # rounds in which nobody was asked, whoever was there
        self._since_plain = 0  # steps in which drafts were verified, since the last without any

    def plan(self, items: list[Item], joining: int = 0, away: int = 0) -> StepPlan:
        """Lengths for a step's items. Requests with a policy of their own are settled first; what
        they take is part of the step that the others are planned into. joining, away: see
        `StepPlan`."""
        decoding = [item for item in items if item.decoding]
        P = sum(item.tokens for item in items if not item.decoding)
        R = len(decoding)
        context = sum(item.sequence.state.computed for item in items)
        directions = self._guidance.directions(_oldest_bound(decoding))
        self.guided_plans += directions is not None
        lengths: dict[int, int] = {}
        by_policy: dict[Policy, list[Item]] = {}
        drafted = any(item.sequence.draft is not None for item in decoding)
        for item in decoding if drafted else ():  # else there is nothing to choose
            by_policy.setdefault(self._policy(item.sequence), []).append(item)
        for policy in sorted(by_policy, key=_is_joint):
            group = by_policy[policy]
            others = P + R - len(group) + sum(lengths.values())
            survivals = [_admissible(item) for item in group]
            lookahead = all(free_to_look_ahead(item) for item in group)
            planned = plan(
                survivals,
                self.cost.current,
                others,
                len(group),
                context,
                policy,
                capacity=self._capacity(policy, group, directions, lookahead),
                caps=_caps(group, directions),
                weights=_weights(group, directions),
                lookahead=lookahead,
                max_tokens=self._max_tokens,
                joining=joining,
            )
            if lookahead and _is_joint(policy):
                gain = self._gain(survivals, planned, others, context, joining)
                planned = planned if gain >= SMALLEST_GAIN else np.zeros_like(planned)
            lengths.update(zip(map(id, group), planned.tolist(), strict=True))
        verify = [lengths.get(id(item), 0) for item in items]
        B = P + R + sum(verify)
        seconds = self.cost.current.seconds(P, R, B, context)
        return StepPlan(verify, P, R, B, context, seconds, joining, away)

    def _gain(
        self,
        survivals: list[NDArray[np.float64]],
        lengths: NDArray[np.intp],
        others: int,
        context: int,
        joining: int,
    ) -> float:
        """What share of Θ the planned drafts promise on top of none."""
        R, drafts = len(survivals), int(lengths.sum())
        expected = sum(float(a[:n].sum()) for a, n in zip(survivals, lengths, strict=True))
        cost = self.cost.current.decode_curve(others, R, context, drafts, joining)
        return (1 + expected / R) * float(cost[0] / cost[-1]) - 1

    def _policy(self, sequence: Sequence) -> Policy:
        asked = sequence.state.request.speculation.verify
        return self._default if asked is None else Policy.parse(asked)

    def _capacity(
        self, policy: Policy, group: list[Item], directions: Directions | None, lookahead: bool
    ) -> int | None:
        if not _is_joint(policy):
            return None
        if directions is not None and directions.capacity is not None and directions.requests > 0:
            return scaled(directions.capacity, directions.requests, len(group))
        # Where looking ahead is free the live search knows more than a K from the past.
        searches = lookahead or policy.kind is not PolicyKind.TOP_K
        return None if searches else self._usable_capacity(group)

    def _usable_capacity(self, group: list[Item]) -> int | None:
        """The past's K for this many requests, or None where a draft in hand is older than it."""
        past = self._past
        oldest = _oldest_bound(group)
        if past is None or (oldest is not None and oldest <= past.seen_through):
            self.local_plans += 1
            return None
        R = len(past.survivals)
        K = capacity(
            past.survivals, self.cost.current, past.P, R, past.context, joining=past.joining
        )
        return scaled(K, R, len(group))

    def took(self, step: StepPlan, seconds: float) -> None:
        """How long a step took, drafting aside: not the model alone, for what a draft token costs
        the engine around it counts as well."""
        self.cost.observe(step.P, step.R, step.B, step.context, seconds)
        self._since_plain = 0 if step.B == step.P + step.R else self._since_plain + 1

    def learn(self, items: list[Item], step: StepPlan) -> None:
        """Take in a step whose verdicts are known: what its drafts promised."""
        drafted = [item for item in items if item.decoding and item.sequence.draft is not None]
        if not drafted:
            return
        survivals = [_admissible(item) for item in drafted]
        self._remember(drafted, survivals, step)
        length_of = dict(zip(map(id, items), step.lengths, strict=True))
        lengths = [length_of[id(item)] for item in drafted]
        expected = [sum(a[:n].tolist()) for a, n in zip(survivals, lengths, strict=True)]
        plain_s = self._plain_s(step)
        P, R, cost = step.P, step.R, self.cost.current
        extra_s = cost.seconds(P, R, step.B, step.context) - cost.seconds(P, R, P + R, step.context)
        saved = saving(expected, lengths, step.R / plain_s, extra_s)
        for item, length, tokens, seconds in zip(drafted, lengths, expected, saved, strict=True):
            sequence = item.sequence
            before = sequence.gamma if sequence.reach is None else sequence.reach
            sequence.reach = reach(before, length)
            sequence.priced(plain_s / step.R)
            sequence.saving_s = running_mean(sequence.saving_s, seconds)
            sequence.verifies = running_mean(sequence.verifies, float(length))
            sequence.gains = running_mean(sequence.gains, tokens)
        self._usual.learn(
            step.R + step.joining + step.away, [item.sequence.saving_s or 0.0 for item in drafted]
        )

    def _plain_s(self, step: StepPlan) -> float:
        """What decoding would take of it without drafts, by its share of a step of all: whoever is
        away is only because of a draft."""
        others = step.joining + step.away
        return self.cost.current.decode_seconds(0, step.R, step.R, step.context, others)

    def _decode_s(self, step: StepPlan) -> float:
        """What of a step's time is decoding."""
        return self.cost.current.decode_seconds(step.P, step.R, step.B, step.context, step.joining)

    def _remember(
        self, drafted: list[Item], survivals: list[NDArray[np.float64]], step: StepPlan
    ) -> None:
        newest = max(item.sequence.draft.number for item in drafted if item.sequence.draft)
        if self._past is None or newest > self._past.seen_through:
            without = [np.empty(0)] * (step.R - len(drafted))
            self._past = PastDrafts(
                [*survivals, *without], step.P, step.context, newest, step.joining
            )

    def rests(self) -> bool:
        """Whether this round is one in which nobody need be thought of, as nobody was for long."""
        if self._quiet < QUIET or self._quiet % LOOK_EVERY == 0:
            return False
        self._quiet += 1
        return True

    def how_much_to_ask(
        self,
        sequences: Seq[Sequence],
        costs: Seq[DraftCost],
        whose: Seq[int],
        step: StepPlan,
        beside: Seq[Beside] = (WAITING,),
    ) -> list[int]:
        """Draft tokens to ask for, for each of those that could be, 0 for none at all: while the
        drafts of all save more than they cost together and the scheduler's plan wants them, and now
        and then to see again. No more than are likely to be verified, unless drafting costs next to
        nothing. A fixed or threshold policy is taken at its word. costs: of drafters that answer
        side by side; whose: which of them is each one's; beside: what may be done meanwhile. Uses
        the past only."""
        policies = [self._policy(sequence) for sequence in sequences]
        wanted = [_at_its_word(p, s) for p, s in zip(policies, sequences, strict=True)]
        joint = [i for i, policy in enumerate(policies) if _is_joint(policy)]
        if self._since_plain >= PLAIN_EVERY:
            self._since_plain = 0
            return wanted
        among = [sequences[i] for i in joint]
        if step.R:
            token_s = self._plain_s(step) / step.R
            for sequence in among:
                sequence.priced(token_s)
        tenants = [s.state.request.tenant for s in among]
        bypasses = {tenant: self._guidance.bypasses(tenant) for tenant in set(tenants)}
        chosen = askers(
            supposed(
                [s.expected_saving_s for s in among],
                self._usual.of(step.R + step.joining + step.away),
            ),
            costs,
            beside,
            unasked=[max(s.rounds_unasked, self._quiet) + 1 for s in among],
            step_s=self._decode_s(step),
            bypassed=[bypasses[tenant] for tenant in tenants] if any(bypasses.values()) else None,
            drafter=[whose[i] for i in joint] if len(costs) > 1 else None,
        )
        asked = [joint[i] for i in chosen]
        self._quiet = 0 if asked or any(wanted) else self._quiet + 1
        if not asked:
            return wanted
        n, step_s = Counter(whose[i] for i in asked), self._decode_s(step)
        drafting_s = [cost.seconds(n[at]) for at, cost in enumerate(costs)]
        for i in asked:
            s = sequences[i]
            reached = math.nan if s.reach is None else s.reach
            wanted[i] = block(s.gamma, reached, drafting_s[whose[i]], step_s, probed=s.probed)
        return wanted

    def taken_at_its_word(self, sequence: Sequence) -> bool:
        """Whether its policy verifies without weighing what that is worth."""
        return self._policy(sequence).kind not in JOINT


JOINT = (PolicyKind.EARLY_STOP, PolicyKind.TOP_K)


def _at_its_word(policy: Policy, sequence: Sequence) -> int:
    """Draft tokens that a policy wants which does not weigh what they are worth."""
    if policy.kind is PolicyKind.FIXED:
        return policy.length
    return sequence.gamma if policy.kind is PolicyKind.THRESHOLD else 0


def _is_joint(policy: Policy) -> bool:
    return policy.kind in JOINT


def _oldest_bound(items: list[Item]) -> int | None:
    """Number of the oldest draft in hand that the barrier is there for."""
    bound = [
        item.sequence.draft.number
        for item in items
        if item.sequence.draft is not None and not free_to_look_ahead(item)
    ]
    return min(bound, default=None)


def _caps(group: list[Item], directions: Directions | None) -> list[int] | None:
    if directions is None or not directions.caps:
        return None
    return [directions.caps.get(item.sequence.state.request.tenant, MAX_GAMMA) for item in group]


def _weights(group: list[Item], directions: Directions | None) -> list[float] | None:
    """What a token of each request counts; None where all count the same."""
    by_tenant = directions.weights if directions is not None else {}
    weights = []
    for item in group:
        request = item.sequence.state.request
        level = max(-PRIORITY_LEVELS, min(request.priority, PRIORITY_LEVELS))
        weights.append(by_tenant.get(request.tenant, 1.0) * PRIORITY_WEIGHT**level)
    return weights if len(set(weights)) > 1 else None


def _admissible(item: Item) -> NDArray[np.float64]:
    draft = item.sequence.draft
    if draft is None:
        return np.empty(0)
    return draft.survival[: item.draft_cap]
