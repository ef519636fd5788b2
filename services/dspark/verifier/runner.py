"""An engine in its own thread, and coroutines that talk to it.

The event loop never waits for a step: requests go in through a queue, events come back in one
callback a step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from dspark.core.errors import Unavailable
from dspark.core.requests import Event, Finished, Request
from dspark.verifier.engine import Engine, EngineEvent, Key

log = logging.getLogger(__name__)

Command = Callable[[], None]


class EngineRunner:
    """`async with EngineRunner(engine) as runner: async for event in runner.run(request)`.

    Leaving the context stops the thread; what still runs then ends with `Unavailable`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[Key, asyncio.Queue[Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._stopping = False  # the engine's thread says so
        self._closed = False  # the event loop does: nothing is put into `_commands` after `_stop`

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
        await asyncio.to_thread(self._thread.join)

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one choice, the last one `Finished`. Raises InvalidRequest, Overloaded, and
        Unavailable once the runner is stopped.

        Closing the iterator early cancels the choice in the engine.
        """
        assert self._loop is not None, "the runner is not started"
        if self._closed:
            raise Unavailable("the engine is stopped")
        key = (request.request_id, request.choice)
        events: asyncio.Queue[Event] = asyncio.Queue()
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._commands.put(lambda: self._submit(request, events, accepted))
        finished = False
        try:
            await accepted
            while not finished:
                event = await events.get()
                finished = isinstance(event, Finished)
                yield event
        finally:
            if not finished:
                self._commands.put(lambda: self._cancel(key, events))

    def _submit(
        self, request: Request, events: asyncio.Queue[Event], accepted: asyncio.Future[None]
    ) -> None:
        key = (request.request_id, request.choice)
        try:
            if self._stopping:
                raise Unavailable("the engine is stopping")
            self.engine.submit(request)
        except Exception as error:  # ours or a bug's, it is this caller's alone
            self._call(_settle, accepted, error)
            return
        # An older attempt's last event must still reach its own stream.
        self._deliver(self.engine.take_events())
        self._streams[key] = events
        self._call(_settle, accepted, None)

    def _cancel(self, key: Key, events: asyncio.Queue[Event]) -> None:
        if self._streams.get(key) is events:
            del self._streams[key]
            self.engine.cancel(*key)

    def _run_engine(self) -> None:
        while not self._stopping or not self.engine.idle:
            try:
                self._take_commands()
                self._deliver(self.engine.step())
            except Exception as error:
                log.exception("a step failed; every running request ends with an error")
                self.engine.fail(Unavailable(f"the engine's step failed: {error}"))

    def _take_commands(self) -> None:
        """Do all that was asked for, and wait for something to do while there is nothing."""
        while True:
            try:
                self._commands.get(block=self.engine.idle and not self._stopping)()
            except queue.Empty:
                return
            if self.engine.idle:
                self.engine.check_integrity()

    def _stop(self) -> None:
        self._stopping = True
        self.engine.fail(Unavailable("the engine is stopping"))

    def _deliver(self, events: list[EngineEvent]) -> None:
        """From the engine's thread to the readers' queues, in one call for all of them."""
        posts = []
        for key, event in events:
            stream = self._streams.get(key)
            if stream is not None:
                posts.append((stream, event))
                if isinstance(event, Finished):
                    del self._streams[key]
        if posts:
            self._call(_post, posts)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("an event came after the event loop was closed")


def _settle(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.done():
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)


def _post(posts: list[tuple[asyncio.Queue[Event], Event]]) -> None:
    for stream, event in posts:
        stream.put_nowait(event)
