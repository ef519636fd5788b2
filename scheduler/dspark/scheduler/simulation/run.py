"""One simulation: events in the order of their time, until it is over or stopped."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from dspark.core.errors import DeadlineExceeded, Overloaded
from dspark.core.plans import Plan
from dspark.scheduler.simulation.centre import DRAFTER, Centre, Timings
from dspark.scheduler.simulation.config import Arm, SimulationConfig
from dspark.scheduler.simulation.drafters import Ask, Drafter
from dspark.scheduler.simulation.measures import Measures
from dspark.scheduler.simulation.planning import MakeGuide
from dspark.scheduler.simulation.profiles import Source
from dspark.scheduler.simulation.requests import Gaps, Job, Requests
from dspark.scheduler.simulation.verifier import Verifier

# Users of a closed loop begin spread over so many seconds.
BEGIN_S = 0.1
# Events between two looks at whether to stop, and two words of progress.
LOOK_EVENTS = 2000

Handler = Callable[..., Coroutine[Any, Any, None] | None]


@dataclass(frozen=True, slots=True)
class Ran:
    """What is left of a simulation. seconds: simulated, warm-up left out. whole: not stopped."""

    measures: Measures
    seconds: float
    whole: bool
    answered: int
    drafters_busy: tuple[float, ...]
    store_calls: dict[str, int]
    simulated_s: float
    timings: Timings
    local_plans: int
    guided_plans: int


class Simulation:
    """guide: makes what a verifier follows plans with; needed where an arm is central. progress:
    told (simulated seconds, answered). stop: asked now and then."""

    def __init__(
        self,
        config: SimulationConfig,
        arm: Arm,
        guide: MakeGuide | None = None,
        progress: Callable[[float, int], None] = lambda now, answered: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if arm.central and guide is None:
            raise ValueError("a central arm needs a guide")
        self._config = config
        self._arm = arm
        self._progress = progress
        self._stop = stop
        self._now = 0.0
        self._answered = 0
        self._events: list[tuple[float, int, Handler, tuple[Any, ...]]] = []
        self._number = count()
        self._measures = Measures(len(config.tenants), config.warmup_s)
        gamma = config.gamma(arm)
        drafters = [kind for kind in config.drafters for _ in range(kind.count)]
        self._drafters = [Drafter(kind, gamma) for kind in drafters]
        self._names = [f"{DRAFTER}-{d}" for d in range(len(drafters))]
        self._sessions = [0] * len(drafters)
        self._held: dict[int, Job] = {}
        self._rng, source, noise, gaps = (
            np.random.default_rng([config.seed, stream]) for stream in range(4)
        )
        self._requests = Requests(config, self._rng)
        self._gaps = Gaps(config.arrivals, gaps)
        shared = Source(config.domains, gamma, source)
        kinds = [kind for kind in config.verifiers for _ in range(kind.count)]
        self._verifiers = [
            Verifier(
                number,
                kind,
                arm,
                config,
                self._names,
                shared,
                noise,
                self._measures,
                guide(self._clock) if arm.central and guide is not None else None,
            )
            for number, kind in enumerate(kinds)
        ]
        self._by_name = {verifier.name: verifier for verifier in self._verifiers}
        self._centre = Centre(config, self._clock, random.Random(config.seed), gamma)

    def _clock(self) -> float:
        return self._now

    async def run(self) -> Ran:
        config = self._config
        await self._centre.join(self._verifiers, self._names)
        for verifier in self._verifiers:
            verifier.registered()
        if config.arrivals.kind == "closed":
            for user in range(config.arrivals.users):
                self._at(BEGIN_S * user / config.arrivals.users, self._arrive, user)
        else:
            self._at(self._gaps.next(), self._arrive, -1)
        self._at(config.scheduler.interval_s, self._round)
        self._at(config.scheduler.heartbeat_s, self._heartbeats)
        whole = await self._through()
        return Ran(
            measures=self._measures,
            seconds=max(self._now - config.warmup_s, 0.0),
            whole=whole,
            answered=self._answered,
            drafters_busy=tuple(drafter.busy_s for drafter in self._drafters),
            store_calls=dict(self._centre.store_calls),
            simulated_s=self._now,
            timings=self._centre.timings,
            local_plans=sum(verifier.local_plans for verifier in self._verifiers),
            guided_plans=sum(verifier.guided_plans for verifier in self._verifiers),
        )

    async def _through(self) -> bool:
        """All events; whether it came to its end."""
        config = self._config
        for number in count(1):
            if number % LOOK_EVENTS == 0:
                self._progress(self._now, self._answered)
                if self._stop():
                    return False
            if config.requests and self._answered >= config.requests:
                return True
            when, _, handler, args = heapq.heappop(self._events)
            if when >= config.duration_s:
                self._now = config.duration_s
                return True
            self._now = when
            if (more := handler(*args)) is not None:
                await more
        return True

    def _at(self, when: float, handler: Handler, *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), handler, args))

    def _later(self, seconds: float, handler: Handler, *args: Any) -> None:
        self._at(self._now + seconds, handler, *args)

    # --- requests ---------------------------------------------------------------------------------

    async def _arrive(self, user: int) -> None:
        if user < 0:
            self._later(self._gaps.next(), self._arrive, -1)
        await self._lease(self._requests.next(self._now, user))

    async def _lease(self, job: Job) -> None:
        try:
            job.lease = await self._centre.acquire(job)
        except (Overloaded, DeadlineExceeded) as error:
            self._measures.add_refusal(self._now, isinstance(error, DeadlineExceeded))
            if job.user >= 0:  # a user comes again
                self._later(getattr(error, "retry_after_s", 1.0), self._arrive, job.user)
            return
        self._held[job.number] = job
        if job.lease.drafter is not None:
            self._sessions[self._drafter_of(job)] += 1
        self._later(self._config.network_s, self._submit, job)

    def _drafter_of(self, job: Job) -> int:
        assert job.lease is not None and job.lease.drafter is not None  # noqa: PT018
        return int(job.lease.drafter.replica_id.rsplit("-", 1)[1])

    def _submit(self, job: Job) -> None:
        assert job.lease is not None, "a request without a lease cannot be submitted"
        verifier = self._by_name[job.lease.verifier.replica_id]
        verifier.submit(job, self._now)
        self._start(verifier)

    async def _answer(self, job: Job) -> None:
        self._answered += 1
        self._measures.add_job(self._now, job)
        assert job.lease is not None
        del self._held[job.number]
        if job.lease.drafter is not None:
            self._sessions[self._drafter_of(job)] -= 1
        await self._centre.release(job.lease)
        if job.user >= 0:
            self._later(self._config.arrivals.think_s, self._arrive, job.user)

    # --- verifiers and drafters -------------------------------------------------------------------

    def _start(self, verifier: Verifier) -> None:
        seconds = verifier.start(self._now)
        if seconds is not None:
            self._later(seconds, self._step_over, verifier)

    async def _step_over(self, verifier: Verifier) -> None:
        ended = verifier.finish(self._now)
        for ask in ended.asks:
            self._later(self._config.network_s, self._asked, ask)
        if ended.asks:
            first = ended.asks[0]
            self._later(
                self._config.drafting.timeout_s, self._give_up, verifier, first.group, first.round
            )
        for job in ended.over:
            await self._answer(job)
        if ended.drafting_s:
            self._later(ended.drafting_s, self._drafted_beside, verifier)
        else:
            self._start(verifier)

    def _drafted_beside(self, verifier: Verifier) -> None:
        verifier.drafting_done(self._now)
        self._start(verifier)

    def _asked(self, ask: Ask) -> None:
        self._drafters[ask.drafter].put(ask)
        self._pass(ask.drafter)

    def _pass(self, d: int) -> None:
        seconds = self._drafters[d].start()
        if seconds is not None:
            self._later(seconds, self._pass_over, d)

    def _pass_over(self, d: int) -> None:
        for ask in self._drafters[d].finish():
            self._later(self._config.network_s, self._drafts, ask)
        self._pass(d)

    def _drafts(self, ask: Ask) -> None:
        verifier = self._verifiers[ask.verifier]
        verifier.drafted(ask, self._now)
        self._start(verifier)

    def _give_up(self, verifier: Verifier, group: int, round_number: int) -> None:
        verifier.give_up(group, round_number)
        self._start(verifier)

    # --- the scheduler ----------------------------------------------------------------------------

    async def _round(self) -> None:
        self._later(self._config.scheduler.interval_s, self._round)
        reports = [verifier.report(self._now) for verifier in self._verifiers]
        plans = await self._centre.round(reports, self._arm.central)
        # There and back: what the reports took is added on the plan's way.
        for name, plan in plans.items():
            self._later(2 * self._config.network_s, self._plan, self._by_name[name], plan)

    def _plan(self, verifier: Verifier, plan: Plan) -> None:
        verifier.follow(plan)

    async def _heartbeats(self) -> None:
        self._later(self._config.scheduler.heartbeat_s, self._heartbeats)
        for verifier in self._verifiers:
            await self._centre.heartbeat(verifier.name)
        for d, name in enumerate(self._names):
            load = self._drafters[d].load(self._sessions[d], self._now)
            await self._centre.heartbeat(name, load)
        held: list[list[Any]] = [[] for _ in self._centre.gateways]
        for job in self._held.values():
            held[job.number % len(held)].append(job.lease)
        for gateway, leases in zip(self._centre.gateways, held, strict=True):
            await self._centre.heartbeat(gateway, leases=leases)
