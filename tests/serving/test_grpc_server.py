"""One gRPC server as every service of dspark gets it, over a real channel: how it is reached, and
how it ends. The service here does nothing but wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dspark.client.wire_client import error_from_rpc
from dspark.core.errors import ConfigError, Unavailable
from dspark.serving import Calls, Context, GrpcServer, TlsFiles, address_of, serve_grpc

from ..gateway.toy_front import certificate, needs_ipv6, needs_openssl

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Waiting:
    """A service whose calls wait until they are let go."""

    name = "test.Waiting"
    options = (("grpc.max_receive_message_length", 1000),)

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()
        self._calls = Calls("this service")
        self._refusing = False

    def add_to(self, server: grpc.aio.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(self._wait)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self.name, {"Wait": handler}),)
        )

    def refuse_new(self) -> None:
        self._refusing = True

    async def finish(self, grace_s: float) -> None:
        await self._calls.finish(grace_s)

    async def _wait(self, said: bytes, context: Context) -> bytes:
        async with self._calls.one(context):
            if self._refusing:
                raise Unavailable("nothing new")
            self.begun.release()
            await self.go_on.wait()
            return said


@asynccontextmanager
async def channel_to(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


def wait(channel: grpc.aio.Channel, said: bytes = b"hello") -> asyncio.Future[Any]:
    return asyncio.ensure_future(_called(channel, said))


async def _called(channel: grpc.aio.Channel, said: bytes) -> bytes:
    answer: bytes = await channel.unary_unary("/test.Waiting/Wait")(said)
    return answer


async def refusal(call: asyncio.Future[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await call
    return told.value.code(), str(error_from_rpc(told.value))


def listens(server: GrpcServer) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


async def health(channel: grpc.aio.Channel, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


# --- how it is reached


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_it_answers_where_it_says(host: str) -> None:
    service = Waiting()
    service.go_on.set()
    async with serve_grpc(service, host) as server, channel_to(server) as channel:
        assert server.address == address_of(host, server.port)
        assert ("[" in server.address) == (":" in host)
        assert await wait(channel) == b"hello"
        assert await health(channel, "") == await health(channel, "test.Waiting") == SERVING


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_a_port_in_use_is_an_error_that_names_it(host: str) -> None:
    async with serve_grpc(Waiting(), host) as first, channel_to(first) as channel:
        with pytest.raises(ConfigError) as told:
            async with serve_grpc(Waiting(), host, first.port):
                pass
        assert str(told.value).startswith(f"address: {first.address} cannot be listened on: ")
        assert await health(channel, "") == SERVING, "who has it is undisturbed"


async def test_its_own_options_hold() -> None:
    async with serve_grpc(Waiting()) as server, channel_to(server) as channel:
        status, _ = await refusal(wait(channel, b"a" * 1001))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED


# --- how it ends


async def test_a_drain_says_so_closes_the_port_and_waits_for_calls_that_run() -> None:
    service = Waiting()
    async with serve_grpc(service) as server, channel_to(server) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="test.Waiting"))
        assert (await watch.read()).status == SERVING
        runs = wait(channel)
        await service.begun.acquire()
        draining = asyncio.create_task(server.drain(60))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        while listens(server):
            await asyncio.sleep(0.005)
        assert not draining.done()
        assert not runs.done()
        service.go_on.set()
        assert await runs == b"hello"
        await draining


async def test_who_refuses_new_calls_keeps_its_connections() -> None:
    service = Waiting()
    async with serve_grpc(service) as server, channel_to(server) as channel:
        runs = wait(channel)
        await service.begun.acquire()
        await server.refuse_new()
        assert await health(channel, "") == NOT_SERVING
        assert await refusal(wait(channel)) == (grpc.StatusCode.UNAVAILABLE, "nothing new")
        service.go_on.set()
        assert await runs == b"hello"


async def test_what_is_left_ends_with_a_status_and_a_second_drain_hurries_the_first() -> None:
    service = Waiting()
    async with serve_grpc(service) as server, channel_to(server) as channel:
        calls = [wait(channel) for _ in range(3)]
        for _ in calls:
            await service.begun.acquire()
        patient = asyncio.create_task(server.drain(3600))
        await asyncio.wait([patient], timeout=0.05)
        assert not any(call.done() for call in calls)
        await server.drain(0)
        for call in calls:
            told = (grpc.StatusCode.UNAVAILABLE, "this service has stopped")
            assert await refusal(call) == told
        await patient


async def test_the_end_of_the_context_is_a_drain() -> None:
    service = Waiting()
    async with serve_grpc(service, drain_s=0) as server:
        channel = grpc.aio.insecure_channel(server.address)
        runs = wait(channel)
        await service.begun.acquire()
    assert (await refusal(runs))[1] == "this service has stopped"
    await channel.close()


# --- TLS files


@needs_openssl
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("a.pem", "a.key", "b.pem"), None),
        (("a.pem", "b.key", None), "a.pem and {}/b.key are no certificate and its key: KEY_VALUES"),
        (("a.key", "a.key", None), "a.key and {}/a.key are no certificate and its key: "),
        (("a.pem", "a.key", "b.key"), "b.key is no certificate: "),
        (("a.pem", "a.key", "c.pem"), "c.pem: No such file or directory"),
        (("c.pem", "a.key", None), "c.pem: No such file or directory"),
    ],
)
def test_tls_files_that_do_not_fit_are_named(
    tmp_path: Path, names: tuple[str | None, ...], told: str | None
) -> None:
    for name in "ab":
        certificate(tmp_path, name)
    own, key, ca = (None if name is None else tmp_path / name for name in names)
    assert own is not None
    assert key is not None
    files = TlsFiles(own, key, ca)
    if told is None:
        files.check()
    else:
        with pytest.raises(ConfigError) as error:
            files.check()
        assert str(error.value).startswith(f"tls: {tmp_path}/{told.format(tmp_path)}")
