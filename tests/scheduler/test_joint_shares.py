"""Shares across verifiers: the linear program's answer, and tokens in a closed loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from dspark.core.reports import DrafterUse, Report, TenantReport
from dspark.scheduler import Policy, StepCost, capacity, plan, scaled
from dspark.scheduler.fair_queue import FairQueue
from dspark.scheduler.joint import JointPlan, VerifierPlan, plan_jointly
from dspark.scheduler.joint.outlook import Cluster, Outlook, VerifierView
from dspark.scheduler.joint.shares import (
    MAX_LEAN,
    SOFTNESS,
    Contest,
    leaned,
    mixes,
    own_shares,
    shares_with_floors,
    token_shares,
)
from dspark.scheduler.joint.steps import FloatArray, summed

from .toy_cluster import CHEAP, DEAR, GAMMA, PATIENT, bins, report

TOP_K = Policy.parse("top-k")


def contest(theta: FloatArray, most: FloatArray | None = None) -> Contest:
    """All tenants at all verifiers; theta, most: [V, I]."""
    V, I = theta.shape
    return Contest(
        of=np.repeat(np.arange(V), I),
        starts=np.arange(V) * I,
        tenant=np.tile(np.arange(I), V),
        theta=theta.ravel(),
        most=np.ones(V * I) if most is None else most.ravel(),
        room=np.ones(V),
    )


def tokens(contest: Contest, y: FloatArray) -> FloatArray:
    return summed(contest.tenant, y * contest.theta, int(contest.tenant.max()) + 1)


def optimum(theta: FloatArray, sigma: FloatArray) -> float:
    """Most tokens in these proportions, by linear programming."""
    V, I = theta.shape
    A = np.zeros((I + V, V * I + 1))
    for i in range(I):
        A[i, [v * I + i for v in range(V)]] = theta[:, i]
        A[i, -1] = -sigma[i]
    for v in range(V):
        A[I + v, v * I : (v + 1) * I] = 1.0
    b = np.concatenate((np.zeros(I), np.ones(V)))
    most = [(0, 1)] * (V * I) + [(0, None)]
    return float(-linprog(np.append(np.zeros(V * I), -1.0), A_eq=A, b_eq=b, bounds=most).fun)


@st.composite
def problems(draw: st.DrawFn) -> tuple[FloatArray, FloatArray]:
    """theta [V, I], up to e^±1 apart, and sigma."""
    V, I = draw(st.integers(1, 6)), draw(st.integers(2, 4))
    logs = draw(st.lists(st.floats(-1.0, 1.0), min_size=V * I, max_size=V * I))
    shares = np.array(draw(st.lists(st.floats(1.0, 5.0), min_size=I, max_size=I)))
    return 100 * np.exp(np.array(logs).reshape(V, I)), shares / shares.sum()


@settings(PATIENT, max_examples=60)
@given(problems())
def test_tokens_come_by_shares_and_are_nearly_as_many_as_can_be(
    problem: tuple[FloatArray, FloatArray],
) -> None:
    theta, sigma = problem
    game = contest(theta)
    y, prices = np.zeros(0), np.zeros(len(sigma))
    for _ in range(20):  # plans, each going on from the last
        y, prices = mixes(game, sigma, prices)
    assert np.add.reduceat(y, game.starts) == pytest.approx(np.ones(len(theta)))
    got = tokens(game, y)
    assert got / got.sum() == pytest.approx(sigma, rel=0.1)
    bound = 1 - SOFTNESS[-1] * np.log(1 / sigma.min())
    assert (got / sigma).min() >= optimum(theta, sigma) * bound * 0.95


def test_verifiers_that_are_alike_are_shared_alike() -> None:
    """Also where tenants differ, as long as they do on every verifier in the same way."""
    theta = np.outer([1.0, 2.0, 5.0], [100.0, 300.0])
    game, sigma = contest(theta), np.array([0.75, 0.25])
    y, _ = mixes(game, sigma, np.zeros(2))
    assert token_shares(game, y) == pytest.approx(own_shares(game, sigma), abs=1e-3)


def test_comparative_advantage_is_used() -> None:
    """The second tenant's drafts are worth nothing anywhere, the first's only at the first."""
    theta = np.array([[400.0, 120.0], [100.0, 100.0]])
    game, sigma = contest(theta), np.array([0.25, 0.75])
    y, _ = mixes(game, sigma, np.zeros(2))
    x = token_shares(game, y).reshape(2, 2)
    assert x[1, 1] > 0.99
    assert x[0, 0] > 0.35
    own = 1 / (sigma / theta).sum(axis=1)
    assert tokens(game, y).sum() > 1.08 * own.sum()


def test_nobody_is_given_more_than_it_can_fill() -> None:
    theta = np.array([[400.0, 120.0], [100.0, 100.0]])
    most = np.array([[0.2, 1.0], [1.0, 1.0]])
    y, _ = mixes(contest(theta, most), np.array([0.5, 0.5]), np.zeros(2))
    assert y[0] <= 0.2
    assert y[:2].sum() == pytest.approx(1.0)


def test_floors_raise_a_share_and_shrink_alike_where_they_are_too_much() -> None:
    shares, floors = np.array([3.0, 1.0, 1.0]), np.array([0.0, 0.4, 0.0])
    sigma, part = shares_with_floors(shares, floors)
    assert sigma == pytest.approx([0.45, 0.4, 0.15])
    assert part == 1.0
    sigma, part = shares_with_floors(shares, np.array([0.1, 0.1, 0.1]))
    assert sigma == pytest.approx([0.6, 0.2, 0.2])
    sigma, part = shares_with_floors(shares, np.array([1.0, 0.5, 0.5]))
    assert sigma == pytest.approx([0.5, 0.25, 0.25])
    assert part == 0.5
    sigma, part = shares_with_floors(shares, np.array([0.0, 2.0, 0.0]))
    assert sigma == pytest.approx([0.006, 1.0, 0.002], rel=0.02)


def test_corrections_go_against_what_was_missed_and_are_bounded() -> None:
    sigma = np.array([0.75, 0.25])
    lean = leaned(np.zeros(2), sigma, np.array([50.0, 50.0]), 1.0)
    assert lean[0] > 0 > lean[1]
    assert leaned(np.zeros(2), sigma, np.array([75.0, 25.0]), 1.0) == pytest.approx([0.0, 0.0])
    for _ in range(1000):
        lean = leaned(lean, sigma, np.array([0.0, 100.0]), 1.0)
    assert lean.tolist() == [MAX_LEAN, -MAX_LEAN]
    assert leaned(lean, sigma, np.zeros(2), 1.0) is lean


# --- the closed loop -----------------------------------------------------------------------------

CONFIDENCE = {"easy": 0.95, "hard": 0.004}
SHARES = {"easy": 1.0, "hard": 3.0}
LENGTH = (100, 400)  # tokens of a request, from and to


@dataclass
class Engine:
    """A verifier that always has both tenants waiting: slots, a fair queue, expected verdicts."""

    cost: StepCost
    slots: int
    line: FairQueue[int] = field(default_factory=lambda: FairQueue(SHARES))
    running: list[tuple[str, float]] = field(default_factory=list)  # tenant, tokens left
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    length: dict[int, int] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    number: int = 0

    def admit(self) -> None:
        while len(self.running) < self.slots:
            first = self.line.pop()
            self.running.append((first.tenant, self.length.pop(first.item)))

    def run(self, seconds: float, K: int | None) -> tuple[int, dict[str, float]]:
        """Steps of an interval with a capacity (None: its own), and tokens of each tenant."""
        for name in SHARES:
            while self.line.tokens(name) < 4 * LENGTH[1] * self.slots:
                self.number += 1
                self.length[self.number] = int(self.rng.integers(*LENGTH))
                self.line.push(name, self.length[self.number], self.number)
        now, steps = 0.0, 0
        made = dict.fromkeys(SHARES, 0.0)
        self.admit()
        while now < seconds:
            survivals = [CONFIDENCE[t] ** np.arange(1, GAMMA + 1) for t, _ in self.running]
            R = len(self.running)
            own = capacity(survivals, self.cost, 0, R, 0)
            lengths = plan(
                survivals, self.cost, 0, R, 0, TOP_K, own if K is None else scaled(K, R, R)
            )
            now += self.cost.seconds(0, R, R + int(lengths.sum()), 0)
            steps += 1
            after = []
            for (name, left), a, n in zip(self.running, survivals, lengths, strict=True):
                got = 1.0 + float(a[:n].sum())
                made[name] += got
                if left > got:
                    after.append((name, left - got))
            self.running = after
            self.admit()
        for name, n in made.items():
            self.served[name] += n
        return steps, made

    def report(
        self, name: str, number: int, seconds: float, steps: int, made: Mapping[str, float]
    ) -> Report:
        tenants = []
        for t in SHARES:
            active = sum(owner == t for owner, _ in self.running)
            drafts: dict[float, int] = {}
            for k in range(1, GAMMA + 1):
                a = CONFIDENCE[t] ** k
                drafts[a] = drafts.get(a, 0) + active * steps
            tenants.append(TenantReport(t, active, 100, round(made[t]), 0.0, bins(drafts)))
        return report(
            name, tenants, number, R=float(self.slots), interval_s=seconds, steps=steps,
            drafters=(DrafterUse("d", 1, 0.0),),
        )  # fmt: skip


def loop(costs: Mapping[str, StepCost], central: bool, seconds: float = 100.0) -> dict[str, float]:
    """Tokens of each tenant over the last two thirds."""
    engines = {name: Engine(cost, slots=16) for name, cost in costs.items()}
    outlook, plans = Outlook(), dict[str, VerifierPlan]()
    interval = 0.2
    early: dict[str, float] = {}
    for i in range(int(seconds / interval)):
        views = {}
        for name, engine in engines.items():
            mine = plans.get(name)
            if mine is not None and mine.shares:
                engine.line.set_shares(mine.shares)
            K = None if mine is None else mine.directions.capacity
            steps, made = engine.run(interval, K)
            sent = engine.report(name, i, interval, steps, made)
            views[name] = VerifierView(costs[name], GAMMA, sent)
        if central:
            joint: JointPlan
            joint, outlook = plan_jointly(Cluster(views, {}, SHARES), outlook)
            plans = dict(joint.verifiers)
        if i == int(seconds / interval / 3):
            early = {t: sum(e.served[t] for e in engines.values()) for t in SHARES}
    return {t: sum(e.served[t] for e in engines.values()) - early[t] for t in SHARES}


def test_tokens_settle_at_3_to_1_and_more_of_them_than_each_verifier_alone_makes() -> None:
    """Drafts pay at one verifier, and only the smaller tenant's. Each alone serves both 1 : 3."""
    costs = {"cheap": CHEAP, "dear": DEAR}
    together, alone = loop(costs, central=True), loop(costs, central=False)
    assert alone["hard"] / alone["easy"] == pytest.approx(3.0, rel=0.1)
    assert together["hard"] / together["easy"] == pytest.approx(3.0, rel=0.1)
    assert sum(together.values()) >= 1.1 * sum(alone.values())


def test_verifiers_that_are_alike_settle_at_3_to_1_and_lose_nothing() -> None:
    costs = {"one": CHEAP, "other": CHEAP}
    together, alone = (loop(costs, central, seconds=60.0) for central in (True, False))
    assert together["hard"] / together["easy"] == pytest.approx(3.0, rel=0.1)
    assert sum(together.values()) >= 0.99 * sum(alone.values())
