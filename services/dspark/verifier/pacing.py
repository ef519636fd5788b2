"""An engine's rhythm with drafters elsewhere: its groups, and what it waits for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from dspark.scheduler import Beside, OnlineStepCost
from dspark.verifier.batcher import Item
from dspark.verifier.desk import DraftDesk
from dspark.verifier.drafters import Drafters
from dspark.verifier.overlap import (
    Awaited,
    Decision,
    Load,
    Ready,
    Work,
    apart,
    decide,
    groups,
    rates,
    remaining,
)
from dspark.verifier.sequence import Errand, Sequence


class Pacing:
    """Feeds the rules of `overlap` with what the engine knows. groups: in which sequences drafted
    elsewhere take turns, 1 or 2."""

    def __init__(
        self,
        cost: OnlineStepCost,
        desk: DraftDesk,
        drafters: Drafters,
        clock: Callable[[], float],
    ) -> None:
        self.groups = 1
        self._cost = cost
        self._desk = desk
        self._drafters = drafters
        self._clock = clock

    def most_linked(self, running: Iterable[Sequence]) -> int | None:
        """How many of those drafted elsewhere the next step may hold; None for no limit. Settles
        the number of groups."""
        going = [s for s in running if not s.paused and s.state.uncomputed == 1]
        linked = [s for s in going if s.linked]
        R = len(linked)
        if R < 2:
            self.groups = 1
            return None
        beside = work_of([s for s in going if not s.linked])
        told = rates(work_of(linked), beside, self.seconds, self._draft_seconds(linked))
        self.groups = groups(self.groups, R, told)
        return None if self.groups == 1 else math.ceil(R / self.groups)

    def decide(
        self, items: Iterable[Item], most_linked: int | None
    ) -> tuple[Decision, list[Errand]]:
        """What to do with composed items, and the errands that its indices mean."""
        errands = [e for e in self._desk.errands if not all(s.paused for s in e.left.values())]
        if not errands:
            return Decision(), []
        items = list(items)
        decoding = [item.sequence for item in items if item.decoding]
        work = work_of(decoding)
        prompts = Load(
            P=sum(item.tokens for item in items if not item.decoding),
            context=sum(item.sequence.state.computed for item in items if not item.decoding),
        )
        again = work_of([s for s in decoding if _is_ready_again(s)])
        ready = Ready(work.load + prompts, work.tokens, again)
        full = most_linked is not None and sum(s.linked for s in decoding) >= most_linked
        awaited = list(map(self._awaited, errands))
        return decide(ready, awaited, self.seconds, full=full), errands

    def _awaited(self, errand: Errand) -> Awaited:
        mean_s, deviation_s = self._desk.cost_s(errand)
        elapsed_s = max(self._clock() - errand.at, 0.0)
        remaining_s, late = remaining(mean_s, deviation_s, elapsed_s)
        sequences = [s for s in errand.left.values() if not s.paused]
        hopeful = any(s.asked is not None and s.asked.hopeful for s in sequences)
        saving_s = math.inf if hopeful else sum(s.expected_saving_s for s in sequences)
        work = work_of(sequences)
        return Awaited(work.load, work.tokens, remaining_s, late, saving_s)

    def beside(
        self, asking: Collection[Sequence], others: Iterable[Sequence], prefill: int
    ) -> list[Beside]:
        """What may be done while drafts are made for some of those that were stepped last: all wait
        but prompts, which are worked on; or the others are stepped meanwhile, half of the same step
        if there are no others."""
        group, waits = work_of(asking).load, set(asking)
        rest = work_of([s for s in others if s.state.uncomputed == 1 and s not in waits]).load
        prompts = Load(P=prefill)
        half = -(-group.R // 2) if not rest.R else None
        step = rest if half is None else group.part(group.R - half)
        waiting = Beside(self.seconds(prompts))
        if not step.R:
            return [waiting]
        apart_s = apart(step, group + rest, self.seconds)
        return [waiting, Beside(self.seconds(step + prompts), apart_s, half)]

    def seconds(self, load: Load) -> float:
        """T of a step; 0 of an empty one."""
        if load.empty:
            return 0.0
        B = load.P + load.R + round(load.drafts)
        return self._cost.current.seconds(load.P, load.R, B, load.context)

    def _draft_seconds(self, linked: list[Sequence]) -> Callable[[int], float]:
        """D(n): n drafts asked for together, of each drafter its part; the last one to answer
        counts."""
        parts = Counter(s.source for s in linked)
        costs = [
            (source.cost, count / len(linked))
            for name, count in parts.items()
            if (source := self._drafters.get(name)) is not None
        ]
        return lambda n: max(
            (cost.seconds(math.ceil(n * part)) for cost, part in costs), default=0.0
        )


def work_of(sequences: Collection[Sequence]) -> Work:
    """Of decoding sequences: what is usually verified of the drafts that they have or wait for, and
    what they should commit. Those of whom nothing is known do as the others; the best is expected
    if nothing is known of any."""
    drafting = [s for s in sequences if s.asked is not None or s.draft is not None]
    known = [s.gains for s in drafting if s.gains is not None]
    usual = sum(known) / len(known) if known else None
    gains = sum(
        s.gains if s.gains is not None else _room(s) if usual is None else usual for s in drafting
    )
    load = Load(
        R=len(sequences),
        drafts=sum(_room(s) if s.verifies is None else min(s.verifies, _room(s)) for s in drafting),
        context=sum(s.state.computed for s in sequences),
    )
    return Work(load, len(sequences) + gains)


def _room(sequence: Sequence) -> int:
    """Draft tokens of its longest block."""
    return min(sequence.gamma, sequence.state.draft_room)


def _is_ready_again(sequence: Sequence) -> bool:
    """Whether a decoding sequence can be stepped again at once: nobody elsewhere is asked for its
    next draft, as far as this round tells."""
    if sequence.draft is not None:
        return not sequence.draft.linked
    return not sequence.drafter or sequence.rounds_unasked > 0
