"""The joint problem of one interval: what is asked, what bounds it, and the choices of K in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dspark.scheduler.joint.demand import Demand
from dspark.scheduler.joint.floors import Floored, reached, with_floors
from dspark.scheduler.joint.outlook import Cluster, Outlook
from dspark.scheduler.joint.pools import (
    LEVELS,
    PLANNED,
    Levels,
    Links,
    Split,
    central,
    equal_parts,
    first_come,
    unbounded,
)
from dspark.scheduler.joint.steps import FloatArray, admitted

# Rounds of weights in one plan. Beyond so many verifiers with a floor missed, one round a plan is
# made, going on from the last.
FLOOR_ROUNDS = 8
FLOOR_VERIFIERS = 128
# In a larger cluster one verifier's step of an envelope is not looked after.
FEW_VERIFIERS = 256

LocalSplit = Callable[[Links, Levels, FloatArray, int], Split]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """whole: what could be drafted. demand: without the drafts that do not pay. first: the choice
    if all are drafted. asked: [V] draft tokens a second for those that pay. floor: [C] tokens a
    second of a request, 0 for none. weight: [C] to start from where a floor is missed."""

    whole: Demand
    demand: Demand
    first: Floored
    asked: FloatArray
    links: Links
    floor: FloatArray
    weight: FloatArray
    smallest_gain: float

    @classmethod
    def of_outlook(cls, outlook: Outlook, cluster: Cluster, smallest_gain: float) -> Problem:
        whole = Demand.of_cluster(outlook, cluster)
        if not whole.known:
            whole = replace(whole, drafted=np.zeros(len(outlook.of)))
        floor = np.divide(
            outlook.floor_tps,
            outlook.active,
            out=np.zeros(len(outlook.of)),
            where=outlook.active > 0,
        )
        ones = np.ones(len(whole.R))
        first = _chosen(whole, ones, floor, smallest_gain)
        demand = replace(whole, drafted=_paying(whole, first, smallest_gain))
        asked = whole.gamma * whole.R * demand.asking / first.round_s
        links = Links.of_cluster(cluster, outlook, demand)
        weight = 1.0 + outlook.weight
        return cls(whole, demand, first, asked, links, floor, weight, smallest_gain)

    def choose(self, f: FloatArray) -> Floored:
        """The best K of each verifier, floors aside, where f [V] of its requests can be drafted."""
        asking = self.demand.asking
        if (f == 1).all() and (np.abs(asking - np.round(asking)) < 1e-9).all():
            return self.first  # of some everything is drafted, of the others it does not pay
        return _chosen(self.demand, f, self.floor, self.smallest_gain)

    def with_floors(self, f: FloatArray, choice: Floored) -> Floored:
        """`choice`, but with weights and another K where a floor is missed."""
        missed = np.flatnonzero(choice.reached < 1)
        if len(missed) == 0:
            return choice
        rounds = FLOOR_ROUNDS if len(missed) <= FLOOR_VERIFIERS else 1
        cells = self.demand.cells(missed)
        here = self.demand.rows(missed)
        found = with_floors(here, self.floor[cells], f[missed], self.weight[cells], rounds)
        nearer = np.minimum(found.reached, 1.0) > choice.reached[missed]
        at, of_cells = missed[nearer], nearer[here.of]
        result = replace(choice, **{n: getattr(choice, n).copy() for n in Floored.__slots__})
        for name in ("weights", "gain"):
            getattr(result, name)[cells[of_cells]] = getattr(found, name)[of_cells]
        for name in ("K", "theta", "round_s", "reached"):
            getattr(result, name)[at] = getattr(found, name)[nearer]
        return result

    def split_centrally(self) -> tuple[Split, Floored]:
        """And the choice that goes with it, floors aside."""
        V, asked = len(self.demand.R), self.asked[self.links.at]
        weighed = self._weighed()
        if weighed is None:
            split = unbounded(self.links, V)
            return split, self.choose(split.f)
        links, levels, needed = weighed
        here = self.demand.rows(links.at)
        split = central(links, levels, here, asked, needed, V)
        choice = self.choose(split.f)
        if needed.any() or V > FEW_VERIFIERS:
            return split, choice
        # Levels are few and stairs are steep: nobody planning may, rarely, hit on a better split of
        # what everybody may have. What is kept free stays so then, or others would use it up.
        found = [(split, choice)]
        for local in (first_come, equal_parts):
            other = local(links, levels, asked, V)
            found.append((other, self.choose(other.f)))
        return max(found, key=lambda one: float(one[1].theta.sum()))

    def split_locally(self, local: LocalSplit) -> tuple[Split, Floored]:
        """Of the same part of the drafters: the model knows nothing of who waits for whom."""
        V, weighed = len(self.demand.R), self._weighed()
        if weighed is None:
            split = unbounded(self.links, V)
        else:
            links, levels, _ = weighed
            split = local(links, levels, self.asked[links.at], V)
        return split, self.choose(split.f)

    def _weighed(self) -> tuple[Links, Levels, FloatArray] | None:
        """The links with what is kept free, levels, and what floors need [n]; None where nobody has
        to go without. Where a floor needs drafts nothing is kept free."""
        links, asked = self.links, self.asked[self.links.at]
        if not self.demand.known or not (links.load(asked) > PLANNED * links.capacity).any():
            return None
        here = self.demand.rows(links.at)
        levels = Levels.of_demand(here)
        needed = self._needed(here, levels)
        if not needed.any():
            links = links.keeping_free(levels, asked, here.exposed_s * here.asking)
        return (links, levels, needed) if links.full(asked) else None

    def _needed(self, here: Demand, levels: Levels) -> FloatArray:
        """[n] draft tokens a second with which the links' verifiers reach their floors, or come
        nearest to them."""
        at, demand = self.links.at, self.demand
        plain = reached(demand, self.floor, np.zeros(len(demand.of)), demand.steps.plain_s)[at]
        missed = np.flatnonzero(plain < 1)
        needed = np.zeros(len(at))
        if len(missed) > FLOOR_VERIFIERS:
            needed[missed] = levels.cost[missed].max(axis=1)
            return needed
        nearest = plain[missed]
        for i, f in enumerate(LEVELS, 1):
            left = nearest < 1
            if not left.any():
                break
            rows = missed[left]
            cells = here.cells(rows)
            of_all = demand.cells(at)[cells]
            found = with_floors(
                here.rows(rows),
                self.floor[of_all],
                np.full(len(rows), f),
                self.weight[of_all],
                FLOOR_ROUNDS,
            )
            better = found.reached > nearest[left]
            nearest[left] = np.maximum(found.reached, nearest[left])
            needed[rows[better]] = levels.cost[rows[better], i]
        return needed


def _chosen(demand: Demand, f: FloatArray, floor: FloatArray, smallest_gain: float) -> Floored:
    asking = demand.asking
    count = demand.count(demand.mix)
    best = demand.best(count, f, asking)
    pays = best.theta > demand.plain * (1.0 + smallest_gain * f * asking)
    K = np.where(pays, best.K, 0.0)
    gain = demand.gains(admitted(count * f[:, None], K)) * f[demand.of] * demand.drafted
    round_s = np.where(pays, best.seconds + demand.exposed_s * f * asking, demand.steps.plain_s)
    return Floored(
        weights=np.ones(len(demand.of)),
        K=K,
        theta=np.where(pays, best.theta, demand.plain),
        round_s=round_s,
        reached=reached(demand, floor, gain, round_s),
        gain=gain,
    )


def _paying(whole: Demand, first: Floored, smallest_gain: float) -> FloatArray:
    """[C] 1, or 0 for tenants, or all of a verifier, whose drafts bring too little where all are
    drafted. Where a floor is missed nothing is left out."""
    drafted = (first.gain > smallest_gain) | (first.reached < 1)[whole.of]
    return drafted * whole.drafted
