"""Figures as they are at the moment when somebody asks: plain numbers, read from any thread.

Nothing is added up here and nothing is kept: what a step costs is what it did anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dspark.core.requests import SpeculationFigures

if TYPE_CHECKING:
    from dspark.drafter.runner import DraftRunner
    from dspark.gateway.dispatch import Dispatch
    from dspark.scheduler.central.outage import Outage
    from dspark.verifier.engine import Engine


@dataclass(frozen=True, slots=True)
class LinkReading:
    """A link to one drafter replica. state: up, draining or down. connected: streams so far."""

    drafter: str
    state: str
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    reply_s: float = 0.0
    connected: int = 0
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an engine says of itself; totals since its start, seconds of its thread.

    blocks_free, blocks_cached: that a new sequence can take. by_length: rounds by how many tokens
    were drafted, verified, accepted, three rows [γ + 1]. step_buckets: steps no longer than each of
    STEP_BUCKETS, the last ones longer than all. plan_age_s: None without a plan.
    """

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_owned: int = 0
    preemptions: int = 0
    steps: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    draft_s: float = 0.0
    step_buckets: Sequence[int] = ()
    residual_s: float = 0.0
    residual_abs_s: float = 0.0
    prefill_tokens: int = 0
    committed_tokens: int = 0
    residual_fallbacks: int = 0
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)
    by_length: Sequence[Sequence[int]] = ((), (), ())
    draft_wait_s: float = 0.0
    answers: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    groups: int = 1
    guided_steps: int = 0
    plan_age_s: float | None = None
    plans_dropped: Mapping[str, int] = field(default_factory=dict)
    calibration: int = 0
    links: Sequence[LinkReading] = ()


@dataclass(frozen=True, slots=True)
class DrafterReading:
    sessions: int = 0
    queue: int = 0
    streams: int = 0
    passes: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DispatchReading:
    leased: int = 0
    local: int = 0
    replays: int = 0
    leases: int = 0
    verifiers: int = 0


@dataclass(frozen=True, slots=True)
class OutageReading:
    """count: times that it went away. away: whether it is now."""

    count: int
    away: bool


def read_engine(engine: Engine) -> EngineReading:
    figures, pool = engine.figures, engine.cache.pool
    running = len(engine.running)
    cached = pool.cached
    return EngineReading(
        running=running,
        waiting=max(engine.active - running, 0),
        blocks_free=max(pool.available - cached, 0),
        blocks_cached=cached,
        blocks_owned=pool.owned,
        preemptions=engine.preemptions,
        steps=figures.steps,
        step_s=figures.step_s,
        forward_s=figures.forward_s,
        draft_s=figures.draft_s,
        prefill_tokens=figures.prefill_tokens,
        committed_tokens=figures.committed_tokens,
        residual_fallbacks=figures.residual_fallbacks,
        speculation=figures.speculation,
        step_buckets=tuple(figures.step_buckets),
        residual_s=figures.residual_s,
        residual_abs_s=figures.residual_abs_s,
        by_length=figures.by_length,
        draft_wait_s=figures.draft_wait_s,
        answers=dict(engine.desk.answers),
        faults=dict(engine.desk.faults),
        groups=engine.pacing.groups,
        guided_steps=engine.planner.guided_plans,
        plan_age_s=engine.guidance.age_s,
        plans_dropped=dict(engine.guidance.dropped),
        calibration=engine.guidance.calibration,
        links=tuple(_links(engine)),
    )


def _links(engine: Engine) -> Iterator[LinkReading]:
    plan = engine.guidance.plan
    budgets = {} if plan is None else plan.draft_budgets
    for name, source in engine.drafters.links.items():
        state = "draining" if source.draining else "up" if source.available else "down"
        # What only a link over a wire has.
        figures = getattr(source.link, "figures", LinkReading(name, state))
        yield LinkReading(
            name,
            state,
            figures.bytes_sent,
            figures.bytes_received,
            figures.messages_sent,
            figures.messages_received,
            figures.reply_s,
            figures.connected,
            budgets.get(name),
        )


def read_drafter(runner: DraftRunner) -> DrafterReading:
    figures = runner.figures
    return DrafterReading(
        sessions=runner.sessions,
        queue=runner.queue,
        streams=runner.lines,
        passes=figures.passes,
        tokens=figures.tokens,
        busy_s=figures.busy_s,
        refused=dict(figures.refused),
    )


def read_dispatch(dispatch: Dispatch) -> DispatchReading:
    return DispatchReading(
        leased=dispatch.leased,
        local=dispatch.local,
        replays=dispatch.replays,
        leases=len(dispatch.leases()),
        verifiers=len(dispatch.members),
    )


def read_outage(outage: Outage) -> OutageReading:
    return OutageReading(outage.count, outage.since is not None)


def positions(by_length: Sequence[int]) -> list[int]:
    """Blocks that reach each position 1 … γ, from blocks by length."""
    reached, total = [], 0
    for count in reversed(by_length[1:]):
        total += count
        reached.append(total)
    return reached[::-1]


# Seconds. A step takes a millisecond on a GPU and a second at worst on two cores.
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, math.inf)
