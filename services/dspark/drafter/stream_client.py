"""One stream of a verifier to a drafter, after the hellos and to its end.

Belongs to the event loop. What was asked is answered once: by the drafter, as `Faulty` where that
is no draft, or as `Lost`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dspark.core.drafts import Answer, DraftRequest, Faulty, Lost
from dspark.core.errors import DsparkError, InvalidRequest, Unavailable
from dspark.drafter.hello_client import Connection
from dspark.drafter.rounds import OpenRounds
from dspark.drafter.wire_client import (
    draft_from_wire,
    need_from_wire,
    step_to_wire,
    wire_bytes,
)
from dspark.v1 import drafting_pb2 as pb

log = logging.getLogger(__name__)

# Bytes that wait for a drafter to read before nothing more is asked of it: one request may pass
# the bound, or a window larger than it could never be sent.
MAX_UNSENT_BYTES = 64 * 2**20
# Bytes of a step from which its messages are made in another thread: here they take 0.2 ms.
LARGE_BYTES = 2**18
# Seconds that a closed session waits for the next step's message to tell it.
CLOSE_S = 0.05


@dataclass(slots=True)
class LinkFigures:
    """Since the start, plain numbers. Messages and bytes are payloads, without the hellos.
    connected: streams so far. reply_s: usual seconds from asking to the answer."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    connected: int = 0
    reply_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """What is to be said at once. size: bytes, about."""

    closed: Sequence[str]
    requests: Sequence[DraftRequest]
    size: int

    @property
    def large(self) -> bool:
        return self.size > LARGE_BYTES


class DraftingStream:
    """`await stream.serve()` runs it to its end; meanwhile `ask`. lost: why it is over, or None.

    tell: takes answers; with none, `draining` has changed. vocab_size: of the target.
    """

    def __init__(
        self,
        connection: Connection,
        vocab_size: int,
        figures: LinkFigures,
        tell: Callable[[Sequence[Answer]], None],
        *,
        silent_s: float,
        clock: Callable[[], float],
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self.lost: DsparkError | None = None
        self.draining = False
        self.connection = connection
        self._vocab_size = vocab_size
        self._figures = figures
        self._tell = tell
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._rounds = OpenRounds(silent_s, figures.reply_s)
        self._closed: list[str] = []
        self._outbox: asyncio.Queue[_Step] = asyncio.Queue()
        self._unsent = 0
        self._max_unsent = max_unsent_bytes
        self._tick: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()

    async def serve(self) -> DsparkError:
        """Until the stream ends: why."""
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            await self._over.wait()
        finally:
            self.lose(Unavailable("this link is closed"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.connection.close()
        assert self.lost is not None
        return self.lost

    def ask(self, requests: Sequence[DraftRequest]) -> None:
        if self.lost is not None:
            self._tell_lost([Lost(r.session, r.round, str(self.lost)) for r in requests])
            return
        now, size = self._clock(), 0
        taken, refused = list[DraftRequest](), list[Lost]()
        for request in requests:
            if (unsent := self._unsent + size) < self._max_unsent:
                size += wire_bytes(request, self.connection.offer)
                self._rounds.add(request, now)
                taken.append(request)
            else:
                self._rounds.drop(request.session)
                why = f"{unsent} bytes wait for the drafter, the limit is {self._max_unsent}"
                refused.append(Lost(request.session, request.round, why))
        self._send(taken, size)
        self._tell_lost(refused)
        if self._rounds and self._tick is None:
            self._tick = self._loop.call_later(self._rounds.tick_s, self._on_tick)

    def forget(self, session: str) -> None:
        self._rounds.drop(session)
        self._closed.append(session)
        if self._flush is None and self.lost is None:
            self._flush = self._loop.call_later(CLOSE_S, self._send, ())

    def lose(self, why: DsparkError) -> None:
        """The end: what is asked is lost."""
        if self.lost is not None:
            return
        self.lost = why
        for timer in (self._tick, self._flush):
            if timer is not None:
                timer.cancel()
        self._tell_lost(self._rounds.lose(str(why)))
        self._over.set()

    def _send(self, requests: Sequence[DraftRequest], size: int = 0) -> None:
        """One step's worth, and the sessions that were closed since the last."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        closed, self._closed = self._closed, []
        if closed or requests:
            self._unsent += size
            self._outbox.put_nowait(_Step(closed, requests, size))

    async def _write(self) -> None:
        try:
            while True:
                await self._write_step(await self._outbox.get())
        except Exception as error:  # what cannot be said, in a way that no check foresaw
            log.exception("what is asked of a drafter cannot be written")
            self.lose(Unavailable(f"a message cannot be written: {error!r}"))

    async def _write_step(self, step: _Step) -> None:
        """Messages are made one by one as the drafter takes them."""
        left, refused = step.size, list[Lost]()

        def refuse(request: DraftRequest, error: Exception) -> None:
            refused.append(Lost(request.session, request.round, f"cannot be asked: {error}"))

        messages = step_to_wire(step.closed, step.requests, self.connection.offer, refuse)
        while True:
            make = partial(next, messages, None)
            message = await asyncio.to_thread(make) if step.large else make()
            self._tell_lost([r for r in refused if self._rounds.unsay(r.session, r.round)])
            refused.clear()
            if message is None:
                break
            size = message.ByteSize()
            self._figures.messages_sent += 1
            self._figures.bytes_sent += size
            await self.connection.write(message)
            if step.large:  # it takes them, and cannot have been asked yet
                self._rounds.heard()
            self._unsent -= min(size, left)
            left -= min(size, left)
        self._unsent -= left

    async def _read(self) -> None:
        try:
            while True:
                response = await self.connection.read()
                self._rounds.heard()
                self._figures.messages_received += 1
                self._figures.bytes_received += response.ByteSize()
                self._take(response)
        except DsparkError as error:
            why = error if not isinstance(error, InvalidRequest) else Unavailable(str(error))
        except Exception as error:  # what it sent is no sense at all
            log.exception("a drafter's message cannot be read")
            why = Unavailable(f"a message cannot be read: {error!r}")
        self.lose(why)

    def _take(self, response: pb.ProposeResponse) -> None:
        """Raises InvalidRequest for what is no message of a drafter."""
        if response.WhichOneof("message") != "replies":
            raise InvalidRequest("message", response.WhichOneof("message"), "must be replies")
        changed = self.draining != response.replies.draining
        self.draining = response.replies.draining
        told = [self._answer(reply) for reply in response.replies.replies]
        answers = [answer for answer in told if answer is not None]
        if answers or changed:
            self._tell(answers)

    def _answer(self, reply: pb.DraftReply) -> Answer | None:
        """What a reply is to who asked; None if nobody waits for it."""
        now, figures = self._clock(), self._figures
        if reply.WhichOneof("reply") == "draft":
            session = reply.draft.session
            asked = self._rounds.drafted(session, reply.draft.round, now)
        else:
            session = reply.need_context.session
            asked = self._rounds.needed(session, reply.need_context.start, now)
        if asked is None:
            return None
        figures.reply_s = self._rounds.usual_s
        if reply.WhichOneof("reply") != "draft":
            return need_from_wire(reply.need_context)
        try:
            return draft_from_wire(reply.draft, asked, self._vocab_size)
        except InvalidRequest as error:
            return Faulty(session, asked.round, f"the drafter's reply is no draft: {error}")

    def _on_tick(self) -> None:
        self._tick = None
        if not self._rounds:
            return
        if self._rounds.tick():
            bound = self._rounds.bound_s
            self.lose(Unavailable(f"the drafter has said nothing for {bound:.2f} s"))
            return
        self._tell_lost(self._rounds.late(self._clock()))
        self._tick = self._loop.call_later(self._rounds.tick_s, self._on_tick)

    def _tell_lost(self, lost: Sequence[Lost]) -> None:
        if lost:
            self._tell(lost)
