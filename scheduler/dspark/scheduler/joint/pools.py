"""How the drafter pool is split among verifiers: centrally, or as it would be with nobody to plan.

A verifier's requests were each given a drafter when they came, so at each drafter it can use as
much as those requests ask for. What it can do with less: draft only a part f of its requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dspark.scheduler.asking import PROBE_SHARE, probe_rounds
from dspark.scheduler.joint.budgets import share_out
from dspark.scheduler.joint.demand import SURVIVAL, Demand
from dspark.scheduler.joint.outlook import Cluster, Outlook
from dspark.scheduler.joint.pipes import Pipes
from dspark.scheduler.joint.steps import FloatArray, IntArray, level_curves, summed

# Of what a drafter can make, the part that everybody may have. At a full one each waits for the
# others' whole passes; those whose drafts gain most then ask for less than they would, and what
# they leave goes to those that they wait for. The rest is kept free for the one that gains most, as
# far as it waits now: drafts come sooner, it asks for more and is given it
# (docs/decisions, 2026-11-30-full-drafters.md).
PLANNED = 0.75
# Parts of a verifier's requests that a budget is weighed at.
LEVELS: FloatArray = np.arange(1, 9) / 8


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Which verifiers draw on which drafters. names, capacity: [D], ∞ for one that is not measured.
    free: [D] what of it is kept for the arc `first`, −1 without (`keeping_free`); tokens a second.
    at: [n] verifiers that draw on any. of, to, share: [A] arcs, in order of `at`: index into `at`,
    drafter, and share of the verifier's requests there, Σ = 1."""

    names: tuple[str, ...]
    capacity: FloatArray
    free: FloatArray
    first: IntArray
    at: IntArray
    of: IntArray
    to: IntArray
    share: FloatArray

    @classmethod
    def of_cluster(cls, cluster: Cluster, outlook: Outlook, demand: Demand) -> Links:
        number: dict[str, int] = {}
        at: list[int] = []
        of: list[int] = []
        to: list[int] = []
        runs: list[float] = []
        running = (demand.R > 0).tolist()
        for v, (verifier, view) in enumerate(cluster.verifiers.items()):
            drafters = view.drafters or outlook.links[verifier]
            own = [(number.setdefault(name, len(number)), n) for name, n in drafters.items()]
            own = [(d, n) for d, n in own if n > 0]
            if own and running[v]:
                of += [len(at)] * len(own)
                to += [d for d, _ in own]
                runs += [n for _, n in own]
                at.append(v)
        capacity = [cluster.drafters.get(name, 0.0) or np.inf for name in number]
        of_array, n = np.array(of, np.intp), np.array(runs, np.float64)
        total = summed(of_array, n, len(at))
        return cls(
            names=tuple(number),
            capacity=np.array(capacity, np.float64),
            free=np.zeros(len(number)),
            first=np.full(len(number), -1),
            at=np.array(at, np.intp),
            of=of_array,
            to=np.array(to, np.intp),
            share=n / total[of_array],
        )

    def load(self, tokens: FloatArray) -> FloatArray:
        """[D] what drafters are asked for if their verifiers [n] ask for so much."""
        return summed(self.to, self.share * tokens[self.of], len(self.names))

    def keeping_free(self, levels: Levels, asked: FloatArray, exposed_s: FloatArray) -> Links:
        """With a part of each drafter that several draw on kept for the one whose drafts gain most:
        what it would ask for beyond asked [n] if its rounds did not wait for exposed_s [n]."""
        more = levels.value - levels.value[:, :1]
        gain = np.divide(more, levels.cost, out=np.zeros_like(more), where=levels.cost > 0)
        steepest = gain.max(axis=1)[self.of]
        order = np.lexsort((-steepest, self.to))  # by drafter, the most first
        first = order[np.diff(self.to[order], prepend=-1) > 0]
        drawing = np.bincount(self.to, asked[self.of] > 0, len(self.names))
        first = first[(drawing[self.to[first]] > 1) & (steepest[first] > 0)]
        unexposed_s = np.maximum(levels.round_s[:, -1] - exposed_s, 1e-9)
        held_back = (asked * exposed_s / unexposed_s)[self.of] * self.share
        kept = replace(self, free=self.free.copy(), first=self.first.copy())
        at = self.to[first]
        kept.first[at] = first
        kept.free[at] = np.minimum((1.0 - PLANNED) * self.capacity[at], held_back[first])
        return kept

    def full(self, tokens: FloatArray) -> tuple[int, ...]:
        """Drafters that are asked for more than everybody may be given."""
        room = (self.capacity - self.free) * (1 + 1e-9)
        return tuple(np.flatnonzero(self.load(tokens) > room).tolist())

    def pipes(self, most: FloatArray) -> Pipes:
        """most: [n] draft tokens a second that the verifiers could use."""
        room = self.capacity - self.free
        return Pipes(room, len(self.at), self.of, self.to, self.share * most[self.of])


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """What verifiers [n] have of drafting a part of their requests, level 0 (none) first: cost in
    draft tokens a second, value in tokens a second, round_s; all [n, L + 1]. whole: [n] draft
    tokens of a round that drafts all."""

    cost: FloatArray
    value: FloatArray
    round_s: FloatArray
    whole: FloatArray

    @classmethod
    def of_demand(cls, demand: Demand) -> Levels:
        asking = demand.asking
        # Bins two by two: a level is weighed, not planned.
        count = demand.count(demand.mix)
        pairs = (len(count), -1, 2)
        worth, tokens = (count * SURVIVAL).reshape(pairs).sum(2), count.reshape(pairs).sum(2)
        theta, seconds = level_curves(
            demand.steps,
            tokens,
            np.divide(worth, tokens, out=np.zeros_like(worth), where=tokens > 0),
            demand.R,
            demand.exposed_s * asking,
            LEVELS,
        )
        whole = demand.gamma * demand.R * asking
        round_s = seconds + (demand.exposed_s * asking)[:, None] * LEVELS
        none = np.zeros((len(whole), 1))
        return cls(
            cost=np.concatenate((none, whole[:, None] * LEVELS / round_s), axis=1),
            value=np.concatenate((demand.plain[:, None], theta), axis=1),
            round_s=np.concatenate((demand.steps.plain_s[:, None], round_s), axis=1),
            whole=whole,
        )

    def affordable(self, tokens: FloatArray) -> FloatArray:
        """f [n] of the requests that so many draft tokens a second [n] are enough for. Between two
        levels rounds are taken to be as short as at the lower, which asks for most."""
        within = self.cost <= tokens[:, None] * (1 + 1e-9)
        last = within.shape[1] - 1 - within[:, ::-1].argmax(axis=1)
        round_s = np.take_along_axis(self.round_s, last[:, None], axis=1)[:, 0]
        drafts = tokens * round_s
        f = np.divide(drafts, self.whole, out=np.ones_like(drafts), where=self.whole > 0)
        return np.clip(f, 0.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """f: [V] part of each verifier's requests that can be drafted. given: [A] draft tokens a second
    by arc of the links. full: drafters that are asked for more than all may have."""

    f: FloatArray
    given: FloatArray
    full: tuple[int, ...] = ()

    def granted(self, links: Links, asked: FloatArray) -> dict[int, dict[str, float]]:
        """As `budgets`, but as a part of what the verifier could use there; asked: [n]."""
        most = links.share * asked[links.of]
        part = np.divide(self.given, most, out=np.ones_like(most), where=most > 0)
        return replace(self, given=np.minimum(part, 1.0)).budgets(links)

    def budgets(self, links: Links) -> dict[int, dict[str, float]]:
        """By verifier, then by drafter that runs full, draft tokens a second."""
        budgets: dict[int, dict[str, float]] = {}
        if self.full:
            arcs = np.isin(links.to, self.full)
            at, to = links.at[links.of[arcs]].tolist(), links.to[arcs].tolist()
            for v, d, tokens in zip(at, to, self.given[arcs].tolist(), strict=True):
                budgets.setdefault(v, {})[links.names[d]] = tokens
        return budgets


def unbounded(links: Links, V: int) -> Split:
    return Split(np.ones(V), np.zeros(len(links.of)))


def central(
    links: Links, levels: Levels, demand: Demand, asked: FloatArray, needed: FloatArray, V: int
) -> Split:
    """By gain. demand: of the links' verifiers. needed: [n] draft tokens a second for floors."""
    probes = _probes(demand)
    pipes = links.pipes(np.maximum(levels.cost.max(axis=1), probes))
    capacity = float(links.capacity.sum())
    tried = probes * min(1.0, PROBE_SHARE * capacity / max(float(probes.sum()), 1e-9))
    share_out(levels.cost, levels.value, pipes, np.maximum(needed, tried))
    for d in np.flatnonzero(links.free > 0).tolist():
        pipes.top_up(int(links.of[links.first[d]]), d, float(links.free[d]))
    given = [part for i in range(len(links.at)) for part in pipes.given(i).values()]
    return _split(links, levels, asked, np.array(given), V)


def first_come(links: Links, levels: Levels, asked: FloatArray, V: int) -> Split:
    """Everybody asks for all; a drafter that runs full serves each the same part."""
    room = links.capacity - links.free
    part = np.minimum(room / np.maximum(links.load(asked), 1e-9), 1.0)
    return _split(links, levels, asked, links.share * asked[links.of] * part[links.to], V)


def equal_parts(links: Links, levels: Levels, asked: FloatArray, V: int) -> Split:
    """Each drafter gives its verifiers equal parts; what one does not need the others share."""
    wants = links.share * asked[links.of]
    given = np.zeros(len(wants))
    for d, room in enumerate((links.capacity - links.free).tolist()):
        arcs = np.flatnonzero(links.to == d)
        arcs = arcs[np.argsort(wants[arcs], kind="stable")]
        for served, arc in enumerate(arcs.tolist()):
            given[arc] = min(wants[arc], room / (len(arcs) - served))
            room -= given[arc]
    return _split(links, levels, asked, given, V)


def _split(links: Links, levels: Levels, asked: FloatArray, given: FloatArray, V: int) -> Split:
    f = np.ones(V)
    f[links.at] = levels.affordable(summed(links.of, given, len(links.at)))
    return Split(f, given, links.full(asked))


def _probes(demand: Demand) -> FloatArray:
    """[n] draft tokens a second with which bypassed requests are tried again, all of a verifier
    together (`asking.askers`)."""
    rounds = [
        max(1 / PROBE_SHARE, probe_rounds(exposed_s, step_s))
        for exposed_s, step_s in zip(
            demand.exposed_s.tolist(), demand.steps.plain_decode_s.tolist(), strict=True
        )
    ]
    probes: FloatArray = demand.gamma * demand.R / demand.steps.plain_s / np.array(rounds)
    return probes
