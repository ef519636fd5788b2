"""What the verifiers could do with drafts: their mean step, and the supply of survivals (§5.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dspark.core.reports import SURVIVAL_BINS
from dspark.scheduler.joint.outlook import Cluster, Outlook
from dspark.scheduler.joint.steps import (
    Best,
    FloatArray,
    IntArray,
    Steps,
    best_capacity,
    mean_steps,
    summed,
)

# Survival of a bin's tokens, highest first: the middle of the bin.
SURVIVAL: FloatArray = (np.arange(SURVIVAL_BINS)[::-1] + 0.5) / SURVIVAL_BINS

# A cell's histogram is read as if so many tokens more had been seen, spread as its tenant's are in
# the whole cluster (and the tenant's as everybody's): a few drafts are not a distribution.
PRIOR_TOKENS = 32.0


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """How a draft token of each cell survives: a distribution over SURVIVAL, from the cell's counts
    [C, 64] and, as far as these are few, from its tenant's in the whole cluster [I, 64].

    own, shared: [C] what each counts. Counts have the lowest bin first, as reported. They are mixed
    only where asked, as a cluster has many cells.
    """

    counts: FloatArray
    own: FloatArray
    tenants: FloatArray
    shared: FloatArray
    tenant: IntArray
    known: bool

    @classmethod
    def of_outlook(cls, outlook: Outlook) -> Shapes:
        """known: whether one draft was seen anywhere."""
        counts = outlook.survivals
        order = np.argsort(outlook.tenant, kind="stable")
        first = np.searchsorted(outlook.tenant[order], np.arange(len(outlook.tenants)))
        tenants = np.add.reduceat(counts[order], first)
        everybody = tenants.sum(axis=0)
        seen = float(everybody.sum())
        everybody = everybody / seen if seen > 0 else np.full(SURVIVAL_BINS, 1 / SURVIVAL_BINS)
        tenants = tenants + PRIOR_TOKENS * everybody
        tenants /= tenants.sum(axis=1, keepdims=True)
        own = 1.0 / (counts.sum(axis=1) + PRIOR_TOKENS)
        return cls(counts, own, tenants, PRIOR_TOKENS * own, outlook.tenant, seen > 0)

    def of_cells(self, at: IntArray) -> FloatArray:
        """[n, 64] shares of a draft token by SURVIVAL."""
        own = self.counts[at] * self.own[at, None]
        shape: FloatArray = own + self.tenants[self.tenant[at]] * self.shared[at, None]
        return shape[:, ::-1]

    def mixed(self, weight: FloatArray, of: IntArray, starts: IntArray) -> FloatArray:
        """[V, 64] Σ over a verifier's cells of weight [C] · shape."""
        V, I = len(starts), len(self.tenants)
        own = np.add.reduceat(self.counts * (weight * self.own)[:, None], starts)
        shared = summed(of * I + self.tenant, weight * self.shared, V * I).reshape(V, I)
        total: FloatArray = own + shared @ self.tenants
        return total[:, ::-1]

    def mean(self, worth: FloatArray, of: IntArray) -> FloatArray:
        """[C] mean of worth [V, 64] (by SURVIVAL, of a cell's verifier) over a cell's tokens."""
        worth = worth[:, ::-1]
        own = np.einsum("cb,cb->c", self.counts, worth[of])
        shared = (worth @ self.tenants.T)[of, self.tenant]
        mean: FloatArray = own * self.own + shared * self.shared
        return mean

    def rows(self, at: IntArray) -> Shapes:
        return replace(
            self,
            counts=self.counts[at],
            own=self.own[at],
            shared=self.shared[at],
            tenant=self.tenant[at],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """R: [V] requests of a step, 0 where nothing runs. gamma, exposed_s: [V]. mix: [C] share of a
    verifier's requests. drafted: [C] 1, or 0 for a cell whose drafts are not to be asked for. of,
    starts, steps: Outlook's and `mean_steps`'s."""

    R: FloatArray
    gamma: FloatArray
    exposed_s: FloatArray
    mix: FloatArray
    shapes: Shapes
    drafted: FloatArray
    of: IntArray
    starts: IntArray
    steps: Steps

    @classmethod
    def of_cluster(cls, outlook: Outlook, cluster: Cluster) -> Demand:
        """A mean step of less than one request is planned as one of one request."""
        assert outlook.tables is not None
        running = np.add.reduceat(outlook.active, outlook.starts)
        busy = (running > 0) & (outlook.requests > 0)
        R = np.where(busy, np.maximum(outlook.requests, 1.0), 0.0)
        gamma = np.array([view.gamma for view in cluster.verifiers.values()], np.float64)
        return cls(
            R=R,
            gamma=gamma,
            exposed_s=outlook.exposed_s,
            mix=outlook.active / np.maximum(running, 1.0)[outlook.of],
            shapes=Shapes.of_outlook(outlook),
            drafted=np.ones(len(outlook.of)),
            of=outlook.of,
            starts=outlook.starts,
            steps=mean_steps(
                outlook.tables, outlook.prefill, R, outlook.context, np.ceil(R * gamma - 1e-6)
            ),
        )

    def each(self, values: FloatArray) -> FloatArray:
        """Sum over each verifier's cells: [C, …] to [V, …]."""
        total: FloatArray = np.add.reduceat(values, self.starts)
        return total

    @property
    def known(self) -> bool:
        """Whether anything is known of drafts at all."""
        return self.shapes.known

    @property
    def asking(self) -> FloatArray:
        """[V] share of a verifier's requests whose drafts are to be asked for."""
        return self.each(self.mix * self.drafted)

    @property
    def plain(self) -> FloatArray:
        """[V] Θ of plain decoding, tokens a second."""
        return self.R / self.steps.plain_decode_s

    def count(self, mix: FloatArray) -> FloatArray:
        """[V, 64] draft tokens of a step by SURVIVAL if all requests to be asked for are drafted
        and the requests are mixed so."""
        per_request = self.shapes.mixed(mix * self.drafted, self.of, self.starts)
        return (self.R * self.gamma)[:, None] * per_request

    def best(self, count: FloatArray, f: FloatArray, asking: FloatArray) -> Best:
        """The best K where a share f [V] of them is drafted."""
        overhead = self.exposed_s * f * asking
        return best_capacity(self.steps, count * f[:, None], SURVIVAL, self.R, overhead)

    def gains(self, share: FloatArray) -> FloatArray:
        """[C] draft tokens that a whole draft of the cell is expected to bring, where of each bin
        the share [V, 64] is verified."""
        gain: FloatArray = self.gamma[self.of] * self.shapes.mean(share * SURVIVAL, self.of)
        return gain

    def rows(self, at: IntArray) -> Demand:
        """Some verifiers only, in the order given, with their cells."""
        cells = self.cells(at)
        size = np.diff(np.append(self.starts, len(self.of)))[at]
        return replace(
            self,
            R=self.R[at],
            gamma=self.gamma[at],
            exposed_s=self.exposed_s[at],
            mix=self.mix[cells],
            shapes=self.shapes.rows(cells),
            drafted=self.drafted[cells],
            of=np.repeat(np.arange(len(at)), size),
            starts=np.cumsum(size) - size,
            steps=self.steps.rows(at),
        )

    def one_tenant(self, cells: IntArray) -> Demand:
        """The verifier of each of these cells as if it had only this tenant."""
        at = self.of[cells]
        each = np.arange(len(cells))
        return replace(
            self,
            R=self.R[at],
            gamma=self.gamma[at],
            exposed_s=self.exposed_s[at],
            mix=np.ones(len(cells)),
            shapes=self.shapes.rows(cells),
            drafted=np.ones(len(cells)),
            of=each,
            starts=each,
            steps=self.steps.rows(at),
        )

    def cells(self, at: IntArray) -> IntArray:
        """Indices of the cells of verifiers `at`, as `rows` orders them."""
        size = np.diff(np.append(self.starts, len(self.of)))[at]
        first = np.cumsum(size) - size
        inside = np.arange(int(size.sum())) - np.repeat(first, size)
        cells: IntArray = inside + np.repeat(self.starts[at], size)
        return cells
