"""One process that serves: engine, gateway, gRPC and HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from dspark.core.errors import Unavailable
from dspark.deploy.lives import end_of
from dspark.deploy.serve_config import Listen, ServeConfig
from dspark.deploy.single import Loaded, verifier_card
from dspark.gateway.gateway import Gateway, ServedModel
from dspark.gateway.keys import KeyRing
from dspark.gateway.metrics import Metrics
from dspark.gateway.openai.app import make_app
from dspark.gateway.openai.door import Door
from dspark.gateway.openai.server import HttpServer, serve_http
from dspark.gateway.servicer import GenerationServicer
from dspark.serving import GrpcServer, TlsFiles, listen, serve_grpc
from dspark.telemetry.process import telemetry
from dspark.telemetry.readings import read_engine
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call, and what secures the connections."""

    keys: KeyRing
    tls: TlsFiles | None


def access(config: ServeConfig) -> Access:
    """Read what lies outside the configuration, before a model is loaded for nothing.

    Raises ConfigError for keys, certificates and addresses that cannot be had.
    """
    keys = KeyRing() if config.keys is None else KeyRing.load(config.keys)
    tls = None if config.tls is None else config.tls.files()
    if tls is not None:
        tls.check()
    with ExitStack() as probes:  # open together: two servers may not want one port
        for where in (config.http, config.grpc, config.verification):
            if where is not None:
                probes.enter_context(listen(where.host, where.port))
    return Access(keys, tls)


@dataclass(frozen=True, slots=True)
class Running:
    """The servers of one process. verification: None if it is off. url: of HTTP, where to call.
    lives: whether the engine does."""

    http: HttpServer
    grpc: GrpcServer
    verification: GrpcServer | None
    url: str
    lives: Callable[[], bool]

    async def drain(self, grace_s: float) -> None:
        """Stop for good: nothing new is accepted, what runs has grace_s to finish, and what is left
        ends with a status. A second call with less time hurries the first."""
        servers = (self.http, self.grpc, self.verification)
        await asyncio.gather(*(server.drain(grace_s) for server in servers if server is not None))


@asynccontextmanager
async def running(config: ServeConfig, access: Access, loaded: Loaded) -> AsyncIterator[Running]:
    """Everything up and ready inside the context; drained and stopped at its end.

    Raises ConfigError for addresses that cannot be had.
    """
    tls = access.tls
    async with AsyncExitStack() as stack:
        told = await stack.enter_async_context(telemetry(config.telemetry, pool="serve"))
        runner = await stack.enter_async_context(EngineRunner(loaded.engine, told.runs))
        gateway = Gateway(
            runner,
            loaded.tokenizer,
            _served_model(config, loaded),
            metrics=Metrics(partial(read_engine, loaded.engine), told.registry),
            tracer=told.tracer,
            stall_timeout_s=loaded.engine.config.stall_timeout_s,
        )
        grpc_servers = partial(serve_grpc, tls=tls, drain_s=config.drain_s)
        verification = None
        if config.verification is not None:
            servicer = VerificationServicer(runner, verifier_card(loaded, config.served_name))
            verification = await stack.enter_async_context(
                grpc_servers(servicer, *_where(config.verification))
            )
        grpc = await stack.enter_async_context(
            grpc_servers(GenerationServicer(gateway, access.keys), *_where(config.grpc))
        )
        door, bounds = Door(), config.bounds()
        app = make_app(gateway, access.keys, door, bounds)
        http = await stack.enter_async_context(
            serve_http(app, door, *_where(config.http), tls=tls, config=bounds)
        )
        door.open()
        scheme = "http" if tls is None else "https"
        yield Running(http, grpc, verification, f"{scheme}://{http.address}", lambda: runner.alive)


async def serve(
    config: ServeConfig, access: Access, loaded: Loaded, ready: Callable[[Running], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends what runs at once. Raises
    Unavailable when the engine is broken or hangs: only another process could serve then."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    async with running(config, access, loaded) as servers:
        ready(servers)
        asked = asyncio.create_task(signals.get())
        broken = asyncio.create_task(end_of(servers.lives))
        await asyncio.wait((asked, broken), return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        if not asked.done():
            asked.cancel()
            await servers.drain(0.0)
            raise Unavailable("the engine is broken: its steps fail or hang, and the log says why")
        log.info("stopping: what runs has up to %g s to finish", config.drain_s)
        draining = asyncio.create_task(servers.drain(config.drain_s))
        again = asyncio.create_task(signals.get())
        await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
        if again.done():
            log.warning("stopping at once")
            await servers.drain(0.0)
        again.cancel()
        await draining


def _where(listen: Listen) -> tuple[str, int]:
    return listen.host, listen.port


def _served_model(config: ServeConfig, loaded: Loaded) -> ServedModel:
    engine = loaded.engine
    return ServedModel(
        name=config.served_name,
        target_id=engine.target_id,
        limits=engine.limits,
        drafters=tuple(drafter.card for drafter in engine.drafters.values()),
        gamma=engine.config.gamma,
        verify=engine.config.verify,
        couple_unseeded=config.couple_unseeded,
    )
