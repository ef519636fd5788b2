"""Who contests which verifiers, and what the cluster makes once admission has followed shares."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dspark.scheduler.joint.demand import Demand
from dspark.scheduler.joint.outlook import Cluster, Outlook
from dspark.scheduler.joint.problem import Problem
from dspark.scheduler.joint.shares import (
    LEAN_S,
    Contest,
    fitted,
    leaned,
    mixes,
    own_shares,
    paid,
    shares_with_floors,
    token_shares,
)
from dspark.scheduler.joint.steps import FloatArray, IntArray, admitted, summed

# Cells whose θ is worked out anew in one plan, at least; more of them take turns.
FRESH_CELLS = 1024
TURNS = 8
# Verifiers that two ways to share are compared on.
SAMPLE = 256
# Times that a mix is corrected until tokens come as shares say.
_MIXINGS = 4
# Ways between each verifier's own shares (0) and those of the linear program (1). What is less than
# STAY is no difference between them.
OWN = 0.0
BLENDS = (OWN, 0.5, 1.0)
STAY = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class Contested:
    """contest: as `mixes` takes it. at: [n] verifiers in it. cells: [c] its cells in the outlook.
    tenants: [I] the outlook's indices of its tenants."""

    contest: Contest
    at: IntArray
    cells: IntArray
    tenants: IntArray

    @classmethod
    def of_outlook(cls, outlook: Outlook, demand: Demand, theta: FloatArray) -> Contested:
        """theta: [C] `alone`. There must be contenders."""
        cells = _contended(outlook, demand)
        tenants, tenant = np.unique(outlook.tenant[cells], return_inverse=True)
        at, of = np.unique(outlook.of[cells], return_inverse=True)
        starts = np.searchsorted(of, np.arange(len(at)))
        running = demand.each(outlook.active)[at]
        mix = demand.mix[cells]
        room = np.maximum(np.add.reduceat(mix, starts), 1e-9)
        wanted = (outlook.active + outlook.queued)[cells] / running[of]
        contest = Contest(
            of=of,
            starts=starts,
            tenant=tenant,
            theta=theta[cells],
            most=np.minimum(wanted, room[of]),
            room=room,
        )
        return cls(contest, at, cells, tenants)

    def sample(self, most: int) -> tuple[Contested, IntArray]:
        """The same of at most so many verifiers, evenly taken; where its cells were in `cells`."""
        if len(self.at) <= most:
            return self, np.arange(len(self.cells))
        chosen = np.linspace(0, len(self.at) - 1, most).astype(np.intp)
        inside = np.isin(self.contest.of, chosen)
        of = np.searchsorted(chosen, self.contest.of[inside])
        contest = Contest(
            of=of,
            starts=np.searchsorted(of, np.arange(most)),
            tenant=self.contest.tenant[inside],
            theta=self.contest.theta[inside],
            most=self.contest.most[inside],
            room=self.contest.room[chosen],
        )
        sample = Contested(contest, self.at[chosen], self.cells[inside], self.tenants)
        return sample, np.flatnonzero(inside)


def _contended(outlook: Outlook, demand: Demand) -> IntArray:
    """Cells, at verifiers that run, of tenants that have anything waiting anywhere."""
    waiting = summed(outlook.tenant, outlook.queued, len(outlook.tenants)) > 0
    here = waiting[outlook.tenant] & (outlook.active + outlook.queued > 0)
    return np.flatnonzero(here & (demand.R[outlook.of] > 0))


def contenders(outlook: Outlook, demand: Demand) -> bool:
    """Whether two tenants or more want more than they get."""
    return len(np.unique(outlook.tenant[_contended(outlook, demand)])) >= 2


def alone(outlook: Outlook, demand: Demand, f: FloatArray) -> FloatArray:
    """θ [C]: tokens a second of the cell's verifier if all its requests were this tenant's.

    At most FRESH_CELLS or an eighth of all are worked out, in turns; the others are as they were.
    """
    C = len(outlook.of)
    turns = TURNS if C > FRESH_CELLS else 1
    due = (np.arange(C) % turns == outlook.plans % turns) | (outlook.alone <= 0)
    cells = np.flatnonzero(due & (demand.R[outlook.of] > 0))
    theta = outlook.alone.copy()
    if len(cells):
        of = outlook.of[cells]
        each = demand.one_tenant(cells)
        best = each.best(each.count(each.mix), f[of], np.ones(len(cells)))
        theta[cells] = np.maximum(best.theta, each.plain)
    return theta


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """theta: [n] Θ of the contested verifiers. tokens: [I] tokens a second of the contenders."""

    theta: FloatArray
    tokens: FloatArray


def settled(problem: Problem, f: FloatArray, contested: Contested, shares: FloatArray) -> Settled:
    """The contested verifiers once their tokens come by `shares` [c], f: [V] as it is.

    Finds the mix of requests whose tokens are shared so, as requests whose drafts stand bring more.
    A tenant fills no more of it than its requests can; what it leaves is the others', as admission
    waits for nobody (`FairQueue`).
    """
    contest, at = contested.contest, contested.at
    here = problem.whole.rows(at)
    inside = np.searchsorted(problem.whole.cells(at), contested.cells)
    mix = here.mix.copy()
    ones = np.ones(len(at))
    enough = here.plain * (1.0 + problem.smallest_gain * f[at])
    tau = np.ones(len(mix))
    theta = here.plain
    for _ in range(_MIXINGS):
        mix[inside] = fitted(contest, shares / tau[inside])
        count = here.count(mix)
        best = here.best(count, f[at], ones)
        drafting = best.theta > enough
        theta = np.where(drafting, best.theta, here.plain)
        share = admitted(count * f[at][:, None], best.K)
        tau = 1.0 + here.gains(share) * (f[at] * drafting)[here.of]
    rate = mix * tau
    rate *= (theta / here.each(rate))[here.of]
    return Settled(theta, summed(contest.tenant, rate[inside], len(contested.tenants)))


@dataclass(frozen=True, slots=True, eq=False)
class Award:
    """shares: [C] of the tokens that a verifier makes, 0 where nobody contests. floors: the part of
    the contenders' floors that all tokens are enough for, at most 1."""

    shares: FloatArray
    floors: float = 1.0


def configured(cluster: Cluster, outlook: Outlook) -> FloatArray:
    """[I] shares of the outlook's tenants."""
    shares = [cluster.shares.get(name, cluster.default_share) for name in outlook.tenants]
    return np.array(shares, np.float64)


def award_shares(
    cluster: Cluster, outlook: Outlook, problem: Problem, f: FloatArray, theta: FloatArray
) -> tuple[Award, Outlook]:
    """Shares for each verifier, and the outlook with what was learnt. f: [V] part of what could be
    drafted that can be; theta: [V] tokens a second that verifiers make."""
    demand = problem.whole
    if not contenders(outlook, demand):
        fade = math.exp(-outlook.interval_s / LEAN_S)
        lean = {tenant: value * fade for tenant, value in outlook.lean.items()}
        return Award(np.zeros(len(outlook.of))), replace(outlook, lean=lean)
    outlook = replace(outlook, alone=alone(outlook, demand, f))
    contested = Contested.of_outlook(outlook, demand, outlook.alone)
    contest = contested.contest
    names = [outlook.tenants[i] for i in contested.tenants]

    total = float((theta[contested.at] * contest.room).sum())
    floor_tps = summed(outlook.tenant, outlook.floor_tps, len(outlook.tenants))
    served = summed(outlook.tenant, outlook.served, len(outlook.tenants))
    sigma, floors = shares_with_floors(
        configured(cluster, outlook)[contested.tenants],
        floor_tps[contested.tenants] / max(total, 1e-9),
    )
    leaning = leaned(
        np.array([outlook.lean.get(name, 0.0) for name in names]),
        sigma,
        served[contested.tenants],
        outlook.interval_s,
    )
    aim = sigma * np.exp(leaning)
    aim /= aim.sum()

    y, prices = mixes(contest, aim, np.array([outlook.prices.get(name, 0.0) for name in names]))
    own, linear = own_shares(contest, aim), token_shares(contest, y)
    blend = outlook.blend
    if len(contested.at) <= SAMPLE or outlook.plans % TURNS == 0:
        blend = _blend(problem, f, contested, aim, (own, linear), blend)
    x = (1.0 - blend) * own + blend * linear
    learnt = replace(
        outlook,
        lean={**outlook.lean, **dict(zip(names, leaning.tolist(), strict=True))},
        prices=dict(zip(names, prices.tolist(), strict=True)),
        blend=blend,
    )
    return Award(_beside_others(cluster, outlook, demand, contested, x), floors), learnt


def _beside_others(
    cluster: Cluster, outlook: Outlook, demand: Demand, contested: Contested, x: FloatArray
) -> FloatArray:
    """[C] shares: tenants that do not contend keep what they are configured to have, and do not use
    it up; the contenders have theirs, split by x [c]."""
    present = configured(cluster, outlook)[outlook.tenant]
    present = present * (outlook.active + outlook.queued > 0)
    everybody = demand.each(present)
    here = np.zeros(len(demand.R))
    here[contested.at] = 1.0
    shares = present * (here / np.maximum(everybody, 1e-300))[outlook.of]
    contest = contested.contest
    contending = np.add.reduceat(present[contested.cells], contest.starts)
    shares[contested.cells] = x * (contending / everybody[contested.at])[contest.of]
    return shares


def _blend(
    problem: Problem,
    f: FloatArray,
    contested: Contested,
    aim: FloatArray,
    shares: tuple[FloatArray, FloatArray],
    before: float,
) -> float:
    """How far to go from each verifier's own shares to the linear program's. The program takes Θ of
    a mix for a mean of Θ's; here steps are searched with the tenants mixed. aim: [I], Σ = 1.

    The most tokens of the ways that bring tenants the most of what is due to them, which is their
    share of what own shares make; `before` if it is as good. These may make more than the program
    where one tenant cannot fill its own and others have the rest, but over the whole cluster those
    are not the shares any more.
    """
    sample, cells = contested.sample(SAMPLE)
    own, linear = (x[cells] for x in shares)
    made = {
        blend: settled(problem, f, sample, (1.0 - blend) * own + blend * linear) for blend in BLENDS
    }
    anyway = float(made[OWN].tokens.sum())
    due = {blend: paid(way.tokens, aim * anyway) for blend, way in made.items()}
    theta = {blend: float(way.theta.sum()) for blend, way in made.items()}
    fair = [blend for blend in BLENDS if due[blend] >= max(due.values()) * (1.0 - STAY)]
    best = max(fair, key=lambda blend: theta[blend])
    stays = before in fair and theta[before] >= theta[best] * (1.0 - STAY)
    return before if stays else best
