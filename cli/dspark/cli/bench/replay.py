"""Rounds of a real engine written down once, and played again by every policy.

What is written down comes from an engine that verifies whole blocks, so that every round has its
draft; how much of it stands is read from the text that the engine went on to commit. Played again,
the engine's own planner decides, with the same survivals before it, when to draft and how much to
verify, and learns from what it sees, on a machine whose steps take exactly what its cost says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dspark.cli.bench.engine_load import Work, closed_loop
from dspark.cli.bench.load import Clock
from dspark.cli.bench.regret import KnownRound, KnownStep, Play
from dspark.core.drafts import MAX_GAMMA, Draft
from dspark.core.requests import Committed, Request
from dspark.core.sampling import SamplingParams
from dspark.core.sequence import SequenceState

if TYPE_CHECKING:
    from dspark.scheduler import DraftCost, StepCost
    from dspark.verifier.batcher import Item
    from dspark.verifier.engine import Engine, EngineEvent
    from dspark.verifier.planning import StepPlan, StepPlanner
    from dspark.verifier.sequence import DraftInHand
    from dspark.verifier.sequence import Sequence as Choice

NO_LOGITS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Recording:
    """steps: those with a decoding request, while every user was busy. draft_s: mean seconds that
    asking for a draft took."""

    steps: tuple[KnownStep, ...]
    draft_s: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """A round as it came: which answer, where in it, and what was drafted for there."""

    request: str
    index: int
    hand: DraftInHand | None


class Recorder:
    """Told of every step of a closed loop, before and after."""

    def __init__(self, engine: Engine, asked: Sequence[Request]) -> None:
        self._engine = engine
        self._prompt_tokens = {request.request_id: len(request.prompt_ids) for request in asked}
        self._texts: dict[str, list[int]] = {name: [] for name in self._prompt_tokens}
        self._hands: dict[str, DraftInHand | None] = {}
        self._prefilled = 0
        self._steps: list[tuple[int, list[_Seen]]] = []

    def before_step(self) -> None:
        self._hands = {s.state.key[0]: s.draft for s in self._engine.running}
        self._prefilled = self._engine.figures.prefill_tokens

    def after_step(self, events: Sequence[EngineEvent], busy: bool) -> None:
        seen = []
        for (name, _), event in events:
            if isinstance(event, Committed):
                self._texts[name] += event.ids
                if event.speculation.rounds:
                    seen.append(_Seen(name, event.index, self._hands.get(name)))
        if busy and seen:
            self._steps.append((self._engine.figures.prefill_tokens - self._prefilled, seen))

    @property
    def steps(self) -> tuple[KnownStep, ...]:
        """Once all texts are whole."""
        return tuple(self._step(prefill, seen) for prefill, seen in self._steps)

    def _step(self, prefill: int, seen: Sequence[_Seen]) -> KnownStep:
        room = self._engine.config.max_step_tokens - prefill - len(seen)
        rounds = []
        for one in seen:
            ids = () if one.hand is None else one.hand.draft.ids
            survival = np.empty(0) if one.hand is None else one.hand.survival
            # As the batcher gives it: first come, first served, by the length of the block.
            cap = max(min(len(ids), room), 0)
            room -= cap
            usable = min(cap, len(survival))
            said = self._texts[one.request][one.index : one.index + usable]
            context = self._prompt_tokens[one.request] + one.index - 1
            rounds.append(
                KnownRound(one.request, context, survival[:usable], _common(ids[:usable], said))
            )
        return KnownStep(prefill, tuple(rounds))


def record(
    engine: Engine,
    asked: Sequence[Request],
    users: int,
    check: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Recording:
    """Run greedy requests to their ends. engine: of policy `fixed:γ`, with nothing to do yet.
    check: called before each step, may raise to give up."""
    recorder = Recorder(engine, asked)
    before = Work.until_now(engine.figures)

    def before_step() -> None:
        check()
        recorder.before_step()

    closed_loop(
        engine,
        asked,
        users,
        clock=clock,
        before_step=before_step,
        after_step=recorder.after_step,
    )
    work = Work.until_now(engine.figures) - before
    return Recording(recorder.steps, work.draft_s / max(work.rounds, 1))


def play(
    steps: Sequence[KnownStep], verify: str, cost: StepCost, max_step_tokens: int, draft_s: float
) -> list[Play]:
    """What the planner of an engine with policy `verify` does in each step. It starts knowing the
    cost and nothing else; drafts and verdicts reach it in an engine's order."""
    from dspark.scheduler import OnlineStepCost, Policy
    from dspark.verifier.guidance import Guidance
    from dspark.verifier.planning import StepPlanner

    planner = StepPlanner(
        OnlineStepCost(cost), Policy.parse(verify), max_step_tokens, Guidance(lambda: 0.0)
    )
    desk = _Desk(planner, draft_s)
    plays = []
    for step in steps:
        asked = desk.ask(step)
        items = desk.items(step)
        planned = planner.plan(items)
        planner.took(planned, cost.seconds(planned.P, planned.R, planned.B, planned.context))
        planner.learn(items, planned)
        desk.judged(step, planned)
        plays.append(Play(tuple(planned.lengths[: len(step.rounds)]), asked))
    return plays


def search(steps: Sequence[KnownStep], cost: StepCost, max_step_tokens: int) -> list[Play]:
    """What is best by survivals alone, step by step: every draft asked for, the full search, and
    none of the planner's cautions. What this misses lies in how well survivals foretell, not in the
    planner."""
    from dspark.scheduler import Policy, PolicyKind, plan

    plays = []
    for step in steps:
        active = len(step.rounds)
        lengths = plan(
            [known.survival for known in step.rounds],
            cost,
            step.prefill,
            active,
            step.context,
            Policy(PolicyKind.EARLY_STOP),
            lookahead=True,
            max_tokens=max_step_tokens,
        )
        plays.append(Play(tuple(lengths.tolist()), active))
    return plays


class _Desk:
    """The sequences of a played recording, and what the engine does around its planner."""

    def __init__(self, planner: StepPlanner, draft_s: float) -> None:
        self._planner = planner
        self._cost = _linear(draft_s)
        self._sequences: dict[str, Choice] = {}
        self._received = 0
        self._last: StepPlan | None = None

    def ask(self, step: KnownStep) -> int:
        """Drafts for the coming step, where the planner wants them; how many were asked for."""
        sequences = []
        for known in step.rounds:
            sequence = self._sequences.get(known.request)
            if sequence is None:
                sequence = self._sequences[known.request] = _sequence(known.request, 1)
            sequence.state.computed = known.context
            sequences.append(sequence)
        last = self._last or self._plain(step)
        whose = [0] * len(sequences)
        wanted = self._planner.how_much_to_ask(sequences, [self._cost], whose, last)
        for sequence, known, tokens in zip(sequences, step.rounds, wanted, strict=True):
            sequence.rounds_unasked = 0 if tokens else sequence.rounds_unasked + 1
            if tokens and len(known.survival):
                self._hand(sequence, known.survival[:tokens])
        return sum(tokens > 0 for tokens in wanted)

    def _hand(self, sequence: Choice, survival: NDArray[np.float64]) -> None:
        from dspark.verifier.sequence import DraftInHand

        self._received += 1
        ids = (0,) * len(survival)
        draft = Draft(sequence.session, sequence.round, ids, NO_LOGITS)
        sequence.draft = DraftInHand(self._received, draft, survival)

    def _plain(self, step: KnownStep) -> StepPlan:
        """In place of the step before the first."""
        from dspark.verifier.planning import StepPlan

        active = len(step.rounds)
        seconds = self._planner.cost.current.seconds(0, active, active, step.context)
        return StepPlan([0] * active, 0, active, active, step.context, seconds)

    def items(self, step: KnownStep) -> list[Item]:
        from dspark.verifier.batcher import Item

        items = [
            Item(
                self._sequences[known.request],
                tokens=1,
                decoding=True,
                reaches_end=True,
                draft_cap=len(known.survival),
            )
            for known in step.rounds
        ]
        if step.prefill:
            prompt = _sequence("a prompt", step.prefill)
            items.append(Item(prompt, step.prefill, decoding=False, reaches_end=False))
        return items

    def judged(self, step: KnownStep, planned: StepPlan) -> None:
        self._last = planned
        for known in step.rounds:
            sequence = self._sequences[known.request]
            sequence.draft = None
            sequence.round += 1


def _linear(draft_s: float) -> DraftCost:
    """A drafter that takes so long for each draft."""
    from dspark.scheduler import DraftCost

    cost = DraftCost()
    while not cost.known:
        cost.observe(1, draft_s)
    return cost


def _sequence(name: str, prompt_tokens: int) -> Choice:
    """A greedy one: its drafts are free to be looked at as a whole (L2)."""
    from dspark.verifier.sequence import Sequence

    request = Request(name, (0,) * prompt_tokens, SamplingParams(temperature=0))
    state = SequenceState(request, eos_ids=(), max_tokens_total=prompt_tokens + 1, arrival=1)
    return Sequence(state, np.random.default_rng(0), drafter="recorded", gamma=MAX_GAMMA)


def _common(proposed: Sequence[int], said: Sequence[int]) -> int:
    """Tokens up to the first that differs."""
    for count, (x, y) in enumerate(zip(proposed, said, strict=False)):
        if x != y:
            return count
    return min(len(proposed), len(said))
