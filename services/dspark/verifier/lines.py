"""Runs on their way from the engine's thread to a reader in the event loop.

Each side writes its own fields: the engine's thread counts what it posts, the event loop what was
taken. Who pauses is decided in the engine's thread alone, so there is no lock: a count that was
read too early is read again at the thread's next turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from dspark.core.errors import DsparkError, InvalidRequest
from dspark.core.requests import Committed, Event, Request
from dspark.verifier.engine import Key

# Request id, choice, attempt.
Name = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Refused:
    """A run that the engine did not take: its only event. error: as it was raised."""

    error: Exception


@dataclass(slots=True, eq=False)
class Run:
    """One choice between engine and reader.

    The engine's thread writes: posted, events so far; full, paused because too many are unread;
    held, paused because its reader asked for it. The event loop writes: taken, events so far.
    """

    request: Request
    line: Line
    posted: int = 0
    full: bool = False
    held: bool = False
    taken: int = 0

    @property
    def key(self) -> Key:
        return self.request.request_id, self.request.choice

    @property
    def name(self) -> Name:
        return *self.key, self.request.attempt

    @property
    def unread(self) -> int:
        return self.posted - self.taken


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step told one reader; without events a sign of life. steps: done by the engine."""

    events: list[tuple[Run, Event | Refused]]
    steps: int


class Desk(Protocol):
    """The engine's side of a line. None of these waits for the engine."""

    def submit(self, run: Run) -> None:
        """Raises Overloaded or Unavailable if not even the wish can be taken."""

    def cancel(self, run: Run) -> None: ...

    def hold(self, run: Run, held: bool) -> None: ...

    def taken(self) -> None:
        """A run that is full has been read from."""


class Line:
    """One reader's runs, any number of them. All of it belongs to the event loop.

    Each run that is started gets any number of Committed and one Finished, or one Refused.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._open: dict[Name, Run] = {}
        self._inbox: deque[Batch] = deque()
        self._news = asyncio.Event()
        self._steps = 0
        self._finishing = False
        self._closed = False

    def start(self, request: Request) -> None:
        run = Run(request, self)
        if run.name in self._open:
            self.refuse(request, InvalidRequest("attempt", request.attempt, "is running already"))
            return
        try:
            self._desk.submit(run)
        except DsparkError as error:
            self.refuse(request, error)
        else:
            self._open[run.name] = run

    def refuse(self, request: Request, error: DsparkError) -> None:
        """Answer a run that the engine need not see."""
        self.put(Batch([(Run(request, self), Refused(error))], self._steps))

    def cancel(self, name: Name) -> None:
        """End a run; its Finished still comes. An unknown one is fine."""
        if name in self._open:
            self._desk.cancel(self._open[name])

    def hold(self, name: Name, held: bool) -> None:
        """The reader behind this one cannot take more of a run, or can again."""
        if name in self._open:
            self._desk.hold(self._open[name], held)

    async def next(self) -> Batch | None:
        """The next batch, in the order of steps; None once the line is finished."""
        while not self._inbox:
            if self._finishing and not self._open:
                return None
            self._news.clear()
            await self._news.wait()
        batch = self._inbox.popleft()
        for run, _ in batch.events:
            run.taken += 1
        if any(run.full for run, _ in batch.events):
            self._desk.taken()
        return batch

    def finish(self) -> None:
        """The line ends with the last of the runs that are open."""
        self._finishing = True
        self._news.set()

    def close(self) -> None:
        """The reader is gone: everything it had is cancelled, and nothing is kept for it."""
        self._closed = True
        for run in self._open.values():
            self._desk.cancel(run)
        self._open.clear()
        self._inbox.clear()

    def put(self, batch: Batch) -> None:
        if self._closed:
            return
        for run, event in batch.events:
            if not isinstance(event, Committed) and self._open.get(run.name) is run:
                del self._open[run.name]
        self._steps = batch.steps
        self._inbox.append(batch)
        self._news.set()

    def beat(self, steps: int) -> None:
        """A sign of life, where nothing newer waits to be read."""
        if not self._inbox:
            self.put(Batch([], steps))
