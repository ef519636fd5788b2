"""Mutual TLS between services: who has no right certificate is refused with a clear line, by every
server, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dspark.core.errors import ConfigError, Unavailable
from dspark.core.replicas import Replica
from dspark.drafter import DrafterOffer, DraftingServicer, DraftRunner, RemoteDrafter, VerifierFacts
from dspark.gateway.verifier_client import VerificationClient
from dspark.models.drafters import NgramDrafter
from dspark.scheduler.central import Scheduler, SchedulerConfig
from dspark.scheduler.store import MemoryStore
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.servicer import SchedulingServicer, WireCodec
from dspark.serving import PeerFiles, TlsFiles, serve_grpc
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer

from ..gateway.toy_front import needs_openssl
from ..scheduling.cluster import an_engine, card_of, until
from .authority import Authority

pytestmark = needs_openssl

PATIENCE_S = 20.0
# Seconds that a link to a drafter is tried for.
CONNECT_S = 2.0
NAME = "dspark.test"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def right(ours: Authority) -> PeerFiles:
    return ours.peer("service")


@pytest.fixture(scope="module")
def named(ours: Authority) -> PeerFiles:
    """One certificate for all, wherever they are."""
    return ours.peer("shared", san=f"DNS:{NAME}", server_name=NAME)


# --- before anything starts -----------------------------------------------------------------------


def test_right_files_are_fine(right: PeerFiles, named: PeerFiles) -> None:
    right.check()
    named.check()


def test_files_that_peers_would_refuse_are_told_at_the_start(
    ours: Authority, theirs: Authority, right: PeerFiles, tmp_path: Path
) -> None:
    stranger = theirs.sign("stranger")
    serves = ours.sign("serves", usage="serverAuth")
    calls = ours.sign("calls", usage="clientAuth")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for files, told in (
        (PeerFiles(ours.ca, *stranger), "peers that trust .*ca.pem would refuse it"),
        (
            PeerFiles(ours.ca, *serves),
            "serves.pem: peers that trust .* would refuse it: unsuitable",
        ),
        (PeerFiles(ours.ca, *calls), "calls.pem: peers that trust .* would refuse it: unsuitable"),
        (PeerFiles(right.ca, right.certificate, right.key, NAME), f"not valid for '{NAME}'"),
        (PeerFiles(right.ca, right.certificate, stranger[1]), "are no certificate and its key"),
        (PeerFiles(empty, right.certificate, right.key), "empty.pem is no certificate"),
        (PeerFiles(tmp_path / "no.pem", right.certificate, right.key), "no.pem: No such file"),
    ):
        with pytest.raises(ConfigError, match=f"tls: .*{told}"):
            files.check()


# --- who may speak to whom ------------------------------------------------------------------------

# (address, credentials, server name) -> whatever an answer takes; raises a DsparkError without one.
Ask = Callable[[str, grpc.ChannelCredentials | None, str], Awaitable[object]]


async def ask_scheduler(
    address: str, credentials: grpc.ChannelCredentials | None, server_name: str
) -> None:
    async with SchedulingClient(
        [address], credentials=credentials, server_name=server_name, call_s=PATIENCE_S
    ) as client:
        await client.leave("nobody", 1)


async def ask_verifier(
    address: str, credentials: grpc.ChannelCredentials | None, server_name: str
) -> None:
    async with VerificationClient(
        address, credentials=credentials, server_name=server_name
    ) as client:
        await client.describe()


async def ask_drafter(
    address: str, credentials: grpc.ChannelCredentials | None, server_name: str
) -> None:
    facts = VerifierFacts("v1", 1, "", 50, "", 4)
    async with RemoteDrafter(
        Replica("", address),
        facts,
        lambda: None,
        credentials=credentials,
        server_name=server_name,
        connect_s=CONNECT_S,
    ) as link:
        await until(lambda: link.available)


@asynccontextmanager
async def a_scheduler(tls: TlsFiles | None) -> AsyncIterator[str]:
    async with (
        MemoryStore() as store,
        Scheduler(store, WireCodec(), SchedulerConfig(), "s1") as scheduler,
        serve_grpc(SchedulingServicer(scheduler), tls=tls, drain_s=0.0) as server,
    ):
        yield server.address


@asynccontextmanager
async def a_verifier(tls: TlsFiles | None) -> AsyncIterator[str]:
    engine = an_engine()
    async with EngineRunner(engine) as runner:
        servicer = VerificationServicer(runner, card_of(engine))
        async with serve_grpc(servicer, tls=tls, drain_s=0.0) as server:
            yield server.address


@asynccontextmanager
async def a_drafter(tls: TlsFiles | None) -> AsyncIterator[str]:
    drafter = NgramDrafter(4)
    async with DraftRunner(drafter) as runner:
        servicer = DraftingServicer(runner, DrafterOffer.of(drafter))
        async with serve_grpc(servicer, tls=tls, drain_s=0.0) as server:
            yield server.address


SERVERS: dict[str, tuple[Any, Ask]] = {
    "scheduler": (a_scheduler, ask_scheduler),
    "verifier": (a_verifier, ask_verifier),
    "drafter": (a_drafter, ask_drafter),
}


@pytest.mark.parametrize("pool", SERVERS)
async def test_only_a_right_certificate_is_answered(
    ours: Authority, theirs: Authority, right: PeerFiles, pool: str
) -> None:
    serves, ask = SERVERS[pool]
    stranger = theirs.peer("stranger")
    forged = PeerFiles(ours.ca, stranger.certificate, stranger.key)  # knows us, is not ours
    async with serves(right.server) as address:
        await ask(address, right.credentials(), "")
        wrong = {
            "it may ask for TLS, and there is no tls here": None,
            "it may not trust our certificate": ours.trusting(),
            "may not trust our certificate": forged.credentials(),
            "not signed by the authority that tls.ca names": stranger.credentials(),
        }
        answers = await asyncio.gather(
            *(ask(address, credentials, "") for credentials in wrong.values()),
            return_exceptions=True,
        )
        for told, answer in zip(wrong, answers, strict=True):
            assert isinstance(answer, Unavailable)
            assert told in str(answer)
        await ask(address, right.credentials(), "")  # unharmed


@pytest.mark.parametrize("pool", SERVERS)
async def test_tls_never_speaks_to_a_plain_server(right: PeerFiles, pool: str) -> None:
    serves, ask = SERVERS[pool]
    async with serves(None) as address:
        with pytest.raises(Unavailable, match="it speaks no TLS, and tls here asks for it"):
            await ask(address, right.credentials(), "")
        await ask(address, None, "")


@pytest.mark.parametrize("pool", SERVERS)
async def test_one_name_for_all_serves_where_addresses_are_not_known(
    right: PeerFiles, named: PeerFiles, pool: str
) -> None:
    serves, ask = SERVERS[pool]
    async with serves(named.server) as address:
        await ask(address, named.credentials(), NAME)
        answers = await asyncio.gather(
            ask(address, named.credentials(), ""),
            ask(address, right.credentials(), "other.test"),
            return_exceptions=True,
        )
        for answer in answers:
            assert "carries neither the host that we call it by" in str(answer)
