"""A verifier in the cluster: its reports go up, and the scheduler's plans come down."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from dspark.core.errors import DsparkError
from dspark.core.plans import Plan
from dspark.core.replicas import Member
from dspark.core.reports import Report
from dspark.scheduler import StepCost
from dspark.scheduler.central import Registration
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.membership import Membership
from dspark.verifier.engine import Engine
from dspark.verifier.runner import EngineRunner
from dspark.verifier.tally import Reporter

log = logging.getLogger(__name__)

# Seconds without a plan after which another scheduler replica is asked: this one may be behind a
# network that swallows everything.
SILENT_S = 5.0

T = TypeVar("T")


def enrol(
    scheduler: SchedulingClient,
    runner: EngineRunner,
    member: Member,
    step_cost: StepCost | None,
    *,
    on_life: Callable[[int], None] = lambda epoch: None,
    silent_s: float = SILENT_S,
    **rest: Any,
) -> Membership:
    """The membership of a verifier, to be entered. on_life: told each epoch, for
    `VerificationServicer.begin_life`. silent_s: see SILENT_S. rest: Membership's callbacks and
    clock."""
    name = member.replica.replica_id

    async def alive(told: Registration) -> None:
        on_life(told.epoch)
        await runner.between_steps(lambda engine: engine.guidance.registered(name, told.epoch))
        reporter = Reporter(name, told.epoch)
        while True:
            reports = _reports(runner, reporter, told.plan_interval_s)
            try:
                async with (
                    aclosing(scheduler.follow(reports)) as stream,
                    aclosing(newest(stream)) as plans,
                ):
                    while True:
                        async with asyncio.timeout(silent_s):
                            plan = await anext(plans)
                        if await runner.between_steps(_taking(plan)):
                            reporter.heard(plan.seen_through)
            except TimeoutError:
                scheduler.turn_away()
            except DsparkError as error:  # the heartbeats say so, once
                log.debug("the stream of plans is lost: %s", error)
            await asyncio.sleep(told.heartbeat_s * random.uniform(0.5, 1.0))

    return Membership(scheduler, member, step_cost, alive=alive, **rest)


async def _reports(
    runner: EngineRunner, reporter: Reporter, interval_s: float
) -> AsyncIterator[Report]:
    """At most one each plan interval."""
    while True:
        report = reporter.report(*await runner.between_steps(Engine.take_tally))
        if report is not None:
            yield report
        await asyncio.sleep(interval_s)


async def newest(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Whenever one is asked for, the newest of those that have come; older ones are dropped. Ends
    as `items` does.

    An engine takes a plan between two steps, the one that it was handed during the last. Where a
    step takes longer than plans are apart, those that wait would be more with each step, and the
    one that is followed ever older; so it is a step old at most.
    """
    held: list[T] = []
    came = asyncio.Event()

    async def read() -> None:
        async for item in items:
            held[:] = [item]
            came.set()

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: came.set())
    try:
        while held or not reading.done():
            if held:
                yield held.pop()
            else:
                came.clear()
                await came.wait()
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _taking(plan: Plan) -> Callable[[Engine], bool]:
    return lambda engine: engine.guidance.take(plan)
