"""A drafter in another process as a `DrafterLink`.

The link lives on an event loop and is used from the engine's thread. It reconnects by itself; while
it is down it says so, and what is asked of it is lost at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from dspark.core.drafts import Answer, DrafterCard, DraftRequest, Lost
from dspark.core.errors import (
    ConfigError,
    DsparkError,
    Fenced,
    InvalidRequest,
    ModelError,
    Unauthenticated,
    Unavailable,
)
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Replica
from dspark.drafter.handshake import DrafterOffer, VerifierFacts, check_fit, sound_tables
from dspark.drafter.hello_client import Connection, Endpoint, connect
from dspark.drafter.projection_client import fetch_projection
from dspark.drafter.stream_client import MAX_UNSENT_BYTES, DraftingStream, LinkFigures

if TYPE_CHECKING:  # torch
    from dspark.models.targets.features import FeatureProjection

log = logging.getLogger(__name__)

# Seconds before the first try to reconnect, and at most; each is shortened by chance by up to half,
# so that verifiers do not come back all at once.
FIRST_RETRY_S = 0.08
MAX_RETRY_S = 2.0
# Seconds after which a stream was a good one: one that is lost sooner may be lost again at once.
STEADY_S = 1.0
# Seconds in which a reconnect must hear a hello, and a drafter's first one.
HELLO_S = 2.0
CONNECT_S = 5.0
# Seconds between two tries of a drafter that does not fit: it may be replaced by one that does.
REFUSED_RETRY_S = 10.0
REFUSALS = (ModelError, InvalidRequest, Fenced, Unauthenticated)
# Seconds without a word, while rounds are open, after which a drafter counts as lost. It says
# something every 0.1 s (`runner.BEAT_S`), however long its pass takes.
SILENT_S = 0.3
# Bytes and seconds of a projection: five layers of width 8,192 to 8,192 in float32 are 1.3 GB.
MAX_PROJECTION_BYTES = 2 * 2**30
PROJECTION_S = 60.0


class RemoteDrafter:
    """`async with RemoteDrafter(replica, facts, bell) as link: link.ask(...); link.answers()`.

    Entering waits for the drafter's hello, connect_s at most: raises Unavailable without one, and
    ModelError with both values if it does not fit. bell: rung from any thread when answers or
    `available` are new. The answer of a round that a newer one made unwanted, or whose session is
    closed, does not come; of every other one does. server_name: as in the drafter's certificate,
    "" for its address.
    """

    def __init__(
        self,
        replica: Replica,
        facts: VerifierFacts,
        bell: Callable[[], None],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        silent_s: float = SILENT_S,
        connect_s: float = CONNECT_S,
        hello_s: float = HELLO_S,
        refused_retry_s: float = REFUSED_RETRY_S,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < silent_s < math.inf:
            raise ConfigError(f"silent_s: {silent_s} must be above 0 and finite")
        self.replica = replica
        self.figures = LinkFigures()
        self._facts = facts
        self._bell = bell
        self._endpoint = Endpoint(replica.address, credentials, server_name)
        self._silent_s = silent_s
        self._connect_s = connect_s
        self._hello_s = hello_s
        self._refused_retry_s = refused_retry_s
        self._max_unsent_bytes = max_unsent_bytes
        self._clock = clock
        self._inbox: deque[Answer] = deque()
        self._stream: DraftingStream | None = None
        self._offer: DrafterOffer | None = None  # of the first hello; a later one must be the same
        self._why = "this link is not connected yet"
        self._told: set[str] = set()

    async def __aenter__(self) -> RemoteDrafter:
        self._loop = asyncio.get_running_loop()
        first: asyncio.Future[None] = self._loop.create_future()
        self._life = asyncio.create_task(self._live(first))
        try:
            async with asyncio.timeout(self._connect_s):
                await first
        except BaseException as error:
            why = self._why
            await self._end()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"{self._peer}: {why}") from None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end()

    # --- from any thread --------------------------------------------------------------------------

    @property
    def card(self) -> DrafterCard:
        return self._known.card

    @property
    def context_window(self) -> int:
        return self._known.context_window

    @property
    def calibration(self) -> tuple[CalibrationTable, ...]:
        """Shipped with the checkpoint; those that can be applied."""
        return sound_tables(self._known)

    @property
    def available(self) -> bool:
        stream = self._stream
        return stream is not None and stream.lost is None

    @property
    def draining(self) -> bool:
        """It is going away: open no session here, and move the ones that are."""
        stream = self._stream
        return stream is not None and stream.draining

    @property
    def reply_s(self) -> float:
        """Its usual seconds from asking to the answer; 0 before the first."""
        return self.figures.reply_s

    def ask(self, requests: Sequence[DraftRequest]) -> None:
        if not requests:
            return
        if self.available and self._call(self._ask, tuple(requests)):
            return
        self._tell([Lost(r.session, r.round, self._why) for r in requests])

    def answers(self) -> list[Answer]:
        answers = []
        while self._inbox:
            answers.append(self._inbox.popleft())
        return answers

    def close(self, session: str) -> None:
        self._call(self._forget, session)

    # --- the event loop's side --------------------------------------------------------------------

    async def fetch_projection(
        self, *, max_bytes: int = MAX_PROJECTION_BYTES, timeout_s: float = PROJECTION_S
    ) -> FeatureProjection:
        """With which a verifier makes the features that this drafter reads. Raises NotFound for a
        drafter that reads none, Unavailable, and ModelError for one that is not its card's."""
        stream = self._stream
        if stream is None:
            raise Unavailable(f"{self._peer}: {self._why}")
        return await fetch_projection(
            stream.connection.channel, self.card, max_bytes=max_bytes, timeout_s=timeout_s
        )

    @property
    def _peer(self) -> str:
        return f"the drafter {self.replica.replica_id!r} at {self.replica.address}"

    @property
    def _known(self) -> DrafterOffer:
        assert self._offer is not None, "the link is not entered"
        return self._offer

    def _call(self, function: Callable[..., None], argument: object) -> bool:
        """Have it done in the event loop; False if that is over."""
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            return False
        return True

    def _ask(self, requests: tuple[DraftRequest, ...]) -> None:
        if self._stream is not None:
            self._stream.ask(requests)
        else:
            self._tell([Lost(r.session, r.round, self._why) for r in requests])

    def _forget(self, session: str) -> None:
        if self._stream is not None:
            self._stream.forget(session)

    def _tell(self, answers: Sequence[Answer]) -> None:
        self._inbox.extend(answers)
        self._bell()

    async def _end(self) -> None:
        self._why = "this link is closed"
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    async def _live(self, first: asyncio.Future[None]) -> None:
        """Connect, serve until the stream is lost, and again."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                stream = await self._connected()
            except DsparkError as error:
                why = error
                if isinstance(error, REFUSALS) and not first.done():
                    first.set_exception(error)
            except Exception as error:  # a bug costs this try, not all of them
                why = self._unforeseen(error)
            else:
                log.info("%s: connected", self._peer)
                began = self._clock()
                try:
                    why = await self._serve(stream, first)
                except Exception as error:
                    await stream.connection.close()
                    why = self._unforeseen(error)
                if self._clock() - began > STEADY_S:
                    retry_s = FIRST_RETRY_S
            self._note(why)
            if isinstance(why, REFUSALS):
                pause_s = self._refused_retry_s
            else:
                pause_s, retry_s = retry_s, min(2 * retry_s, MAX_RETRY_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def _unforeseen(self, error: Exception) -> DsparkError:
        log.exception("%s: its link has failed", self._peer)
        return Unavailable(f"its link has failed: {error!r}")

    async def _serve(self, stream: DraftingStream, first: asyncio.Future[None]) -> DsparkError:
        """Until the stream is lost: why."""
        self._told.clear()
        self._stream = stream
        self.figures.connected += 1
        if not first.done():
            first.set_result(None)
        try:
            self._bell()
            return await stream.serve()
        finally:
            self._stream = None
            self._bell()

    async def _connected(self) -> DraftingStream:
        """Raises Unavailable, and others for a drafter that does not fit."""
        connection = await connect(self._endpoint, self._facts, hello_s=self._hello_s)
        try:
            self._check(connection)
        except BaseException:
            await connection.close()
            raise
        self._offer = self._offer or connection.offer
        return DraftingStream(
            connection,
            self._facts.vocab_size,
            self.figures,
            self._tell,
            silent_s=self._silent_s,
            clock=self._clock,
            max_unsent_bytes=self._max_unsent_bytes,
        )

    def _check(self, connection: Connection) -> None:
        check_fit(self._facts, connection.offer.card)
        wanted, found = self.replica.replica_id, connection.replica.replica_id
        if wanted and found and wanted != found:
            raise ModelError(f"drafter: {found!r} answers where {wanted!r} should be")
        if self._offer is not None and connection.offer.card != self._offer.card:
            raise ModelError(
                f"drafter_id: {connection.offer.card.drafter_id!r} answers where "
                f"{self._offer.card.drafter_id!r} was, or its card has changed"
            )

    def _note(self, error: DsparkError) -> None:
        """Why there is no stream; each reason is logged once until there is one again."""
        self._why = str(error)
        if self._why not in self._told:
            self._told.add(self._why)
            level = logging.INFO if isinstance(error, Unavailable) else logging.WARNING
            log.log(level, "%s: no drafts: %s", self._peer, error)
