"""Everything that one process serves, in this one, on the tiny checkpoint: what the configuration
says reaches the parts it is for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from dspark.client.wire_client import error_from_rpc
from dspark.core.config import EngineConfig
from dspark.core.errors import Overloaded, Unavailable
from dspark.deploy.serve import Running, access, running, serve
from dspark.deploy.serve_config import ServeConfig, configure
from dspark.deploy.single import Loaded, TargetConfig, load, make_engine
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc
from dspark.v1 import verification_pb2, verification_pb2_grpc
from dspark.verifier.runner import FAILED_STEPS

from ..cli.conftest import make_checkpoint
from ..gateway.toy_front import certificate, needs_ipv6, needs_openssl

STALL_TIMEOUT_S = 0.25
ENGINE: dict[str, Any] = {
    "kv_tokens": 8192,
    "max_step_tokens": 64,
    "buffered_events": 4000,
    "stall_timeout_s": STALL_TIMEOUT_S,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    directory = tmp_path_factory.mktemp("serve")
    checkpoint = make_checkpoint(directory / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_CACHE", str(directory / "cache"))
        yield load(TargetConfig(str(checkpoint), threads=1, engine=EngineConfig(**ENGINE)))


def configured(loaded: Loaded, **flags: object) -> ServeConfig:
    engine = {f"engine.{name}": value for name, value in ENGINE.items()}
    ports = {"http.port": 0, "grpc.port": 0, "verification.port": 0}
    settings = {"model": loaded.config.model, "name": "tiny", "drain_s": 0.2, **engine, **ports}
    return configure(None, {}, {**settings, **flags})


@asynccontextmanager
async def serving(loaded: Loaded, **flags: object) -> AsyncIterator[Running]:
    config = configured(loaded, **flags)
    async with running(config, access(config), loaded) as servers:
        yield servers


def asked(tokens: int, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(text="the cat"),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=tokens, **sampling),
    )


async def test_the_drafter_says_what_kind_it_is_over_both_protocols(loaded: Loaded) -> None:
    async with (
        serving(loaded) as servers,
        grpc.aio.insecure_channel(servers.grpc.address) as channel,
        httpx.AsyncClient() as http,
    ):
        told = await pb_grpc.GenerationStub(channel).ModelInfo(pb.ModelInfoRequest())
        assert list(told.drafters) == [pb.DrafterInfo(drafter_id="ngram", kind="ngram", gamma=7)]
        (card,) = (await http.get(f"{servers.url}/v1/models")).json()["data"]
        assert card["drafters"] == ["ngram"]


async def test_calls_of_both_protocols_are_in_one_set_of_figures(loaded: Loaded) -> None:
    async with (
        serving(loaded) as servers,
        grpc.aio.insecure_channel(servers.grpc.address) as channel,
        httpx.AsyncClient() as http,
    ):
        stub: Any = pb_grpc.GenerationStub(channel)
        assert [response async for response in stub.Generate(asked(3))]
        body = {"prompt": "the cat", "max_tokens": 3}
        assert (await http.post(f"{servers.url}/v1/completions", json=body)).status_code == 200
        text = (await http.get(f"{servers.url}/metrics")).text
    for protocol in ("grpc", "http"):
        assert f'dspark_time_to_first_token_seconds_count{{protocol="{protocol}"}} 1.0' in text


async def test_the_one_limit_for_readers_that_stand_still_is_the_engines(loaded: Loaded) -> None:
    """The whole answer fits into the engine's buffer and not into the connection's, so that only
    the front can tell that it waits; it takes many times as long as the front is patient."""
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        serving(loaded) as servers,
        grpc.aio.insecure_channel(servers.grpc.address, narrow) as channel,
    ):
        stub: Any = pb_grpc.GenerationStub(channel)
        call = stub.Generate(asked(3000, logprobs=True, top_logprobs=20))
        started, chunk = await call.read(), await call.read()
        assert started.HasField("started")
        assert chunk.HasField("chunk")
        while not loaded.engine.idle:
            await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await read_on(call)
    error = error_from_rpc(told.value)
    assert isinstance(error, Overloaded)
    assert str(error) == f"the reader took nothing for {STALL_TIMEOUT_S} s, and its buffer is full"


async def read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


@needs_ipv6
async def test_on_ipv6_every_address_can_be_called_as_it_is_told(loaded: Loaded) -> None:
    hosts = dict.fromkeys(("http.host", "grpc.host", "verification.host"), "::1")
    async with serving(loaded, **hosts) as servers, httpx.AsyncClient() as http:
        assert servers.url == f"http://[::1]:{servers.http.port}"
        assert (await http.get(f"{servers.url}/readyz")).status_code == 200
        async with grpc.aio.insecure_channel(servers.grpc.address) as channel:
            await pb_grpc.GenerationStub(channel).ModelInfo(pb.ModelInfoRequest())
        assert await described(servers, None) is None


async def described(servers: Running, credentials: grpc.ChannelCredentials | None) -> Any:
    """None, or with what status the verification service refused."""
    assert servers.verification is not None
    address = servers.verification.address
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials)
    )
    async with channel:
        stub: Any = verification_pb2_grpc.VerificationStub(channel)
        try:
            said = await stub.Describe(verification_pb2.DescribeRequest())
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert said.card.model == "tiny"
        return None


@needs_openssl
async def test_a_client_ca_guards_the_verification_service_too(
    loaded: Loaded, tmp_path: Path
) -> None:
    pairs = {name: certificate(tmp_path, name) for name in ("server", "gateway", "stranger")}
    tls = {
        "tls.certificate": str(pairs["server"][0]),
        "tls.key": str(pairs["server"][1]),
        "tls.client_ca": str(pairs["gateway"][0]),
    }
    root = pairs["server"][0].read_bytes()
    async with serving(loaded, **tls) as servers:
        for shown, refused in (
            ("gateway", None),
            ("stranger", grpc.StatusCode.UNAVAILABLE),
            (None, grpc.StatusCode.UNAVAILABLE),
        ):
            own = () if shown is None else [file.read_bytes() for file in reversed(pairs[shown])]
            assert await described(servers, grpc.ssl_channel_credentials(root, *own)) is refused


class Lost:
    """A backend whose device is gone: its steps fail, or with a gate hang until that is opened."""

    def __init__(self, backend: Any, gate: threading.Event | None = None) -> None:
        self._backend, self._gate = backend, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: Any) -> Any:
        if self._gate is not None:
            self._gate.wait()
        raise RuntimeError("the device is lost")


async def test_a_process_whose_engine_is_broken_ends(loaded: Loaded) -> None:
    """It could only refuse: whoever watches over it starts another."""
    lost: Any = Lost(loaded.backend)
    engine = make_engine(lost, loaded.config, loaded.cost, loaded.tokenizer.eos_ids)
    config, up = configured(loaded), asyncio.Queue[Running]()
    work = serve(config, access(config), replace(loaded, engine=engine), up.put_nowait)
    serving = asyncio.create_task(work)
    servers = await up.get()
    async with httpx.AsyncClient() as http:
        body = {"prompt": "the cat", "max_tokens": 3}
        for _ in range(FAILED_STEPS):
            answer = await http.post(f"{servers.url}/v1/completions", json=body)
            assert answer.status_code == 503
    with pytest.raises(Unavailable, match="the engine is broken"):
        await asyncio.wait_for(serving, 30)


@pytest.mark.slow  # a step hangs once it has taken 10 s, and is left behind 5 s later
async def test_a_process_whose_engine_hangs_ends(loaded: Loaded) -> None:
    gate = threading.Event()
    hung: Any = Lost(loaded.backend, gate)
    engine = make_engine(hung, loaded.config, loaded.cost, loaded.tokenizer.eos_ids)
    config, up = configured(loaded), asyncio.Queue[Running]()
    work = serve(config, access(config), replace(loaded, engine=engine), up.put_nowait)
    serving = asyncio.create_task(work)
    servers = await up.get()
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"prompt": "the cat", "max_tokens": 3}
        asking = asyncio.create_task(http.post(f"{servers.url}/v1/completions", json=body))
        with pytest.raises(Unavailable, match="fail or hang"):
            await asyncio.wait_for(serving, 40)
        asking.cancel()
    gate.set()
