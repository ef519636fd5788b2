"""A drafter behind its real gRPC server, a verifier's real link to it, and toys for both ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest

from dspark.core.drafts import (
    Answer,
    Draft,
    Drafter,
    DrafterCard,
    DraftRequest,
    DraftSampling,
    NeedContext,
)
from dspark.core.replicas import Replica
from dspark.core.sampling import SamplingMode
from dspark.drafter import (
    BatchingConfig,
    DrafterOffer,
    DraftingServicer,
    DraftRunner,
    RemoteDrafter,
    VerifierFacts,
)
from dspark.serving import GrpcServer, serve_grpc
from dspark.v1 import drafting_pb2 as pb
from dspark.v1 import drafting_pb2_grpc as pb_grpc

# Seconds for what must come, on a machine that is busy.
PATIENT_S = 20.0
V, LAYERS = 160, 4
GREEDY = DraftSampling(SamplingMode.GREEDY)
REJECTION = DraftSampling(SamplingMode.REJECTION, 0.8)
COUPLED = DraftSampling(SamplingMode.COUPLED, 0.8, 2**63 + 5, 3)
REPLICA = Replica("d1", epoch=7)
CARD = DrafterCard("toy-1", "toy", 4, V, "target-1", "tokens-1")


class ToyDrafter:
    """Says of each session how many ids it has seen of it, and needs all of them in order.

    passes: sessions of each call. gate: closed, a pass waits in it. fail: raises for a request that
    it returns True for.
    """

    def __init__(self, card: DrafterCard = CARD, **offer: Any) -> None:
        self.card = card
        self.passes: list[list[str]] = []
        self.requests: list[DraftRequest] = []
        self.held: dict[str, list[int]] = {}
        self.features: dict[str, list[Any]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.fail: Callable[[DraftRequest], bool] = lambda _: False
        for name, value in offer.items():
            setattr(self, name, value)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        self.passes.append([request.session for request in requests])
        self.entered.release()
        assert self.gate.wait(PATIENT_S), "nobody opened the gate"
        if any(self.fail(request) for request in requests):
            raise RuntimeError("a toy that is broken")
        self.requests += requests
        return [self._answer(request) for request in requests]

    def close(self, session: str) -> None:
        self.held.pop(session, None)
        self.features.pop(session, None)

    def _answer(self, request: DraftRequest) -> Draft | NeedContext:
        held = self.held.setdefault(request.session, [])
        if request.start > len(held):
            return NeedContext(request.session, len(held))
        held[request.start :] = request.tokens
        if request.features is not None:
            rows = self.features.setdefault(request.session, [])
            rows[request.start :] = [row.copy() for row in request.features]
        count = min(request.gamma, self.card.gamma)
        ids = tuple((len(held) + k) % V for k in range(count))
        return Draft(request.session, request.round, ids, np.zeros(count, np.float32))

    async def passing(self) -> None:
        """Wait until one more pass has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENT_S)


def facts(**changes: Any) -> VerifierFacts:
    return replace(VerifierFacts("v1", 1, "target-1", V, "tokens-1", LAYERS), **changes)


def asking(
    session: str, round_: int = 0, tokens: Sequence[int] = (1, 2, 3), start: int = 0, **rest: Any
) -> DraftRequest:
    return DraftRequest(
        **{
            "session": session,
            "round": round_,
            "start": start,
            "tokens": tuple(tokens),
            "features": None,
            "output_position": 1,
            "sampling": GREEDY,
            "gamma": 4,
            **rest,
        }
    )


@dataclass
class Served:
    runner: DraftRunner
    servicer: DraftingServicer
    server: GrpcServer

    @property
    def address(self) -> str:
        return self.server.address


@asynccontextmanager
async def serving(
    drafter: Drafter,
    *,
    batching: BatchingConfig | None = None,
    replica: Replica = REPLICA,
    feature_dtype: Any = "float32",
    max_message_bytes: int = 2**20,
    port: int = 0,
    drain_s: float = 0.0,
    clock: Callable[[], float] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    offer = DrafterOffer.of(
        drafter, feature_dtype=feature_dtype, max_message_bytes=max_message_bytes
    )
    more = {} if clock is None else {"clock": clock}
    async with DraftRunner(drafter, batching, **more) as runner:
        servicer = DraftingServicer(runner, offer, replica, **options)
        async with serve_grpc(servicer, port=port, drain_s=drain_s) as server:
            yield Served(runner, servicer, server)


@dataclass
class Caller:
    """A verifier's side: asks as an engine does, waits for the bell."""

    link: RemoteDrafter
    bell: asyncio.Event
    early: list[Answer] = field(default_factory=list)

    async def ask(self, *requests: DraftRequest) -> list[Answer]:
        """The answers to all of them, in their order."""
        self.link.ask(requests)
        return await self.told(*[request.session for request in requests])

    async def told(self, *sessions: str) -> list[Answer]:
        """One answer of each session, in this order."""
        async with asyncio.timeout(PATIENT_S):
            while True:
                by_session = {answer.session: answer for answer in self.early}
                if set(sessions) <= set(by_session):
                    self.early = [a for a in self.early if a.session not in sessions]
                    return [by_session[session] for session in sessions]
                await self.rung()
                self.early += self.link.answers()

    async def draft(self, request: DraftRequest) -> Draft:
        (answer,) = await self.ask(request)
        assert isinstance(answer, Draft), answer
        return answer

    async def until(self, true: Callable[[], bool]) -> None:
        """Of the link; whatever changes it rings the bell."""
        async with asyncio.timeout(PATIENT_S):
            while not true():
                await self.rung()

    async def rung(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.bell.wait(), 0.05)
        self.bell.clear()


@asynccontextmanager
async def linked(
    address: str, facts_: VerifierFacts | None = None, replica_id: str = "d1", **options: Any
) -> AsyncIterator[Caller]:
    loop, bell = asyncio.get_running_loop(), asyncio.Event()

    def ring() -> None:
        loop.call_soon_threadsafe(bell.set)

    # Tests of silence set their own bound: elsewhere a machine that is busy is not a dead drafter.
    options = {"silent_s": PATIENT_S, **options}
    link = RemoteDrafter(Replica(replica_id, address), facts_ or facts(), ring, **options)
    async with link:
        yield Caller(link, bell)


@asynccontextmanager
async def wired(
    drafter: Drafter, silent_s: float = PATIENT_S, **options: Any
) -> AsyncIterator[Caller]:
    """A drafter over the wire, and nothing else."""
    async with (
        serving(drafter, **options) as served,
        linked(served.address, silent_s=silent_s) as caller,
    ):
        yield caller


async def eventually(true: Callable[[], bool], what: str = "it") -> None:
    async with asyncio.timeout(PATIENT_S):
        while not true():
            await asyncio.sleep(0.005)


class Raw:
    """A verifier's end of a stream, message by message."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def hello(self, facts_: VerifierFacts | None = None) -> pb.DrafterHello:
        said = facts_ or facts()
        await self.send(
            hello=pb.VerifierHello(
                protocol_version=said.protocol_version,
                verifier=said.verifier,
                epoch=said.epoch,
                target_id=said.target_id,
                vocab_size=said.vocab_size,
                tokenizer_hash=said.tokenizer_hash,
                layers=said.layers,
            )
        )
        return (await self.read()).hello

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.ProposeRequest(**message))

    async def read(self) -> pb.ProposeResponse:
        async with asyncio.timeout(PATIENT_S):
            response = await self.call.read()
        assert isinstance(response, pb.ProposeResponse), "the stream is over"
        return response

    async def replies(self) -> pb.DraftReplies:
        """The next message that says something."""
        while not (response := await self.read()).replies.replies:
            pass
        return response.replies

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ends, after all that is still said."""
        async with asyncio.timeout(PATIENT_S):
            with suppress(grpc.aio.AioRpcError):
                while isinstance(await self.call.read(), pb.ProposeResponse):
                    pass
            return await self.call.code(), await self.call.details()

    async def refused(self, facts_: VerifierFacts) -> tuple[grpc.StatusCode, str]:
        """How the stream ends that begins with this hello."""
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
            await self.hello(facts_)
        return await self.status()


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[Raw]:
    local = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(address, local) as channel:
        stream = Raw(pb_grpc.DraftingStub(channel).Propose())
        yield stream
        stream.call.cancel()


def wire_request(session: str, tokens: Sequence[int] = (1, 2, 3), **fields: Any) -> pb.DraftRequest:
    sampling = fields.pop("sampling", pb.DraftSampling(mode=pb.SAMPLING_MODE_GREEDY))
    return pb.DraftRequest(
        **{"session": session, "tokens": tokens, "gamma": 4, "sampling": sampling, **fields}
    )
