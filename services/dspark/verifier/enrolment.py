"""A verifier in the cluster: its reports go up, and the scheduler's plans come down."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

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
from dspark.verifier.tally import report_of

log = logging.getLogger(__name__)

# Plan intervals between two reports of an idle engine, which says no more than that it is there.
IDLE_INTERVALS = 10


def enrol(
    scheduler: SchedulingClient,
    runner: EngineRunner,
    member: Member,
    step_cost: StepCost | None,
    **rest: Any,
) -> Membership:
    """The membership of a verifier, to be entered. rest: Membership's callbacks and clock."""
    name = member.replica.replica_id

    async def alive(told: Registration) -> None:
        await runner.between_steps(lambda engine: engine.guidance.registered(name, told.epoch))
        while True:
            reports = _reports(runner, name, told)
            try:
                async for plan in scheduler.follow(reports):
                    await runner.between_steps(_taking(plan))
            except DsparkError as error:  # the heartbeats say so, once
                log.debug("the stream of plans is lost: %s", error)
            await asyncio.sleep(told.heartbeat_s * random.uniform(0.5, 1.0))

    return Membership(scheduler, member, step_cost, alive=alive, **rest)


async def _reports(runner: EngineRunner, name: str, told: Registration) -> AsyncIterator[Report]:
    """One each plan interval, fewer while there is nothing to say."""
    idle = 0
    while True:
        tally, crowd = await runner.between_steps(Engine.take_tally)
        idle = 0 if tally.steps or crowd.tenants else idle + 1
        if idle % IDLE_INTERVALS in (0, 1):
            yield report_of(tally, crowd, name, told.epoch)
        await asyncio.sleep(told.plan_interval_s)


def _taking(plan: Plan) -> Callable[[Engine], bool]:
    return lambda engine: engine.guidance.take(plan)
