"""Drafters elsewhere, on a clock that only moves when something is done or waited for.

A link here answers as its script says: late, twice, in another order, never. Time passes in the
target's forward and in the engine's own waits, so every test is a matter of arithmetic.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dspark.core.drafts import Answer, DrafterCard, DraftRequest, Lost
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.models.targets.features import FeatureProjection
from dspark.verifier.engine import Engine
from dspark.verifier.sources import Bell

from .toy import Rule, Scene, ScriptedDrafter, ToyBackend, toy_engine

# Its hash is what a drafter that reads features names; the toy's features are all alike.
PROJECTION = FeatureProjection((1,))
FEATURES = PROJECTION.feature_id

# Seconds of a step of B tokens: half of it whatever B is.
STEP = {1: 0.0105, 101: 0.0605}


class World:
    """A clock, and what will happen on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now + seconds, next(self._order), do))

    @property
    def next_at(self) -> float:
        return self._coming[0][0] if self._coming else np.inf

    def run_to(self, when: float) -> None:
        while self.next_at <= when:
            self.now, _, do = heapq.heappop(self._coming)
            do()
        self.now = max(self.now, when)


class TimedBackend(ToyBackend):
    """Steps take what they are said to take. widths: sequences of each step."""

    def __init__(self, world: World, rule: Rule, vocab_size: int, **rest: Any) -> None:
        super().__init__(rule, vocab_size, **rest)
        self.world = world
        self.widths: list[int] = []
        self.table: dict[int, float] = STEP

    def forward(self, batch: RaggedBatch) -> StepOutput:
        output = super().forward(batch)
        self.widths.append(len(batch.context_len))
        B = len(batch.token_ids)
        self.world.run_to(
            self.world.now + float(np.interp(B, list(self.table), list(self.table.values())))
        )
        return output


# What becomes of a request: seconds until each answer to it, none for never.
Fate = Callable[[DraftRequest, int], Iterable[float]]


def after(seconds: float, each: float = 0.0) -> Fate:
    """One answer, in time that grows with how many are asked together."""
    return lambda request, n: (seconds + each * n,)


class ScriptedLink:
    """A `DrafterLink` around a drafter that answers at once, here. asked: how many, by call. lie:
    what is said instead of what the drafter says."""

    def __init__(
        self,
        world: World,
        drafter: ScriptedDrafter,
        fate: Fate | None = None,
        *,
        context_window: int = 0,
    ) -> None:
        self.drafter = drafter
        self.fate = fate or after(0.005)
        self.context_window = context_window
        self.available = True
        self.draining = False
        self.asked: list[int] = []
        self.closed: list[str] = []
        self.lie: Callable[[DraftRequest], Answer] | None = None
        self.bell = Bell(world)
        self._world = world
        self._inbox: list[Answer] = []
        self._open: dict[tuple[str, int], None] = {}

    @property
    def card(self) -> DrafterCard:
        return self.drafter.card

    def ask(self, requests: Sequence[DraftRequest]) -> None:
        self.asked.append(len(requests))
        if not self.available:
            for request in requests:
                self.say(Lost(request.session, request.round, "not available"))
            return
        replies = [self.lie(r) for r in requests] if self.lie else self.drafter.propose(requests)
        for request, reply in zip(requests, replies, strict=True):
            self._open[request.session, request.round] = None
            for seconds in self.fate(request, len(requests)):
                self._world.after(seconds, self._saying(reply, (request.session, request.round)))

    def _saying(self, answer: Answer, of: tuple[str, int]) -> Callable[[], None]:
        def say() -> None:
            if self.available:
                self._open.pop(of, None)
                self.say(answer)

        return say

    def say(self, answer: Any) -> None:
        """Whatever it is."""
        self._inbox.append(answer)
        self.bell()

    def answers(self) -> list[Answer]:
        said, self._inbox = self._inbox, []
        return said

    def close(self, session: str) -> None:
        self.closed.append(session)
        self.drafter.close(session)

    def cut(self) -> None:
        """The drafter is gone: rounds are lost, and so are its sessions."""
        self.available = False
        for session, round_ in self._open:
            self.say(Lost(session, round_, "the stream is lost"))
        self._open.clear()
        for session in self.drafter.sessions:
            self.drafter.forget(session)


class RemoteScene(Scene):
    """Steps an engine as its thread does: where it has patience, time passes until then or until
    a bell rings."""

    def __init__(self, engine: Engine, world: World) -> None:
        super().__init__(engine)
        self.world = world
        self.waits: list[float] = []

    def step(self, steps: int = 1) -> list[Any]:
        told = super().step(steps)
        patience = self.engine.patience
        if patience:
            self.waits.append(patience)
            self.world.run_to(min(self.world.now + patience, self.world.next_at))
        return told


def remote_scene(
    rule: Rule, vocab_size: int, world: World, *local: Any, table: Any = None, **config: Any
) -> RemoteScene:
    """An engine in a world, without links yet."""
    backend = TimedBackend(world, rule, vocab_size)
    backend.table = table or STEP
    return RemoteScene(
        toy_engine(backend, *local, clock=world, table=backend.table, **config), world
    )


def adopt(of: Scene, name: str, link: ScriptedLink) -> None:
    projection = PROJECTION if link.card.feature_id else None
    of.engine.adopt(name, link, projection, bell=link.bell)
