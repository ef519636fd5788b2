"""A drafter in its own thread, and the lines of verifiers that share its passes.

The event loop never waits for a pass: it puts requests into lines, and a pass's replies come back
in one callback.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from dspark.core.drafts import Draft, Drafter, DraftRequest, NeedContext
from dspark.core.errors import DsparkError
from dspark.core.replicas import DrafterLoad
from dspark.core.traces import Drafted
from dspark.drafter.batching import (
    BatchingConfig,
    Context,
    Job,
    Line,
    Reply,
    interleave,
    no_draft,
)

log = logging.getLogger(__name__)

# A verifier that has asked within so many seconds is one that a pass may wait for.
RECENT_S = 1.0
# Seconds between two signs of life to a verifier whose rounds are not answered yet, and how long a
# single pass may take before they stop: a drafter that hangs must not look alive.
BEAT_S = 0.1
STUCK_S = 5.0
# Seconds that leaving waits for the pass in hand.
STOP_S = 5.0

Settled = list[tuple[Job, Reply | None]]


@dataclass(slots=True)
class RunnerFigures:
    """Since the start. passes: calls of the drafter. requests: in them. drafts: replies that hold
    one. tokens: drafted. busy_s: seconds in the drafter. refused: rounds and context not taken, and
    rounds that a failed pass left without a draft, by why."""

    passes: int = 0
    requests: int = 0
    drafts: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)


class DraftRunner:
    """`async with DraftRunner(drafter) as runner: line = runner.open(put); runner.ask(line, ...)`.

    Drafts are hints: a full line answers with an empty draft at once, and so does a pass that
    fails. clock: seconds. watch: told in the event loop of a pass's requests that are traced. A
    thread that is stuck in a pass is left behind after stop_s seconds. All but the thread's own
    part belongs to the event loop.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: BatchingConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        watch: Callable[[list[Drafted]], None] | None = None,
        stop_s: float = STOP_S,
    ) -> None:
        self.config = config or BatchingConfig()
        self.card = drafter.card
        self.figures = RunnerFigures()
        self._drafter = drafter
        self._clock = clock
        self._watch = watch
        self._stop_s = stop_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._opened = 0
        self._turn = 0
        self._beating = False
        self._last_load = (clock(), 0, 0.0)
        self._capacity = 0.0
        # Guards what follows and the lines' jobs; held for moments only, never during a pass.
        self._news = threading.Condition()
        self._lines: list[Line] = []
        self._leaving: list[str] = []  # the drafter's names of sessions to forget
        self._pass_began: float | None = None
        self._stopping = False

    async def __aenter__(self) -> DraftRunner:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._news:
            self._stopping = True
            self._news.notify()
        await asyncio.to_thread(self._thread.join, self._stop_s)
        if self._thread.is_alive():
            log.error("the drafter is stuck in a pass for %g s and is left behind", self._stop_s)

    @property
    def alive(self) -> bool:
        """The drafter's thread runs."""
        return self._thread.is_alive()

    # --- the event loop's side --------------------------------------------------------------------

    @property
    def sessions(self) -> int:
        return sum(line.sessions for line in self._lines)

    @property
    def queue(self) -> int:
        """Requests and context that wait for a pass."""
        return sum(line.waiting for line in self._lines)

    @property
    def lines(self) -> int:
        return len(self._lines)

    def open(self, put: Callable[[Sequence[Reply]], None]) -> Line:
        """A verifier's own line; put is called with replies, and with none as a sign of life."""
        self._opened += 1
        line = Line(self._opened, self.config, put)
        with self._news:
            self._lines.append(line)
        return line

    def close(self, line: Line) -> None:
        """The verifier is gone: its sessions are forgotten, nothing is kept for it."""
        with self._news:
            if line.closed:
                return
            line.closed = True
            self._lines.remove(line)
            self._leaving += line.keys()
            self._news.notify()

    def submit(
        self,
        line: Line,
        contexts: Iterable[Context] = (),
        requests: Iterable[DraftRequest] = (),
        closed: Iterable[str] = (),
    ) -> None:
        """One message's worth, in this order: sessions that are closed, context, requests."""
        now, refused = self._clock(), []
        with self._news:
            if line.closed:
                return
            self._leaving += [key for session in closed if (key := line.forget(session))]
            for context in contexts:
                if not line.context(context, now):
                    self.figures.refused["context over the queue's bound"] += 1
            for request in requests:
                if not line.ask(request, now):
                    self.figures.refused["queue full"] += 1
                    refused.append(no_draft(request.session, request.round))
            self._leaving += line.overflow()
            self._news.notify()
        if refused:
            line.put(refused)
        if line.owed and not self._beating:
            self._beating = True
            self._schedule_beat()

    def load(self) -> DrafterLoad:
        """Since the last call."""
        now, figures = self._clock(), self.figures
        then, tokens, busy_s = self._last_load
        self._last_load = (now, figures.tokens, figures.busy_s)
        made, busy = figures.tokens - tokens, figures.busy_s - busy_s
        if made and busy > 0:
            self._capacity = made / busy
        return DrafterLoad(
            sessions=self.sessions,
            queue=self.queue,
            tokens_per_s=made / (now - then) if now > then else 0.0,
            capacity_tokens_per_s=self._capacity,
        )

    def _schedule_beat(self) -> None:
        assert self._loop is not None, "the runner is not started"
        self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        """A sign of life to all who wait, as long as the drafter gets on."""
        began = self._pass_began
        stuck = began is not None and self._clock() - began > STUCK_S
        waiting = [line for line in self._lines if line.owed]
        self._beating = bool(waiting)
        for line in waiting:
            if not stuck:
                line.put(())
        if waiting:
            self._schedule_beat()

    def _deliver(self, settled: Settled, traced: list[Drafted]) -> None:
        if traced and self._watch is not None:
            self._watch(traced)
        by_line: dict[Line, list[Reply]] = {}
        with self._news:
            for job, reply in settled:
                if job.line.closed:
                    continue
                told = job.line.settle(job, reply)
                if told is not None:
                    by_line.setdefault(job.line, []).append(told)
        for line, replies in by_line.items():
            line.put(replies)

    # --- the drafter's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._next()) is not None:
            leaving, batch = work
            for key in leaving:
                self._forget(key)
            if batch:
                settled, traced = self._pass(batch)
                assert self._loop is not None
                try:
                    self._loop.call_soon_threadsafe(self._deliver, settled, traced)
                except RuntimeError:  # the loop is closed: nobody is left to be told
                    log.debug("drafts came after the event loop was closed")

    def _next(self) -> tuple[list[str], list[Job]] | None:
        """What to do next: sessions to forget, then jobs of one pass. None: stop."""
        with self._news:
            self._pass_began = None
            while not (self._stopping or self._leaving or self._ready()):
                self._news.wait()
            if self._stopping:
                return None
            while (left := self._time_to_wait()) > 0:
                self._news.wait(left)
            leaving, self._leaving = self._leaving, []
            batch = self._take()
            self._pass_began = self._clock()
            return leaving, batch

    def _ready(self) -> bool:
        return any(line.waiting for line in self._lines)

    def _time_to_wait(self) -> float:
        """Seconds that the pass may still wait for a verifier that has nothing here yet; 0 when
        none can be expected to ask."""
        if self._stopping or not self.config.window_s or not self._ready():
            return 0.0
        firsts = [line.first_jobs() for line in self._lines]
        if sum(map(len, firsts)) >= self.config.max_batch:
            return 0.0
        now = self._clock()
        if not any(not line.waiting and now - line.asked_at < RECENT_S for line in self._lines):
            return 0.0
        oldest = min(jobs[0].arrived for jobs in firsts if jobs)
        return max(0.0, oldest + self.config.window_s - now)

    def _take(self) -> list[Job]:
        if not self._lines:
            return []
        self._turn += 1  # another verifier comes first each time
        begin = self._turn % len(self._lines)
        lines = self._lines[begin:] + self._lines[:begin]
        batch = interleave([line.first_jobs() for line in lines], self.config.max_batch)
        for job in batch:
            job.line.take(job)
        return batch

    def _pass(self, batch: list[Job]) -> tuple[Settled, list[Drafted]]:
        begin, figures = self._clock(), self.figures
        replies = self._propose([job.request for job in batch])
        end = self._clock()
        figures.busy_s += end - begin
        figures.requests += len(batch)
        for reply in replies:
            if isinstance(reply, Draft) and reply.ids:
                figures.drafts += 1
                figures.tokens += len(reply.ids)
        settled = list(zip(batch, replies, strict=True))
        if self._watch is None:
            return settled, []
        return settled, [
            Drafted(
                job.request.traceparent,
                job.request.round,
                job.arrived,
                begin,
                end,
                len(batch),
                len(reply.ids) if isinstance(reply, Draft) else 0,
            )
            for job, reply in settled
            if job.wanted and job.request.traceparent
        ]

    def _propose(self, requests: list[DraftRequest]) -> list[Reply | None]:
        """One reply a request, None where the drafter failed. What fails together is tried one by
        one, so that one verifier's request costs no other's."""
        self.figures.passes += 1
        try:
            replies = list(self._drafter.propose(requests))
            if len(replies) != len(requests):
                raise DsparkError(f"{len(replies)} replies to {len(requests)} requests")
            for reply in replies:
                if not isinstance(reply, Draft | NeedContext):
                    raise DsparkError(f"a reply is a {type(reply).__name__}")
        except Exception as error:  # a drafter's bug or lack of memory ends no thread
            if len(requests) > 1:
                return [reply for one in requests for reply in self._propose([one])]
            self._failed(error)
            return [None]
        return [*replies]

    def _forget(self, key: str) -> None:
        try:
            self._drafter.close(key)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        kind = f"drafter failed: {type(error).__name__}"
        self.figures.refused[kind] += 1
        if self.figures.refused[kind] == 1:  # once a kind: it may happen with every pass
            log.error("the drafter %r failed", self.card.drafter_id, exc_info=error)
