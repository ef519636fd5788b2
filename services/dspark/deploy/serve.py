"""One process that serves: engine, gateway, gRPC and HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dspark.deploy.serve_config import Listen, ServeConfig, TlsSection
from dspark.deploy.single import Loaded
from dspark.gateway.gateway import Gateway, ServedModel
from dspark.gateway.keys import KeyRing
from dspark.gateway.openai.app import make_app
from dspark.gateway.openai.door import Door
from dspark.gateway.openai.metrics import Metrics, reads
from dspark.gateway.openai.server import serve_http
from dspark.gateway.servicer import TlsFiles, serve_generation
from dspark.verifier.card import VerifierCard
from dspark.verifier.runner import EngineRunner
from dspark.verifier.servicer import VerificationServicer, serve_verification

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of each door that is open. verification: None if it is off."""

    http: str
    grpc: str
    verification: str | None
    tls: bool

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.http}"


@asynccontextmanager
async def running(config: ServeConfig, loaded: Loaded) -> AsyncIterator[Addresses]:
    """Everything up and ready inside the context; drained and stopped at its end.

    Raises ConfigError for keys, certificates and addresses that cannot be had.
    """
    keys = KeyRing() if config.keys is None else KeyRing.load(config.keys)
    tls = None if config.tls is None else _tls_files(config.tls)
    async with AsyncExitStack() as stack:
        runner = await stack.enter_async_context(EngineRunner(loaded.engine))
        gateway = Gateway(runner, loaded.tokenizer, _served_model(config, loaded))
        verification = None
        if config.verification is not None:
            verification = await stack.enter_async_context(
                serve_verification(
                    VerificationServicer(runner, _card(config, loaded)),
                    config.verification.host,
                    config.verification.port,
                    credentials=None if tls is None else tls.credentials(),
                    grace_s=config.drain_s,
                )
            )
        door = Door()
        metrics = Metrics(reads(loaded.engine))
        app = make_app(gateway, keys, door, metrics, config.bounds())
        grpc = await stack.enter_async_context(
            serve_generation(gateway, keys, *_where(config.grpc), tls=tls, drain_s=config.drain_s)
        )
        http = await stack.enter_async_context(
            serve_http(app, door, *_where(config.http), tls=tls, config=config.bounds())
        )
        door.open()
        yield Addresses(
            http.address,
            grpc.address,
            None if verification is None else verification.address,
            tls is not None,
        )
        # Together, so that both get the whole drain; each context then finds its own done.
        await asyncio.gather(http.drain(config.drain_s), grpc.drain(config.drain_s))


async def serve(config: ServeConfig, loaded: Loaded, ready: Callable[[Addresses], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal does not wait for the drain."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None

    def stop() -> None:
        if stopped.is_set():
            log.warning("stopping at once")
            me.cancel()
        else:
            log.info("draining: up to %g s for what runs", config.drain_s)
            stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        async with running(config, loaded) as addresses:
            ready(addresses)
            await stopped.wait()
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _where(listen: Listen) -> tuple[str, int]:
    return listen.host, listen.port


def _tls_files(tls: TlsSection) -> TlsFiles:
    ca = None if tls.client_ca is None else Path(tls.client_ca)
    return TlsFiles(Path(tls.certificate), Path(tls.key), ca)


def _served_model(config: ServeConfig, loaded: Loaded) -> ServedModel:
    engine = loaded.engine
    return ServedModel(
        name=config.name or Path(config.model).name,
        target_id=engine.target_id,
        limits=engine.limits,
        drafters=tuple(engine.drafters),
        gamma=engine.config.gamma,
        verify=engine.config.verify,
        couple_unseeded=config.couple_unseeded,
    )


def _card(config: ServeConfig, loaded: Loaded) -> VerifierCard:
    engine = loaded.engine
    return VerifierCard(
        model=config.name or Path(config.model).name,
        target_id=engine.target_id,
        tokenizer_hash=loaded.tokenizer.tokenizer_hash,
        backend=engine.backend_name,
        limits=engine.limits,
        block_size=engine.config.block_size,
        max_sequences=engine.config.max_sequences,
        max_waiting=engine.config.max_waiting,
    )
