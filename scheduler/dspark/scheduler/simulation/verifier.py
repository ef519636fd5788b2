"""A simulated verifier: told what happens, it says what comes next. No clock and no events here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.core.plans import Plan
from dspark.core.replicas import VerifierCard
from dspark.core.reports import Report
from dspark.core.requests import Limits
from dspark.core.sampling import SamplingMode
from dspark.scheduler.fair_queue import FairQueue
from dspark.scheduler.simulation.config import Arm, SimulationConfig, Verifiers
from dspark.scheduler.simulation.desk import DraftDesk
from dspark.scheduler.simulation.drafters import Ask
from dspark.scheduler.simulation.measures import Measures
from dspark.scheduler.simulation.planning import Guide, Step, StepPlanner
from dspark.scheduler.simulation.profiles import IntArray, Source
from dspark.scheduler.simulation.reporting import Tally
from dspark.scheduler.simulation.requests import Job
from dspark.scheduler.simulation.rows import Rows

MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class Ended:
    """What a step's end leaves to do. asks: for drafters of the pool. drafting_s: until the
    verifier has drafted for itself. over: requests that are answered."""

    over: list[Job]
    asks: list[Ask]
    drafting_s: float = 0.0


@dataclass(slots=True)
class _Running:
    """The step that runs now. chunks: prompt tokens of slots that do not decode yet."""

    group: int
    step: Step
    seconds: float
    prefilling: IntArray
    chunks: IntArray


class Verifier:
    """name: its replica's id. drafters: replica ids of the pool, by number; none: beside."""

    def __init__(
        self,
        number: int,
        kind: Verifiers,
        arm: Arm,
        config: SimulationConfig,
        drafters: Sequence[str],
        source: Source,
        rng: np.random.Generator,
        measures: Measures,
        guide: Guide | None,
    ) -> None:
        self.number = number
        self.name = f"verifier-{number}"
        self.epoch = 0
        self.kind = kind
        self.cost = kind.cost
        sampled = config.drafting.sampled
        mode = SamplingMode.REJECTION if sampled else SamplingMode.GREEDY
        gamma = config.gamma(arm)
        self._tenants = config.tenants
        self._rng = rng
        self._measures = measures
        self._guide = guide
        self._rows = Rows(kind.max_sequences, gamma)
        self._queue: FairQueue[Job] = FairQueue({t.name: t.share for t in config.tenants})
        self._queued = np.zeros(len(config.tenants), np.intp)
        self._planner = StepPlanner(
            arm.rule,
            self.cost,
            [tenant.name for tenant in config.tenants],
            kind.max_step_tokens,
            sampled=sampled,
            old_steps=config.scheduler.old_steps,
            guide=guide,
        )
        self._tally = Tally([tenant.name for tenant in config.tenants], gamma, mode)
        self._desk = DraftDesk(
            number,
            self._rows,
            self._planner,
            self._tally,
            measures,
            source,
            drafters,
            cost=self.cost,
            share=config.drafting.share if arm.draft_share is None else arm.draft_share,
            gamma=gamma,
            groups=kind.groups,
            mode=mode,
            guide=guide,
        )
        self._running: _Running | None = None
        self._drafting = False
        self._stepped_at = [-1.0] * kind.groups
        self._free_since = 0.0

    def __len__(self) -> int:
        """Requests that run or wait."""
        return len(self._rows) + len(self._queue)

    @property
    def card(self) -> VerifierCard:
        kind = self.kind
        limits = Limits(1, kind.kv_tokens, kind.kv_tokens)
        return VerifierCard(
            MODEL, MODEL, MODEL, "simulation", limits, 16, kind.max_sequences, kind.max_waiting
        )

    @property
    def local_plans(self) -> int:
        return self._planner.local_plans

    @property
    def guided_plans(self) -> int:
        return self._planner.guided_plans

    # --- what happens to it -----------------------------------------------------------------------

    def registered(self) -> None:
        """Its life in the cluster has begun, as `epoch`."""
        if self._guide is not None:
            self._guide.registered(self.name, self.epoch)

    def submit(self, job: Job, now: float) -> None:
        job.submitted_at = now
        tenant = self._tenants[job.tenant]
        self._queue.push(tenant.name, job.answer, job, tenant.priority)
        self._queued[job.tenant] += 1

    def follow(self, plan: Plan) -> None:
        if self._guide is not None and self._guide.take(plan):
            shares = plan.shares or {tenant.name: tenant.share for tenant in self._tenants}
            self._queue.set_shares(shares)

    def drafted(self, ask: Ask, now: float) -> None:
        """Drafts arrive, in time or not."""
        self._desk.arrived(ask, now)

    def give_up(self, group: int, round_number: int) -> None:
        """A group waits no longer for the drafts that it asked for in this round."""
        self._desk.give_up(group, round_number)

    def drafting_done(self, now: float) -> None:
        self._drafting = False
        self._free_since = now

    # --- its steps --------------------------------------------------------------------------------

    def start(self, now: float) -> float | None:
        """Seconds of the step that begins now, None if none can."""
        if self._running is not None or self._drafting or all(self._desk.outstanding):
            return None
        self._admit()
        group = self._ready_group()
        if group is None:
            return None
        rows, at = self._rows, self._rows.of_group(group)
        decoding, prefilling = at[rows.prefill[at] == 0], at[rows.prefill[at] > 0]
        joining = len(prefilling)
        prefilling, chunks = self._chunks(prefilling, len(decoding))
        self._desk.step_begins(group, len(decoding), self._free_since, now)
        P, context = int(chunks.sum()), int(rows.context[at].sum())
        step = self._planner.plan(rows, decoding, P, context, joining)
        seconds = step.seconds
        if self.kind.step_noise:
            noise = self.kind.step_noise
            seconds *= math.exp(noise * self._rng.standard_normal() - noise**2 / 2)
        self._running = _Running(group, step, seconds, prefilling, chunks)
        return seconds

    def finish(self, now: float) -> Ended:
        """The step is over: commit, and ask for the next drafts."""
        running, self._running = self._running, None
        assert running is not None, "no step runs"
        rows, step, group = self._rows, running.step, running.group
        self._free_since = now
        self._stepped_at[group] = now
        self._desk.step_ends(group)
        accepted = np.minimum(step.lengths, rows.stands[step.at])
        tokens = accepted + 1  # blocks end before the answer does
        self._planner.learn(rows, step)
        self._tally.add(rows, step, accepted, running.seconds - step.seconds)
        rows.left[step.at] -= tokens
        rows.context[step.at] += tokens
        rows.block[step.at] = 0
        begun = self._prefill(running)
        committed = np.concatenate((tokens, np.ones(len(begun), np.intp)))
        whose = rows.tenant[np.concatenate((step.at, begun))]
        self._tally.add_tokens(whose, committed)
        self._measures.add_step(now, step, running.seconds, int(accepted.sum()), committed, whose)
        self._first_tokens(step.at, tokens, now)
        self._first_tokens(begun, np.ones(len(begun), np.intp), now)
        over = self._over(group, now)
        asks, drafting_s = self._desk.ask(group, step, now)
        self._drafting = drafting_s > 0
        return Ended(over, asks, drafting_s)

    def report(self, now: float) -> Report:
        """Since the last one."""
        running = self._rows.tenant[self._rows.order]
        return self._tally.report(
            self.name,
            self.epoch,
            now,
            active=np.bincount(running, minlength=len(self._tenants)),
            queued=self._queued,
            floors=[tenant.floor_tps for tenant in self._tenants],
            free_tokens=self.kind.kv_tokens - self._rows.reserved,
        )

    # --- parts of a step --------------------------------------------------------------------------

    def _admit(self) -> None:
        rows = self._rows
        while len(self._queue) and rows.room and (waiting := self._queue.peek()) is not None:
            job = waiting.item
            if rows.reserved + job.tokens > self.kind.kv_tokens and len(rows):
                return
            self._queue.pop()
            self._queued[job.tenant] -= 1
            drafter = self._drafter_number(job)
            sizes = np.bincount(rows.group[rows.order], minlength=self.kind.groups)
            prefill = job.prompt if self.kind.prefills else 0
            rows.add(job, prefill, int(sizes.argmin()), drafter)

    def _drafter_number(self, job: Job) -> int:
        if job.lease is None or job.lease.drafter is None:
            return -1
        return int(job.lease.drafter.replica_id.rsplit("-", 1)[1])

    def _ready_group(self) -> int | None:
        """Of the groups that wait for nothing, the one that has stood longest."""
        if self.kind.groups == 1:
            return 0 if len(self._rows) else None
        ready = [
            group
            for group, asks in enumerate(self._desk.outstanding)
            if not asks and len(self._rows.of_group(group))
        ]
        return min(ready, key=self._stepped_at.__getitem__, default=None)

    def _chunks(self, prefilling: IntArray, decoding: int) -> tuple[IntArray, IntArray]:
        """Who gets how much of the prompt tokens of a step, in order of arrival."""
        if not len(prefilling):
            return prefilling, prefilling
        budget = min(self.kind.prefill_chunk, self.kind.max_step_tokens - decoding)
        wanted = self._rows.prefill[prefilling]
        before = np.cumsum(wanted) - wanted
        chunks = np.clip(budget - before, 0, wanted)
        return prefilling[chunks > 0], chunks[chunks > 0]

    def _prefill(self, running: _Running) -> IntArray:
        """Those whose prompts are computed now, each with its first token."""
        rows, at = self._rows, running.prefilling
        if not len(at):
            return at
        rows.prefill[at] -= running.chunks
        rows.context[at] += running.chunks
        begun: IntArray = at[rows.prefill[at] == 0]
        rows.left[begun] -= 1
        rows.context[begun] += 1
        return begun

    def _first_tokens(self, at: IntArray, tokens: IntArray, now: float) -> None:
        new = ~self._rows.started[at]
        if not new.any():
            return
        self._rows.started[at] = True
        for slot, count in zip(at[new].tolist(), tokens[new].tolist(), strict=True):
            job = self._rows.jobs[slot]
            assert job is not None
            job.first_at, job.first_tokens = now, count

    def _over(self, group: int, now: float) -> list[Job]:
        at = self._rows.of_group(group)
        ended = at[(self._rows.left[at] == 0) & (self._rows.prefill[at] == 0)]
        over = self._rows.remove(ended) if len(ended) else []
        for job in over:
            job.last_at = now
        return over
