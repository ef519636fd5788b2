"""A cluster's roles together in one process, as `dspark replica` and Ray start them: over mutual
TLS, with keys, on a store in memory."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dspark.client import AsyncClient, Choice, InvalidRequest, Retry, Tls, Unavailable
from dspark.core.drafts import DrafterCard
from dspark.core.errors import ConfigError
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Described, Member, Pool, Replica, VerifierCard
from dspark.core.requests import Limits
from dspark.core.sampling import SamplingMode
from dspark.deploy.cluster_config import ClusterConfig, PeerTls
from dspark.deploy.preflight import preflight
from dspark.deploy.roles import RunningRole, role
from dspark.deploy.roles.place import Place, replica_id
from dspark.gateway.gateway import ServedModel
from dspark.gateway.keys import new_key
from dspark.gateway.served import Served
from dspark.models.drafters.calibration_file import save_calibration
from dspark.models.drafters.checkpoint import TargetFacts, save_checkpoint
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.scheduler.store import MemoryStore
from dspark.scheduling.client import SchedulingClient
from dspark.serving import listen

from ..cli.conftest import make_checkpoint
from ..gateway.toy_front import needs_openssl
from ..scheduling.cluster import scheduling, until
from .authority import Authority
from .processes import tiny_cluster

PATIENCE_S = 120.0
IN_MEMORY = {"REDIS_URL": "memory://"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@dataclass
class Cluster:
    """Roles that run, each until it is ended or the test is over."""

    config: ClusterConfig
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self, pool: str, *, ready: bool = True, **named: Any) -> RunningRole:
        running = await self.stack.enter_async_context(
            role(pool, self.config, environment=IN_MEMORY, **named)
        )
        if ready:
            await running.wait_ready(PATIENCE_S)
        return running


@asynccontextmanager
async def cluster(checkpoint: Path, **config: Any) -> AsyncIterator[Cluster]:
    made = Cluster(ClusterConfig.of(tiny_cluster(checkpoint, **{"drain_s": 0.1, **config})))
    async with made.stack:
        yield made


@dataclass(frozen=True)
class Secured:
    """Files of a cluster and its clients."""

    config: Mapping[str, Any]
    tls: Tls
    key: str
    ca: Path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    """Services trust one authority, clients of the gateway another."""
    inner = Authority.make(tmp_path_factory.mktemp("inner"))
    outer = Authority.make(tmp_path_factory.mktemp("outer"))
    service, (certificate, key) = inner.peer("service"), outer.sign("gateway")
    api_key, hashed = new_key()
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"tenants: {{acme: {{share: 3, keys: [{hashed}]}}}}\n")
    config = {
        "tls": {
            "ca": str(service.ca),
            "certificate": str(service.certificate),
            "key": str(service.key),
        },
        "gateway": {
            "tls": {"certificate": str(certificate), "key": str(key)},
            "keys": str(keys),
        },
    }
    return Secured(config, Tls(outer.ca), api_key, outer.ca)


def reached(gateway: RunningRole, secured: Secured, **rest: Any) -> AsyncClient:
    return AsyncClient(
        gateway.address,
        tls=secured.tls,
        **{"api_key": secured.key, "retry": Retry(attempts=1), **rest},
    )


@needs_openssl
async def test_a_request_goes_through_all_pools_and_outlives_a_drained_verifier(
    checkpoint: Path, secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(checkpoint, **secured.config) as made:
        gateway = await made.start("gateway", ready=False)
        assert not gateway.ready, "nobody is there yet"
        await made.start("scheduler")
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=secured.ca)) as http:
            starting = await http.get(f"{gateway.url}/readyz")
            assert (starting.status_code, starting.json()) == (503, {"status": "starting"})
            async with reached(gateway, secured) as client:
                with pytest.raises(Unavailable, match="the server is starting"):
                    await client.generate("the cat", max_tokens=4)
            drafter = await made.start("drafter")
            first = await made.start("verifier")
            second = await made.start("verifier")
            await gateway.wait_ready(PATIENCE_S)
            assert (await http.get(f"{gateway.url}/readyz")).json() == {"status": "ready"}
            key = {"authorization": f"Bearer {secured.key}"}
            asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "temperature": 0}
            for headers, status in (({}, 401), (key, 200)):
                told = await http.post(
                    f"{gateway.url}/v1/completions",
                    json=asked,
                    headers=headers,
                    timeout=PATIENCE_S,
                )
                assert told.status_code == status, told.text
            models = (await http.get(f"{gateway.url}/v1/models", headers=key)).json()["data"]
        # What the verifiers' own cards say.
        assert models[0]["id"] == "tiny"
        assert models[0]["drafters"] == ["ngram"]
        async with reached(gateway, secured) as client:
            with pytest.raises(InvalidRequest, match="hold at most 4096 tokens"):
                await client.generate([5] * 5000, max_tokens=4)
            drafted = 0
            async with asyncio.timeout(PATIENCE_S):
                while not drafted:  # a verifier serves before it has found a drafter
                    whole = await client.generate("the dog", max_tokens=300, temperature=0)
                    drafted = whole.choices[0].speculation.drafted
            # Seeded: no draft makes them short.
            long: Any = {"max_tokens": 600, "seed": 7, "ignore_eos": True}
            alone = await client.generate("the dog", **long)
            answers = [asyncio.create_task(client.generate("the dog", **long)) for _ in range(4)]
            await until(lambda: first.load().pressure + second.load().pressure > 0)
            assert gateway.load().pressure > 0
            busy = first if first.load().pressure else second
            await busy.drain(0.0)
            assert not busy.ready
            assert {(await answer).token_ids for answer in answers} == {alone.token_ids}
        assert "goes on elsewhere" in caplog.text
        assert drafter.load().figures["drafted"] > 0, "over the wire"
        await made.stack.aclose()
    for running in (gateway, drafter, first, second):
        assert not running.fenced.is_set()


async def test_a_trained_drafter_drafts_for_a_target_that_it_never_loads(checkpoint: Path) -> None:
    drafter_of = trained(checkpoint, checkpoint.parent / "drafter")
    async with cluster(
        checkpoint,
        drafter={"checkpoint": str(drafter_of), "candidates": 0},
        verifier={"fallback": "none"},
    ) as made:
        await made.start("scheduler")
        drafter = await made.start("drafter")
        verifier = await made.start("verifier")
        gateway = await made.start("gateway")
        async with AsyncClient(gateway.address, retry=Retry(attempts=1)) as client:
            async with asyncio.timeout(PATIENCE_S):  # until it is adopted
                while not (await said(client)).speculation.drafted:
                    pass
            (offered,) = (await client.model_info()).drafters
            assert offered.kind == "dspark"
        assert drafter.load().figures["drafted"] > 0
        assert verifier.alive
        async with (
            SchedulingClient(made.config.scheduler_addresses()) as scheduler,
            aclosing(scheduler.watch()) as lists,
        ):
            cards = [member.card for member in await anext(lists)]
        targets = {card.target_id for card in cards if card is not None}
        assert len(targets) == 1, "both say the same of the target"


async def test_a_drafter_brings_its_calibration_when_it_registers(checkpoint: Path) -> None:
    drafter_of, store = trained(checkpoint, checkpoint.parent / "calibrated"), MemoryStore()
    drafter_id = json.loads((drafter_of / "config.json").read_text())["drafter_id"]
    table = CalibrationTable(drafter_id, SamplingMode.GREEDY, (2.5, 2.0, 1.5, 1.0))
    save_calibration(drafter_of, drafter_id, [table])
    sections = {"drafter": {"checkpoint": str(drafter_of), "candidates": 0}}
    async with scheduling(store) as served, cluster(checkpoint, **sections) as made:
        await made.start("drafter", schedulers=(served.address,))
        await until(lambda: served.scheduler.planner.shipped == (table,), PATIENCE_S)


async def said(client: AsyncClient) -> Choice:
    return (await client.generate("the dog", max_tokens=40, temperature=0)).choices[0]


def trained(target: Path, directory: Path) -> Path:
    """As training leaves it, but for the training."""
    tensors = TargetTensors.read(target)
    V, D = tensors.embedding.shape
    config = DrafterConfig(
        kind="dspark",
        gamma=4,
        vocab_size=V,
        hidden_size=D,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        target_layer_ids=(0,),
        target_layers=2,
        head="vanilla",
        rank=8,
        confidence=True,
    )
    model = new_drafter(config, tensors, generator=torch.Generator().manual_seed(3))
    facts = TargetFacts("tiny", embedding_hash=tensors.embedding_hash, head_hash=tensors.head_hash)
    save_checkpoint(directory, model, facts)
    return directory


def test_a_gateway_does_without_torch(checkpoint: Path) -> None:
    code = """
import sys
from dspark.deploy.cluster_config import ClusterConfig, PeerTls
from dspark.deploy.roles import without_torch
config = ClusterConfig.of({"model": sys.argv[1]})
assert without_torch(config)
import dspark.deploy.roles.gateway
from dspark.gateway.tokenizer import Tokenizer
from dspark.models import resolve
print(*Tokenizer.load(resolve(config.model)).encode("the cat"))
assert sys.modules["torch"] is None
assert not without_torch(config.model_copy(update={"model": "not-here"}))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, checkpoint], capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["285", "280"], ran.stderr
    assert "PyTorch" not in ran.stderr


async def test_an_operators_wish_reaches_the_replica_and_a_newer_life_ends_an_older(
    checkpoint: Path,
) -> None:
    async with cluster(checkpoint) as made:
        scheduler = await made.start("scheduler")
        drafter = await made.start("drafter", name="d1")
        async with SchedulingClient([scheduler.address], call_s=PATIENCE_S) as client:
            await client.drain("d1")
        await asyncio.wait_for(drafter.drain_wanted.wait(), PATIENCE_S)
        assert drafter.alive, "to drain it is for whoever started it"
        newer = await made.start("drafter", name="d1")
        await asyncio.wait_for(drafter.fenced.wait(), PATIENCE_S)
        assert not drafter.alive
        assert newer.alive


async def test_a_replica_that_drains_says_so_at_once(checkpoint: Path) -> None:
    """Before its next heartbeat, so that nobody is sent there any more."""
    settings = {"heartbeat_s": 100.0, "ttl_s": 300.0}
    async with cluster(checkpoint, scheduler={"settings": settings}) as made:
        scheduler = await made.start("scheduler")
        drafter = await made.start("drafter")
        async with (
            SchedulingClient([scheduler.address], call_s=PATIENCE_S) as client,
            aclosing(client.watch()) as lists,
        ):
            assert [member.draining for member in await anext(lists)] == [False]
            await drafter.drain(0.0)
            assert [member.draining for member in await anext(lists)] == [True]


async def test_members_serve_without_a_scheduler(checkpoint: Path) -> None:
    """Ready is not registered: who knows a replica already goes on with it."""
    async with cluster(checkpoint) as made:
        drafter = await made.start("drafter")
        assert drafter.ready


@needs_openssl
async def test_a_drafter_without_a_right_certificate_is_nobodys(
    checkpoint: Path, secured: Secured, tmp_path: Path
) -> None:
    """It never registers, is not ready, and says why; the cluster goes on as it was."""
    async with cluster(checkpoint, tls=secured.config["tls"]) as made:
        scheduler = await made.start("scheduler")
        stranger = Authority.make(tmp_path).peer("stranger")
        for tls, told in (
            (None, "it may ask for TLS, and there is no tls here"),
            (
                PeerTls(
                    ca=secured.config["tls"]["ca"],
                    certificate=str(stranger.certificate),
                    key=str(stranger.key),
                ),
                "it may not trust our certificate",
            ),
        ):
            other = Cluster(made.config.model_copy(update={"tls": tls}))
            async with other.stack:
                drafter = await other.start("drafter", ready=False)
                await until(lambda drafter=drafter, told=told: told in drafter.why)  # type: ignore[misc]
                assert drafter.membership is not None
                assert not drafter.membership.epoch
        right = made.config.tls
        assert right is not None
        async with (
            SchedulingClient(
                [scheduler.address], credentials=right.files().credentials(), call_s=PATIENCE_S
            ) as client,
            aclosing(client.watch()) as lists,
        ):
            assert await anext(lists) == ()
            drafter = await made.start("drafter")
            (member,) = await anext(lists)
            assert member.replica.replica_id == drafter.name


async def test_replicas_of_a_pool_share_its_ports_and_a_new_one_waits_for_the_old(
    checkpoint: Path,
) -> None:
    async with cluster(checkpoint, drafter={"replicas": 2, "port": 0}) as made:
        with listen("127.0.0.1", 0) as one:
            port = one.getsockname()[1]
        pool = made.config.drafter.model_copy(update={"port": port})
        made.config = made.config.model_copy(update={"drafter": pool})
        first = await made.start("drafter")
        second = await made.start("drafter")
        assert [first.address, second.address] == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        with pytest.raises(ConfigError, match=rf"drafter\.port: none of {port} to {port + 1}"):
            await made.start("drafter")
        waiting = asyncio.create_task(made.start("drafter", port_wait_s=PATIENCE_S))
        await first.drain(0.0)
        assert (await waiting).address == first.address


async def test_a_port_in_use_is_told_before_anything_starts(checkpoint: Path) -> None:
    config = ClusterConfig.of(tiny_cluster(checkpoint))
    preflight(config, {})
    with listen("127.0.0.1", config.gateway.http_port):
        told = rf"gateway\.http_port: 1 of the ports {config.gateway.http_port} to"
        with pytest.raises(ConfigError, match=told):
            preflight(config, {})
        preflight(config, {}, pools=("verifier",))
        preflight(config, {}, ports=False)


async def test_many_schedulers_need_a_store_that_all_reach(checkpoint: Path) -> None:
    config = ClusterConfig.of(tiny_cluster(checkpoint, scheduler={"replicas": 2}))
    for environment in ({}, IN_MEMORY):
        with pytest.raises(ConfigError, match=r"scheduler\.replicas: 2 need one store"):
            async with role("scheduler", config, environment=environment):
                pass


async def test_no_such_pool(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="pool: 'magic' is not one of: scheduler, gateway"):
        role("magic", ClusterConfig.of(tiny_cluster(checkpoint)), environment={})


# --- what a gateway says of its model -------------------------------------------------------------


def verifier(name: str, tokenizer_hash: str = "t", model: str = "tiny", **limits: int) -> Member:
    known = Limits(**{"vocab_size": 50, "context_length": 64, "kv_tokens": 512, **limits})
    card = VerifierCard(model, "target", tokenizer_hash, "toy", known, 16, 8, 8)
    return Member(Pool.VERIFIER, Replica(name, f"{name}:1", 1), card)


@pytest.fixture
def told() -> list[ServedModel]:
    return []


@pytest.fixture
def served(told: list[ServedModel]) -> Served:
    return Served(ServedModel("tiny", "", Limits(0, 0, 0)), "t", told.append)


def test_limits_are_those_that_hold_on_every_verifier(
    served: Served, told: list[ServedModel]
) -> None:
    served.take(())
    assert (told, served.waits_for) == ([], "no verifier has registered yet")
    drafter = Member(Pool.DRAFTER, Replica("d1", "d1:1", 1), DrafterCard("dspark-1", "dspark", 7))
    served.take((verifier("v1", context_length=32), verifier("v2", kv_tokens=256), drafter))
    assert served.waits_for == ""
    assert told[-1].limits == Limits(50, 32, 256)
    assert [card.drafter_id for card in told[-1].drafters] == ["dspark-1"]
    served.take((verifier("v2"),))
    assert told[-1].limits == Limits(50, 64, 512), "they follow the pool"
    served.take(())
    assert len(told) == 2, "and stay while nobody is there"


def test_a_verifier_of_another_tokenizer_is_refused_with_both_values(
    served: Served, told: list[ServedModel], caplog: pytest.LogCaptureFixture
) -> None:
    other = verifier("v1", tokenizer_hash="other")
    served.take((other,))
    served.take((other,))
    wrong = "verifier v1: its tokenizer_hash is 'other', this gateway's 't'"
    assert told == []
    assert served.waits_for == wrong
    assert [record.getMessage() for record in caplog.records] == [f"{wrong}; it is not used"]
    served.take((other, verifier("v2", context_length=32)))
    assert told[-1].limits.context_length == 32, "those that fit are served"
    assert isinstance(other.card, VerifierCard)
    with pytest.raises(Unavailable, match=wrong):
        served.expect(Described(other.replica, other.card, (), False, 1.0))


# --- where a replica is ---------------------------------------------------------------------------


def test_names_are_nobody_elses() -> None:
    names = {replica_id("verifier") for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("verifier-") for name in names)


@pytest.mark.parametrize(
    ("host", "advertise", "given", "told"),
    [
        ("127.0.0.1", None, "", "127.0.0.1:7"),
        ("0.0.0.0", "node.test", "", "node.test:7"),
        ("0.0.0.0", "node.test", "10.1.2.3", "node.test:7"),
        ("0.0.0.0", None, "10.1.2.3", "10.1.2.3:7"),
        ("127.0.0.1", None, "10.1.2.3", "127.0.0.1:7"),
        ("::1", None, "", "[::1]:7"),
    ],
)
def test_others_are_told_where_it_is_reached(
    checkpoint: Path, host: str, advertise: str | None, given: str, told: str
) -> None:
    config = ClusterConfig.of(
        tiny_cluster(checkpoint, verifier={"host": host, "advertise": advertise})
    )
    assert Place(config, "verifier", "v1", (), {}, given).reached(7) == told


def test_all_addresses_mean_the_machines_own(checkpoint: Path) -> None:
    config = ClusterConfig.of(tiny_cluster(checkpoint, verifier={"host": "0.0.0.0"}))
    host, _, port = Place(config, "verifier", "v1", (), {}).reached(7).rpartition(":")
    assert port == "7"
    assert host not in ("0.0.0.0", "")
