"""What a simulated verifier asks of drafters, and what comes back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from dspark.core.sampling import SamplingMode
from dspark.scheduler.asking import DraftCost, afforded
from dspark.scheduler.calibration import stretched
from dspark.scheduler.simulation.drafters import CHECKPOINT, Ask
from dspark.scheduler.simulation.measures import Measures
from dspark.scheduler.simulation.planning import Guide, Step, StepPlanner
from dspark.scheduler.simulation.profiles import FloatArray, IntArray, Source, survival
from dspark.scheduler.simulation.reporting import Tally
from dspark.scheduler.simulation.rows import Rows
from dspark.scheduler.step_cost import StepCost
from dspark.scheduler.sts import UNSCALED

BESIDE = "beside"  # the drafter that shares the verifier's machine


class DraftDesk:
    """verifier: by number. drafters: replica ids of the pool, by number; none: the verifier drafts
    for itself, and drafting B tokens takes `share` of T(B). outstanding: by group, asks that its
    next step waits for."""

    def __init__(
        self,
        verifier: int,
        rows: Rows,
        planner: StepPlanner,
        tally: Tally,
        measures: Measures,
        source: Source,
        drafters: Sequence[str],
        *,
        cost: StepCost,
        share: float,
        gamma: int,
        groups: int,
        mode: SamplingMode,
        guide: Guide | None,
    ) -> None:
        self._verifier = verifier
        self._rows = rows
        self._planner = planner
        self._tally = tally
        self._measures = measures
        self._source = source
        self._drafters = drafters
        self._cost = cost
        self._share = share
        self._gamma = gamma
        self._mode = mode
        self._guide = guide
        self.outstanding = [0] * groups
        self._rounds = [0] * groups  # so that a late draft is known
        self._asked_at = [-1.0] * groups  # of the drafts that a group's next step waits for
        self._fresh: list[list[IntArray]] = [[] for _ in range(groups)]  # arrived, not yet drawn
        self._received = 0
        self._costs = [DraftCost() for _ in drafters or (BESIDE,)]

    def ask(self, group: int, step: Step, now: float) -> tuple[list[Ask], float]:
        """After a step of a group: asks for drafters of the pool, or the seconds of drafting beside
        the target."""
        rows, at = self._rows, self._rows.of_group(group)
        at = at[(rows.prefill[at] == 0) & (rows.left[at] > 1)]
        if self._drafters:
            at = at[rows.drafter[at] >= 0]
        hidden_s = (len(self.outstanding) - 1) * step.seconds
        at = self._planner.askers(rows, at, self._costs, hidden_s, step)
        if not len(at):
            return [], 0.0
        lengths = self._planner.blocks(rows, at, self._costs, step)
        if not self._drafters:
            rows.unasked[at] = 0
            seconds = self._share * self._cost.seconds(0, 0, int(lengths.sum()), 0)
            self._costs[0].observe(len(at), seconds)
            self._take(group, at, lengths, BESIDE, seconds, now)
            if seconds:
                self._exposed(seconds, len(at), now)
            return [], seconds
        asks = []
        order = np.argsort(rows.drafter[at], kind="stable")
        at, lengths = at[order], lengths[order]
        drafter = rows.drafter[at]
        edges = [0, *(np.flatnonzero(np.diff(drafter)) + 1).tolist(), len(at)]
        for first, end in itertools.pairwise(edges):
            d = int(drafter[first])
            slots, sizes = self._affordable(d, at[first:end], lengths[first:end])
            if len(slots):
                rows.unasked[slots] = 0
                asks.append(Ask(self._verifier, group, self._rounds[group], d, slots, sizes, now))
        if asks:
            self.outstanding[group] = len(asks)
            self._asked_at[group] = now
        return asks, 0.0

    def arrived(self, ask: Ask, now: float) -> None:
        """Drafts come; those of a round that is over are dropped."""
        self._costs[ask.drafter].observe(len(ask.slots), now - ask.asked_at)
        if ask.round != self._rounds[ask.group]:
            self._measures.add_late(now)
            return
        self.outstanding[ask.group] -= 1
        name = self._drafters[ask.drafter]
        self._take(ask.group, ask.slots, ask.lengths, name, now - ask.asked_at, now)

    def give_up(self, group: int, round_number: int) -> None:
        """A group's drafts take too long: it goes on without those that are missing."""
        if round_number == self._rounds[group]:
            self.outstanding[group] = 0
            self._rounds[group] += 1

    def step_begins(self, group: int, decoding: int, free_since: float, now: float) -> None:
        """free_since: when the verifier had nothing else to do."""
        asked_at, self._asked_at[group] = self._asked_at[group], -1.0
        if asked_at >= 0:
            self._exposed(max(now - max(asked_at, free_since), 0.0), decoding, now)
        if fresh := self._fresh[group]:
            at = np.concatenate(fresh)
            blocks = self._source.take(self._rows.domain[at])
            alive = survival(blocks.logits, self._scaling())
            self._rows.give(at, blocks, alive)
            fresh.clear()

    def step_ends(self, group: int) -> None:
        self._rounds[group] += 1

    def _exposed(self, seconds: float, rounds: int, now: float) -> None:
        """So many rounds waited so long for their drafts, with nothing to hide it."""
        self._tally.add_exposed(seconds, rounds)
        self._measures.add_wait(now, seconds, rounds)

    def _affordable(
        self, drafter: int, at: IntArray, lengths: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Those that the plan's budget is enough for; it is spent on them."""
        if self._guide is None:
            return at, lengths
        name = self._drafters[drafter]
        tokens = self._guide.affordable(name, int(lengths.sum()), int(lengths.max()))
        keep = afforded(lengths, self._rows.saving[at], tokens)
        self._guide.spend(name, int(lengths[keep].sum()))
        return at[keep], lengths[keep]

    def _take(
        self,
        group: int,
        at: IntArray,
        lengths: IntArray,
        drafter: str,
        latency_s: float,
        now: float,
    ) -> None:
        """Drafts are here. What they are is drawn when all of their step are, in one go."""
        self._rows.block[at] = lengths
        self._rows.number[at] = np.arange(self._received + 1, self._received + 1 + len(at))
        self._received += len(at)
        self._fresh[group].append(at)
        tokens = int(lengths.sum())
        self._tally.add_drafts(drafter, tokens, len(at))
        self._measures.add_drafts(now, tokens, latency_s)

    def _scaling(self) -> FloatArray:
        if self._guide is None:
            return stretched(UNSCALED[:, None], self._gamma)
        return self._guide.scaling(CHECKPOINT, self._mode, self._gamma)
