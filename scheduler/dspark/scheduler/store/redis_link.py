"""A link to one Redis or Valkey server: runs scripts, and knows what each failure means."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
)

from dspark.core.errors import ConfigError, DsparkError, Unavailable
from dspark.scheduler.store.config import Server, StoreConfig, check_version
from dspark.scheduler.store.lua import Script, load
from dspark.scheduler.store.names import KEYS, key

log = logging.getLogger(__name__)

Argument = str | bytes | int

# What no waiting repairs.
_OPERATOR = (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
    ssl.SSLCertVerificationError,
)


class RedisLink:
    """Opens connections when they are needed and again after any failure; never retries a call.

    clock, sweep: see RedisStore. Close it in the end.
    """

    def __init__(self, config: StoreConfig, clock: Callable[[], float] | None, sweep: int) -> None:
        self._server = Server.of(config.url)
        self._clock = clock
        self._scripts = load(sweep)
        self._keys = {name: key(config.cluster, name).encode() for name in KEYS}
        self._running: set[asyncio.Task[Any]] = set()
        self._warned = False
        kind, more = self._kind(config)
        self._pool = BlockingConnectionPool(
            connection_class=kind,
            max_connections=config.connections,
            timeout=config.answer_timeout_s,
            username=self._server.user,
            password=config.password(),
            db=self._server.database,
            socket_connect_timeout=config.connect_timeout_s,
            socket_timeout=config.answer_timeout_s,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._connected,
            driver_info=None,
            protocol=2,
            **more,
        )
        self._redis = Redis(connection_pool=self._pool)

    def _kind(self, config: StoreConfig) -> tuple[type[AbstractConnection], dict[str, Any]]:
        """The sort of connection, and what it alone is told."""
        server = self._server
        if server.path is not None:
            return UnixDomainSocketConnection, {"path": server.path}
        place: dict[str, Any] = {"host": server.host, "port": server.port}
        if not server.tls:
            return Connection, place
        check_tls_files(config)
        files = {
            "ssl_ca_certs": config.ca_file,
            "ssl_certfile": config.cert_file,
            "ssl_keyfile": config.key_file,
        }
        return SSLConnection, place | {name: str(path) for name, path in files.items() if path}

    async def close(self) -> None:
        """Wait for calls in flight, which their timeouts bound, and hang up."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._redis.aclose()
        await self._pool.aclose()

    async def run(self, name: str, *arguments: Argument) -> Any:
        """The script's result. Raises `Unavailable` or `ConfigError`."""
        script = self._scripts[name]
        now = "" if self._clock is None else str(round(self._clock() * 1000))
        return await self._finish(self._run(script, now, *arguments))

    async def snapshot(self) -> dict[str, tuple[Any, int]]:
        """What each key holds and its time to live in ms (-1: none), all at one moment."""
        seen: dict[str, tuple[Any, int]] = await self._finish(self._snapshot())
        return seen

    async def ping(self) -> None:
        await self._finish(self._ping())

    async def _run(self, script: Script, *arguments: Argument) -> Any:
        keys = [self._keys[name] for name in script.keys]
        try:
            return await self._redis.evalsha(script.sha, len(keys), *keys, *arguments)
        except NoScriptError:  # a server that is new or has restarted
            return await self._redis.eval(script.source, len(keys), *keys, *arguments)
        except ReadOnlyError:  # it leads no longer: the name may lead to another server by now
            await self._pool.disconnect(inuse_connections=False)
            raise

    async def _snapshot(self) -> dict[str, tuple[Any, int]]:
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, kind in KEYS.items():
                if kind.type == "hash":
                    pipe.hgetall(self._keys[name])
                else:
                    pipe.zrange(self._keys[name], 0, -1, withscores=True)
                pipe.pttl(self._keys[name])
            results = await pipe.execute()
        return dict(zip(KEYS, zip(results[::2], results[1::2], strict=True), strict=True))

    async def _ping(self) -> None:
        await self._redis.ping()

    async def _finish(self, call: Any) -> Any:
        """A call that was sent goes on to its end also if its caller hangs up: given up half way it
        would cost its connection, and callers with short deadlines hang up often."""
        task = asyncio.ensure_future(call)
        self._running.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except (RedisError, OSError) as error:
            raise self._told(error) from error

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: then nobody else looks at it

    def _told(self, error: BaseException) -> DsparkError:
        """What a failure means: it heals by waiting, or it does not."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, _OPERATOR):
                return ConfigError(f"the store at {self._server.where} refuses us: {cause}")
            cause = cause.__cause__ or cause.__context__
        code = getattr(error, "status_code", None)
        told = f"{code} {error}" if code else str(error) or type(error).__name__
        return Unavailable(f"the store at {self._server.where} cannot answer: {told}")

    async def _connected(self, connection: AbstractConnection) -> None:
        """Every new connection: log in, and look who answers; servers change places."""
        await connection.on_connect()
        await connection.send_command("INFO")
        try:
            info = _parsed(await connection.read_response())
            check_version(info.get("redis_version", "unknown"))
        except ConfigError:
            await connection.disconnect()
            raise
        evicts = info.get("maxmemory", "0") != "0" and info.get("maxmemory_policy") != "noeviction"
        if evicts and not self._warned:
            self._warned = True
            log.warning(
                "the store at %s evicts keys when its memory is full (maxmemory-policy %s): leases "
                "and their sums may part; set noeviction",
                self._server.where,
                info.get("maxmemory_policy"),
            )


def check_tls_files(config: StoreConfig) -> None:
    """Raises ConfigError naming one that cannot be used, before the first connection needs it."""
    context = ssl.create_default_context()
    try:
        if config.ca_file is not None:
            context.load_verify_locations(config.ca_file)
    except OSError as error:
        raise ConfigError(f"ca_file: {config.ca_file}: {error}") from None
    try:
        if config.cert_file is not None:
            context.load_cert_chain(config.cert_file, config.key_file)
    except OSError as error:
        files = f"{config.cert_file}, key_file: {config.key_file}"
        raise ConfigError(f"cert_file: {files}: {error}") from None


def _parsed(info: bytes) -> Mapping[str, str]:
    """The lines `name:value` of INFO."""
    return dict(re.findall(r"^(\w+):([^\r\n]*)", info.decode("utf-8", "replace"), re.MULTILINE))
