"""The drafters of a cluster as an engine's own: linked when they appear, dismissed when they go."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from types import MappingProxyType, TracebackType

import grpc

from dspark.core.drafts import DrafterCard
from dspark.core.errors import DsparkError, ModelError, Unavailable
from dspark.core.replicas import Member, Pool, Replica, VerifierCard
from dspark.drafter import RemoteDrafter, VerifierFacts
from dspark.drafter.handshake import check_fit
from dspark.scheduling.client import SchedulingClient
from dspark.verifier.engine import Engine
from dspark.verifier.runner import EngineRunner
from dspark.verifier.sources import Bell

log = logging.getLogger(__name__)

# Seconds between two tries to hear of drafters, and between two looks for those that are gone.
AGAIN_S = 0.2
# Seconds between two tries to link one: doubled each time, with chance, up to the last.
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
# Seconds that a drafter's end waits for the engine to hear of it.
DISMISS_S = 1.0

Connect = Callable[[Replica, VerifierFacts, Bell], AbstractAsyncContextManager[RemoteDrafter]]


class Adoption:
    """`async with Adoption(scheduler, runner, card, "v1", 30) as adoption: adoption.begin_life(3)`

    card, layers: of the target, which a drafter must be made for. Nobody is linked before the first
    life begins: its epoch fences this verifier's older selves at every drafter. links: by replica
    id, those that the engine may ask now.

    A drafter is dismissed when it is neither listed nor available: a list may be short because its
    store was emptied, and a link knows best whether it works. Without a scheduler all stays as is.
    """

    def __init__(
        self,
        scheduler: SchedulingClient,
        runner: EngineRunner,
        card: VerifierCard,
        verifier: str,
        layers: int,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        connect: Connect | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._card = card
        self._verifier = verifier
        self._layers = layers
        self._credentials = credentials
        self._server_name = server_name
        self._connect = connect or self._remote
        self._epoch = 0
        self._living = asyncio.Event()
        self._links: dict[str, RemoteDrafter] = {}
        self._listed: frozenset[str] = frozenset()
        self._known: dict[str, tuple[str, asyncio.Task[None]]] = {}  # address, and who keeps it
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def links(self) -> Mapping[str, RemoteDrafter]:
        return MappingProxyType(self._links)

    def begin_life(self, epoch: int) -> None:
        """This verifier has registered (again). Links that are open stay as they are."""
        self._epoch = epoch
        self._living.set()

    async def __aenter__(self) -> Adoption:
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._tidy())]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = [*self._tasks, *(task for _, task in self._known.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        await self._living.wait()
        while True:
            try:
                async with aclosing(self._scheduler.watch((Pool.DRAFTER,))) as lists:
                    async for members in lists:
                        self._meet(members)
            except DsparkError as error:  # what we have goes on
                log.debug("the list of drafters is not told now: %s", error)
            except Exception:
                log.exception("the list of drafters could not be followed")
            await asyncio.sleep(AGAIN_S)

    def _meet(self, members: Sequence[Member]) -> None:
        """Link those that are new; one that is found elsewhere now is another. Of a new epoch at
        the same address the link itself finds out whether anything has changed."""
        self._listed = frozenset(member.replica.replica_id for member in members)
        for member in members:
            name, card = member.replica.replica_id, member.card
            address, task = self._known.get(name, ("", None))
            if address == member.replica.address or not isinstance(card, DrafterCard):
                continue
            if task is not None:
                task.cancel()
            after = () if task is None else (task,)
            keeping = asyncio.create_task(self._keep(member.replica, card, after))
            self._known[name] = member.replica.address, keeping

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            for name in self._known.keys() - self._listed:
                try:
                    await self._leave_if_gone(name)
                except Exception:
                    log.exception("drafter %s could not be left", name)

    async def _leave_if_gone(self, name: str) -> None:
        link = self._links.get(name)
        if link is None or not link.available:
            _, task = self._known.pop(name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep(
        self, replica: Replica, card: DrafterCard, after: Sequence[asyncio.Task[None]]
    ) -> None:
        """Have one drafter linked until this is cancelled. after: what has to end first."""
        await asyncio.gather(*after, return_exceptions=True)
        wait_s, told = FIRST_RETRY_S, ""
        while True:
            try:
                facts = self._facts()
                check_fit(facts, card)
                await self._link(replica, facts)
            except ModelError as error:
                wait_s, why = LAST_RETRY_S, str(error)
                log.log(logging.DEBUG if why == told else logging.WARNING, "not adopted: %s", why)
                told = why
            except DsparkError as error:
                log.debug("drafter %s is not linked: %s", replica.replica_id, error)
            except Exception:  # the others are kept all the same
                log.exception("drafter %s could not be adopted", replica.replica_id)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, LAST_RETRY_S)

    async def _link(self, replica: Replica, facts: VerifierFacts) -> None:
        """Adopt one drafter, until cancelled. Raises what keeps it from being adopted."""
        name, bell, engine = replica.replica_id, self._runner.bell(), self._runner.between_steps
        async with self._connect(replica, facts, bell) as link:
            projection = None
            feature_id = link.card.feature_id
            if feature_id and not await engine(lambda e: e.versions.made(feature_id)):
                projection = await link.fetch_projection()

            def adopt(engine: Engine) -> None:
                engine.adopt(name, link, projection, link.calibration, bell)

            try:
                await engine(adopt)
                self._links[name] = link
                log.info("drafter %s (%s) is adopted", name, link.card.drafter_id)
                await asyncio.Event().wait()
            finally:  # also where only the asking was over, not what was asked
                try:
                    await self._dismiss(name)
                finally:
                    self._links.pop(name, None)

    async def _dismiss(self, name: str) -> None:
        try:
            async with asyncio.timeout(DISMISS_S):
                await self._runner.between_steps(lambda engine: engine.dismiss(name))
        except Unavailable:  # the engine has stopped
            log.debug("drafter %s outlived its engine", name)
        except TimeoutError:  # it does so after the step in hand; the link says it is closed
            log.warning("the engine has not dismissed drafter %s in %g s", name, DISMISS_S)
        else:
            log.info("drafter %s is dismissed", name)

    def _facts(self) -> VerifierFacts:
        card = self._card
        return VerifierFacts(
            self._verifier,
            self._epoch,
            card.target_id,
            card.limits.vocab_size,
            card.tokenizer_hash,
            self._layers,
        )

    def _remote(
        self, replica: Replica, facts: VerifierFacts, bell: Bell
    ) -> AbstractAsyncContextManager[RemoteDrafter]:
        return RemoteDrafter(
            replica,
            facts,
            bell,
            credentials=self._credentials,
            server_name=self._server_name,
        )
