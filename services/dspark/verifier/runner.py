"""An engine in its own thread, and coroutines that talk to it.

The event loop never waits for a step: commands go in through a queue, events come back in one
callback a step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar, cast

from dspark.core.errors import Overloaded, Unavailable
from dspark.core.requests import Committed, Event, Finished, Request
from dspark.core.traces import RunTrace
from dspark.verifier.engine import Engine, EngineEvent, Key
from dspark.verifier.lines import Batch, Line, Refused, Run
from dspark.verifier.sources import Bell

log = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]
Events = list[tuple[Run, Event | Refused]]

# Seconds between two looks at deadlines while no step is done, because every reader stands still or
# drafts are waited for.
TICK_S = 0.05
# Seconds that leaving waits for the step in hand, at least: twice the longest step, which a sign of
# life is half of (`deploy.single.heartbeat_s`), may take more.
STOP_S = 5.0
# A step that takes longer than this, or than ten of the longest (see above), hangs.
STUCK_S = 10.0
STUCK_BEATS = 20
# Steps that fail one after the other, with none between them that did not, until the engine gives
# up: it would take in whatever is sent, being the emptiest of all, and end it with an error.
FAILED_STEPS = 5


class EngineRunner:
    """`async with EngineRunner(engine) as runner: async for event in runner.run(request)`.

    A reader may lag by `buffered_events` of a choice; then its sequence pauses until half of them
    are read. Leaving the context stops the thread; what still runs then ends with `Unavailable`. A
    thread that is stuck in a step is left behind after stop_s seconds (None: by STOP_S). It counts
    as dead after stuck_s in one (None: by STUCK_S), or once FAILED_STEPS have failed in a row.
    traced: told in the event loop of traced runs that are over; None traces none.
    """

    def __init__(
        self,
        engine: Engine,
        traced: Callable[[list[RunTrace]], None] | None = None,
        *,
        stop_s: float | None = None,
        stuck_s: float | None = None,
    ) -> None:
        self.engine = engine
        self._traced = traced
        if traced is not None:
            engine.traces.wanted = True
        self._buffered = engine.config.buffered_events
        self._heartbeat_s = engine.config.heartbeat_s
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._woken = False
        self._closed = False  # the event loop says so: `_stop` is the last command but cancels
        self._stop_s = max(STOP_S, 4 * self._heartbeat_s) if stop_s is None else stop_s
        self._stuck_s = (
            max(STUCK_S, STUCK_BEATS * self._heartbeat_s) if stuck_s is None else stuck_s
        )
        # The event loop's: runs without their last event, and who waits for an answer.
        self._open: set[Run] = set()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._step_began: float | None = None  # the thread's to set, anybody's to read
        self._over = False
        # The rest is the engine's thread's.
        self._stopping = False
        self._runs: dict[Key, Run] = {}
        self._full: set[Run] = set()
        self._checked = False
        self._last_beat = time.monotonic()

    async def __aenter__(self) -> EngineRunner:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, self._stop_s)
        if self._thread.is_alive():
            log.error("the engine is stuck in a step for %g s and is left behind", self._stop_s)
        self._end()

    @property
    def alive(self) -> bool:
        """The engine's thread runs and gets on; if not, whoever started it has to replace it."""
        began = self._step_began
        stuck = began is not None and time.monotonic() - began > self._stuck_s
        return self._thread.is_alive() and not self._over and not stuck

    # --- the event loop's side --------------------------------------------------------------------

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one choice, the last one `Finished`. Raises InvalidRequest, Overloaded, and
        Unavailable once the runner is stopped.

        Closing the iterator early cancels the choice in the engine.
        """
        line = self.line()
        line.start(request)
        line.finish()
        try:
            while (batch := await line.next()) is not None:
                for _, event in batch.events:
                    if isinstance(event, Refused):
                        raise event.error
                    yield event
        finally:
            line.close()

    def line(self) -> Line:
        """A reader's own way to start and follow any number of runs; it has to be closed."""
        assert self._loop is not None, "the runner is not started"
        return Line(self)

    async def between_steps(self, look: Callable[[Engine], T]) -> T:
        """What `look` says of the engine, called on the engine's thread between two steps. Raises
        Unavailable once the runner is stopped, and what `look` raises."""
        assert self._loop is not None, "the runner is not started"
        if self._closed:
            raise Unavailable("the engine is stopped")
        told: asyncio.Future[T] = self._loop.create_future()
        self._waiting.add(told)
        told.add_done_callback(self._waiting.discard)

        def answer() -> None:
            try:
                found = look(self.engine)
            except Exception as error:  # the asker's, not the engine's
                self._call(_settle, told, None, error)
            else:
                self._call(_settle, told, found, None)

        self._commands.put(answer)
        return await told

    def bell(self) -> Bell:
        """For a link that the engine will adopt: it ends a wait for drafts."""
        return Bell(self.engine.clock, self.wake)

    def wake(self) -> None:
        """From any thread: there is something new to look at. Many calls are one command."""
        if not self._woken:
            self._woken = True
            self._commands.put(self._wake)

    def _wake(self) -> None:
        # Whatever comes from now on may be too late for the coming step's look.
        self._woken = False

    def submit(self, run: Run) -> None:
        if self._closed:
            raise Unavailable("the engine is stopped")
        # During a step wishes only pile up: their number has the bound of the engine's own queue.
        if self._commands.qsize() >= self.engine.config.max_waiting:
            raise Overloaded(
                f"{self.engine.config.max_waiting} requests came within one step",
                self.engine.config.retry_after_s,
            )
        self._open.add(run)
        self._commands.put(lambda: self._submit(run))

    def cancel(self, run: Run) -> None:
        self._commands.put(lambda: self._cancel(run))

    def hold(self, run: Run, held: bool) -> None:
        self._commands.put(lambda: self._hold(run, held))

    def taken(self) -> None:
        self._commands.put(self._go_on)

    def _put(self, by_line: dict[Line, Events], steps: int) -> None:
        for line, events in by_line.items():
            self._open.difference_update(
                run for run, event in events if not isinstance(event, Committed)
            )
            line.put(Batch(events, steps))

    def _end(self) -> None:
        """The thread is over or left behind: nothing that it still owes will come from it."""
        self._closed = True
        for told in list(self._waiting):
            _settle(told, None, Unavailable("the engine has stopped"))
        by_line: dict[Line, Events] = defaultdict(list)
        for run in self._open:
            by_line[run.line].append((run, Refused(Unavailable("the engine has stopped"))))
        self._put(by_line, self.engine.figures.steps)

    # --- the engine's thread ----------------------------------------------------------------------

    def _run_engine(self) -> None:
        try:
            self._step_until_stopped()
        finally:
            self._over = True
            self._call(self._end)

    def _step_until_stopped(self) -> None:
        failed, steps = 0, self.engine.figures.steps
        while not self._stopping or not self.engine.idle:
            try:
                self._take_commands()
                self._go_on()
                self._deliver(self._step())
                self._beat()
            except Exception as error:
                log.exception("a step failed; every running request ends with an error")
                self.engine.fail(Unavailable(f"the engine's step failed: {error}"))
                failed = failed + 1 if self.engine.figures.steps == steps else 1
                steps = self.engine.figures.steps
                if failed >= FAILED_STEPS:
                    log.critical("%d steps failed in a row: the engine gives up", failed)
                    self._deliver(self.engine.take_events())
                    return

    def _step(self) -> list[EngineEvent]:
        self._step_began = time.monotonic()
        try:
            return self.engine.step()
        finally:
            self._step_began = None

    def _take_commands(self) -> None:
        """Do what was asked for until now; wait for the first of it while there is nothing else to
        do. Commands that keep coming are for the next time: they may not keep time from passing
        (steps, deadlines, signs of life)."""
        if self.engine.idle and not self._checked:  # once: the scheduler asks all the time
            self._checked = True
            self.engine.check_integrity()
        patience = self.engine.patience
        waits = (self.engine.stalled or patience > 0) and not self._stopping
        tick = None if self.engine.idle else min(TICK_S, self._heartbeat_s)
        if tick is not None and not self.engine.stalled:
            tick = min(tick, patience)
        for _ in range(max(self._commands.qsize(), 1)):
            try:
                self._commands.get(waits, tick)()
            except queue.Empty:
                return
            waits = False

    def _submit(self, run: Run) -> None:
        try:
            if self._stopping:
                raise Unavailable("the engine is stopping")
            self.engine.submit(run.request)
        except Exception as error:  # ours or a bug's, it is this caller's alone
            self._post([(run, Refused(error))])
            return
        # An older attempt's last event must still reach its own reader.
        self._deliver(self.engine.take_events())
        self._runs[run.key] = run
        self._checked = False

    def _cancel(self, run: Run) -> None:
        if self._runs.get(run.key) is run:
            self.engine.cancel(*run.key)

    def _hold(self, run: Run, held: bool) -> None:
        if self._runs.get(run.key) is run:
            run.held = held
            self.engine.pause(*run.key, run.held or run.full)

    def _go_on(self) -> None:
        """Step those again whose readers have caught up."""
        for run in [run for run in self._full if run.unread <= self._buffered // 2]:
            run.full = False
            self._full.remove(run)
            self.engine.pause(*run.key, run.held)

    def _stop(self) -> None:
        self._stopping = True
        self.engine.fail(Unavailable("the engine is stopping"))

    def _deliver(self, events: Iterable[EngineEvent]) -> None:
        told: Events = []
        for key, event in events:
            run = self._runs[key]
            run.posted += 1
            told.append((run, event))
            if isinstance(event, Finished):
                del self._runs[key]
                self._full.discard(run)
            elif run.unread >= self._buffered and not run.full:
                run.full = True
                self._full.add(run)
                self.engine.pause(*key, True)
        if told:
            self._post(told)
        if self._traced is not None and (over := self.engine.traces.take()):
            self._call(self._traced, over)

    def _beat(self) -> None:
        now = time.monotonic()
        if self._runs and now - self._last_beat >= self._heartbeat_s:
            self._last_beat = now
            lines = {run.line for run in self._runs.values()}
            self._call(_beat, lines, self.engine.figures.steps)

    def _post(self, told: Events) -> None:
        """From the engine's thread to the readers, in one call for all of them."""
        by_line: dict[Line, Events] = defaultdict(list)
        for run, event in told:
            by_line[run.line].append((run, event))
        self._call(self._put, by_line, self.engine.figures.steps)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("an event came after the event loop was closed")


def _settle(told: asyncio.Future[T], found: T | None, error: Exception | None) -> None:
    if told.done():  # nobody waits any more
        return
    if error is None:
        told.set_result(cast(T, found))
    else:
        told.set_exception(error)


def _beat(lines: Iterable[Line], steps: int) -> None:
    for line in lines:
        line.beat(steps)
