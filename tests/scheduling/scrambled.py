"""A stream of plans as the worst network and the worst scheduler would have it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import replace

from dspark.core.plans import Directions, Plan
from dspark.core.reports import Report
from dspark.scheduling.client import SchedulingClient


class Scrambled(SchedulingClient):
    """Gives each plan late, some twice, many out of order, and among them what nobody planned: of
    fenced and coming epochs, of another verifier, of an older version with other numbers."""

    async def follow(self, reports: AsyncIterator[Report]) -> AsyncGenerator[Plan, None]:
        rng = random.Random(5)
        held: list[Plan] = []
        async with aclosing(super().follow(reports)) as plans:
            async for plan in plans:
                held.append(plan)
                if len(held) < 6:
                    continue
                out = [p for p in held[-3:] for _ in range(rng.choice((1, 1, 2)))]
                out += [rng.choice(held) for _ in range(4)]
                out += forged(plan, rng)
                rng.shuffle(out)
                held = held[-20:]
                for one in out:
                    yield one
                    await asyncio.sleep(0)


def forged(plan: Plan, rng: random.Random) -> Iterable[Plan]:
    wild = Directions(requests=1.0, capacity=rng.choice((0, 50)))
    return (
        replace(plan, epoch=plan.epoch - 1, version=plan.version + 10**6, _directions=wild),
        replace(plan, epoch=plan.epoch + 1, version=plan.version + 10**6, _directions=wild),
        replace(plan, verifier="another", version=plan.version + 10**6, _directions=wild),
        replace(plan, version=plan.version - 10**6, _directions=wild),
    )
