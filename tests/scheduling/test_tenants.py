"""Tenants' shares through the whole path: reports up, shares down, admission in the verifiers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from dspark.core.requests import Committed
from dspark.scheduler import StepCost
from dspark.scheduler.store import Store

from ..verifier.toy import ScriptedDrafter, ToyBackend, greedy, oracle, request, toy_engine
from .cluster import RULE, Enrolled, V, enrolled, scheduling, until

SHARES = {"large": 3.0, "small": 1.0}
FAST_S, SLOW_S = 0.004, 0.008


class Timed(ToyBackend):
    """A target whose steps take so long, whatever is in them."""

    def __init__(self, seconds: float) -> None:
        super().__init__(RULE, V)
        self._seconds = seconds

    def forward(self, batch: Any) -> Any:
        time.sleep(self._seconds)
        return super().forward(batch)


@dataclass
class Saturated:
    """Tokens by tenant, of two verifiers that are asked for more than they can make."""

    fast: Enrolled
    slow: Enrolled
    served: Counter[str] = field(default_factory=Counter)

    async def ratio(self, tokens: int) -> float:
        """Large to small, of so many tokens from now on."""
        self.served.clear()
        await until(lambda: self.served.total() > tokens)
        return self.served["large"] / self.served["small"]

    async def user(self, of: Enrolled, tenant: str, name: int) -> None:
        for number in count():
            asked = request(f"{tenant}{name}-{number}", [name], greedy(12), tenant=tenant)
            async for event in of.runner.run(asked):
                if isinstance(event, Committed):
                    self.served[tenant] += len(event.ids)


@asynccontextmanager
async def saturated(store: Store, *at_fast: str) -> AsyncIterator[Saturated]:
    """at_fast: tenants that ask the fast verifier; all ask the slow one."""

    def verifier(name: str, address: str, seconds: float) -> Any:
        drafter = ScriptedDrafter(oracle(RULE, wrong_every=4))
        engine = toy_engine(
            Timed(seconds), drafter, clock=time.monotonic, verify="top-k", max_sequences=6
        )
        cost = StepCost.from_table({1: seconds, 256: 1.01 * seconds})
        return enrolled(engine, address, name=name, cost=cost)

    async with (
        scheduling(store, shares=SHARES) as replica,
        verifier("fast", replica.address, FAST_S) as fast,
        verifier("slow", replica.address, SLOW_S) as slow,
    ):
        of = Saturated(fast, slow)
        users = [
            asyncio.create_task(of.user(where, tenant, name))
            for where, tenants in ((fast, at_fast), (slow, SHARES))
            for tenant in tenants
            for name in range(24)
        ]
        try:
            await until(lambda: len(slow.guidance.shares) == 2)
            await until(lambda: fast.engine.figures.steps > 100)
            yield of
        finally:
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)


async def test_tenants_get_three_to_one_of_the_tokens_of_unequal_verifiers(store: Store) -> None:
    """By themselves the verifiers would give each the same."""
    async with saturated(store, *SHARES) as of:
        assert await of.ratio(10_000) == pytest.approx(3.0, rel=0.1)
        fast, slow = (v.engine.figures.steps for v in (of.fast, of.slow))
        assert fast > 1.3 * slow  # else they are not unequal


async def test_shares_are_across_verifiers(store: Store) -> None:
    """The small tenant is at the slow verifier only, a third of all: it gets most of that. A slow
    verifier that kept 3:1 by itself would give it a twelfth of all tokens, 11:1."""
    async with saturated(store, "large") as of:
        await until(lambda: of.slow.guidance.shares.get("small", 0.0) > 0.5)
        assert await of.ratio(3_000) < 4.0
