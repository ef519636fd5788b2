"""The plan of the whole cluster, each interval: maximise Σ_v Θ_v over capacities K_v, caps and
draft budgets, within drafter capacity, tenants' shares and floors across verifiers (§3.2.2, §5.2).

Pure. Θ_v is what a mean step commits a second if its K best drafts are verified, searched in full:
all survivals here are of drafts that are over (the barrier is `Plan.seen_through`'s). For a given
K the live rank is the best choice, so a cap is only ever 0: drafts that would not be verified are
not asked for, and their drafter is free for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dspark.core.plans import Directions
from dspark.scheduler.joint.contest import Contested, award_shares, configured, contenders, settled
from dspark.scheduler.joint.floors import Floored
from dspark.scheduler.joint.outlook import Cluster, Outlook, observed
from dspark.scheduler.joint.pools import Split, equal_parts, first_come
from dspark.scheduler.joint.problem import Problem
from dspark.scheduler.joint.steps import FloatArray

# Drafts that promise less than this part of Θ, or of a request's tokens, are not asked for: a step
# cost is known to a few percent only (the verifiers' own planner holds the same).
SMALLEST_GAIN = 0.05
# A floor's weight fades where the rate is so far above the floor.
AMPLE = 1.2


@dataclass(frozen=True, slots=True)
class VerifierPlan:
    """What becomes one `Plan`. throughput: Θ expected, tokens a second. drafted: the part of its
    requests that its budgets are enough for. floors: the least rate / floor of a tenant here, ∞
    without floors."""

    epoch: int
    seen_through: int
    directions: Directions
    draft_budgets: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    throughput: float = 0.0
    drafted: float = 1.0
    floors: float = math.inf


@dataclass(frozen=True, slots=True)
class JointPlan:
    """objective: Σ_v Θ_v, tokens a second. full: drafters asked for more than all may have.
    floors: the part of every floor that is reached, at most 1; below, they cannot all be."""

    verifiers: Mapping[str, VerifierPlan]
    objective: float = 0.0
    full: tuple[str, ...] = ()
    floors: float = 1.0


@dataclass(frozen=True, slots=True)
class Objective:
    """Σ_v Θ_v in tokens a second: of the requests that run now, and once admission has made the mix
    of tenants what the shares say, as far as their requests fill it. tokens: what of that each
    tenant gets that wants more than it does; none if settled is now."""

    now: float
    settled: float
    tokens: Mapping[str, float] = field(default_factory=dict)


def plan_jointly(
    cluster: Cluster, before: Outlook, smallest_gain: float = SMALLEST_GAIN
) -> tuple[JointPlan, Outlook]:
    """Take the cluster's new reports in, and plan. The outlook returned is the next call's."""
    outlook = observed(before, cluster)
    if not cluster.verifiers:
        return JointPlan({}), outlook
    problem = Problem.of_outlook(outlook, cluster, smallest_gain)
    split, choice = problem.split_centrally()
    chosen = problem.with_floors(split.f, choice)
    award, outlook = award_shares(cluster, outlook, problem, split.f, chosen.theta)
    fading = np.where(chosen.reached > AMPLE, 0.9, 1.0)[outlook.of]
    granted = split.granted(problem.links, problem.asked[problem.links.at])
    outlook = replace(
        outlook,
        weight=(chosen.weights - 1.0) * fading,
        granted={outlook.verifiers[v]: parts for v, parts in granted.items()},
    )
    plan = JointPlan(
        verifiers=_written(outlook, problem, split, chosen, award.shares),
        objective=float(chosen.theta.sum()),
        full=tuple(problem.links.names[d] for d in split.full),
        floors=min(float(chosen.reached.min()), award.floors, 1.0),
    )
    return plan, outlook


def objective(
    cluster: Cluster, outlook: Outlook, plan: JointPlan, smallest_gain: float = SMALLEST_GAIN
) -> Objective:
    """Of a plan and the outlook that came with it, with the drafters split as it says also when
    settled. Where a verifier is told no shares it keeps the tenants' by itself."""
    problem = Problem.of_outlook(outlook, cluster, smallest_gain)
    plans = [plan.verifiers[name] for name in outlook.verifiers]
    shares = configured(cluster, outlook)[outlook.tenant]
    for c, (v, i) in enumerate(zip(outlook.of.tolist(), outlook.tenant.tolist(), strict=True)):
        if plans[v].shares:
            shares[c] = plans[v].shares.get(outlook.tenants[i], 0.0)
    f = np.array([own.drafted for own in plans])
    theta = np.array([own.throughput for own in plans])
    return _objective(outlook, problem, f, theta, shares)


def local_objective(
    cluster: Cluster,
    outlook: Outlook,
    smallest_gain: float = SMALLEST_GAIN,
    *,
    equally: bool = False,
) -> Objective:
    """What the same verifiers reach if each plans by itself, by the same library: a drafter that
    runs full serves everybody the same part of what they ask (`equally`: an equal part), and every
    verifier keeps tenants' shares on its own."""
    problem = Problem.of_outlook(outlook, cluster, smallest_gain)
    split, choice = problem.split_locally(equal_parts if equally else first_come)
    theta = problem.with_floors(split.f, choice).theta
    shares = configured(cluster, outlook)[outlook.tenant]
    return _objective(outlook, problem, split.f, theta, shares)


def _objective(
    outlook: Outlook, problem: Problem, f: FloatArray, theta: FloatArray, shares: FloatArray
) -> Objective:
    now = float(theta.sum())
    if not contenders(outlook, problem.whole):
        return Objective(now, now)
    contested = Contested.of_outlook(outlook, problem.whole, outlook.alone)
    x = shares[contested.cells]
    x = x / np.add.reduceat(x, contested.contest.starts)[contested.contest.of]
    then = settled(problem, f, contested, x)
    names = [outlook.tenants[i] for i in contested.tenants]
    return Objective(
        now=now,
        settled=now + float((then.theta - theta[contested.at]).sum()),
        tokens=dict(zip(names, then.tokens.tolist(), strict=True)),
    )


def _written(
    outlook: Outlook, problem: Problem, split: Split, chosen: Floored, shares: FloatArray
) -> dict[str, VerifierPlan]:
    drafted, weights = problem.demand.drafted.tolist(), chosen.weights.tolist()
    K, theta, floors = chosen.K.tolist(), chosen.theta.tolist(), chosen.reached.tolist()
    R, f, share = problem.demand.R.tolist(), split.f.tolist(), shares.tolist()
    budgets = split.budgets(problem.links)
    plans = {}
    for v, (name, row) in enumerate(outlook.rows.items()):
        known = problem.demand.known and R[v] > 0
        capacity = round(K[v]) if known else None
        directions = Directions(
            requests=R[v],
            capacity=capacity,
            caps={t: 0 for t, c in row.items() if not drafted[c]} if capacity else {},
            weights={t: weights[c] for t, c in row.items() if weights[c] != 1.0},
        )
        plans[name] = VerifierPlan(
            epoch=outlook.epoch[v],
            seen_through=outlook.seen_through[v],
            directions=directions,
            draft_budgets=budgets.get(v, {}),
            shares={t: share[c] for t, c in row.items() if share[c] > 0},
            throughput=theta[v],
            drafted=f[v],
            floors=floors[v],
        )
    return plans
