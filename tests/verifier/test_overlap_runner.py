"""The engine's thread while it waits for drafts: woken by a bell, and by everything else that is
asked of it; a wait is no busy loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from dspark.core.drafts import Answer, DrafterCard, DraftRequest
from dspark.core.errors import Cancelled, DeadlineExceeded
from dspark.core.requests import Committed, Finished, Speculation
from dspark.verifier.engine import Engine
from dspark.verifier.lines import Line
from dspark.verifier.runner import TICK_S, EngineRunner
from dspark.verifier.sources import Bell

from ..scheduling.cluster import until
from .toy import (
    ScriptedDrafter,
    ToyBackend,
    greedy,
    history_rule,
    oracle,
    request,
    target_only,
    toy_engine,
)

V = 50
RULE = history_rule(V)
PROMPT = (1, 2, 3)
# Seconds that the drafter is believed to take: longer than any test.
AGES_S = 1000.0


@dataclass
class HeldLink:
    """It says nothing until it is told to. looks: times that somebody asked for answers."""

    bell: Bell
    drafter: ScriptedDrafter = field(
        default_factory=lambda: ScriptedDrafter(oracle(RULE, wrong_every=5))
    )
    context_window: int = 0
    available: bool = True
    draining: bool = False
    looks: int = 0
    held: list[Answer] = field(default_factory=list)
    inbox: list[Answer] = field(default_factory=list)

    @property
    def card(self) -> DrafterCard:
        return self.drafter.card

    def ask(self, requests: Sequence[DraftRequest]) -> None:
        self.held += self.drafter.propose(requests)

    def say(self) -> None:
        """From the event loop, as a link's stream does."""
        self.inbox, self.held = [*self.inbox, *self.held], []
        self.bell()

    def answers(self) -> list[Answer]:
        self.looks += 1
        said, self.inbox = self.inbox, []
        return said

    def close(self, session: str) -> None:
        self.drafter.close(session)


@asynccontextmanager
async def waiting(**rest: Any) -> AsyncIterator[tuple[EngineRunner, HeldLink, Line]]:
    """An engine whose only request waits for its draft, and the line it was asked on."""
    engine = toy_engine(
        ToyBackend(RULE, V), clock=time.monotonic, verify="fixed:7", heartbeat_s=0.02
    )
    async with EngineRunner(engine) as runner:
        link = HeldLink(runner.bell())

        def adopt(engine: Engine) -> None:
            engine.adopt("d1", link, bell=link.bell)
            for _ in range(10):
                engine.drafters["d1"].cost.observe(1, AGES_S)

        await runner.between_steps(adopt)
        line = runner.line()
        line.start(request("a", PROMPT, greedy(12), **rest))
        await until(lambda: bool(link.held))
        yield runner, link, line
        line.close()


async def end(line: Line, name: str = "a") -> tuple[list[int], Finished]:
    ids: list[int] = []
    while (batch := await line.next()) is not None:
        for run, event in batch.events:
            if run.request.request_id != name:
                continue
            if isinstance(event, Committed):
                ids += event.ids
            else:
                assert isinstance(event, Finished)
                return ids, event
    raise AssertionError("the line is over")


async def test_a_bell_ends_a_wait() -> None:
    async with waiting() as (runner, link, line):
        told = asyncio.create_task(end(line))
        while not told.done():
            await until(lambda: bool(link.held) or told.done())
            link.say()
        ids, _ = await told
        assert ids == target_only(RULE, PROMPT, 12)
        assert runner.engine.figures.speculation.accepted > 0
        assert runner.engine.desk.answers["given up"] == 0


async def test_a_wait_is_no_busy_loop_and_gives_signs_of_life() -> None:
    async with waiting() as (runner, link, line):
        beats, steps, looks = 0, runner.engine.figures.steps, link.looks
        begin, used = time.monotonic(), time.process_time()
        while beats < 10:
            batch = await line.next()
            assert batch is not None
            beats += not batch.events
        passed = time.monotonic() - begin
        assert runner.engine.figures.steps == steps
        # A look each tick, and each sign of life is one.
        assert link.looks - looks <= passed / min(TICK_S, 0.02) + 12
        assert time.process_time() - used < 0.5 * passed + 0.05


async def test_what_is_asked_meanwhile_is_done_at_once() -> None:
    async with waiting() as (runner, _, line):
        plain = request("b", PROMPT, greedy(9), speculation=Speculation(drafter="none"))
        line.start(plain)
        ids, _ = await end(line, "b")
        assert ids == target_only(RULE, PROMPT, 9)
        assert await runner.between_steps(lambda engine: len(engine.desk.errands)) == 1
        line.cancel(("a", 0, 0))
        _, finished = await end(line)
        assert isinstance(finished.error, Cancelled)
        assert await runner.between_steps(lambda engine: engine.cache.pool.owned) == 0


async def test_a_deadline_passes_while_a_draft_is_awaited() -> None:
    async with waiting(deadline=time.monotonic() + 1.0) as (_, _, line):
        _, finished = await end(line)
        assert isinstance(finished.error, DeadlineExceeded)


async def test_a_stop_does_not_wait_for_a_draft() -> None:
    begin = time.monotonic()
    async with waiting() as (runner, _, _):
        pass
    assert time.monotonic() - begin < AGES_S / 10
    assert runner.engine.idle
