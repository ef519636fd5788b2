"""A uvicorn server with the bounds that uvicorn leaves to a proxy, as one part of a process.

Signals, logging and the event loop are the process's; an address that cannot be had is an error
here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dspark.core.errors import ConfigError
from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.openai.door import Door
from dspark.gateway.openai.errors import Refused, failure
from dspark.gateway.openai.render import dumps
from dspark.serving import TlsFiles, address_of, listen

# Of a request line and its headers; other servers have 8 to 64 KiB.
HEAD_BYTES = 64 * 2**10
# Seconds after the drain for the last statuses to leave.
FAREWELL_S = 2.0


class Alarm:
    """Calls something once, unless it is cleared in time. Set again it keeps its first time."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def set(self, after_s: float, call: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(after_s, call)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BoundedProtocol(HttpToolsProtocol):
    """One connection: a head must come in time and within its size, and what is written be read."""

    bounds: ClassVar[HttpConfig]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_due = Alarm()
        self._read_due = Alarm()
        self._in_head = False
        self._head_bytes = 0

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if not self._answering:
            self._await_head()
        goes_on = self._in_head
        super().data_received(data)
        if goes_on and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(
                    Refused(431, f"the head is above the limit of {HEAD_BYTES} bytes", "bad_head")
                )

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_due.clear()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_due.clear()
        self._read_due.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._read_due.set(self.bounds.cut_off_s, self.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._read_due.clear()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, "this is not HTTP", "bad_head"))

    def abort(self) -> None:
        """Ends the connection at once; whoever answers on it sees that the client is gone."""
        self.transport.abort()

    def _await_head(self) -> None:
        self._head_due.set(self.bounds.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._in_head:
            told = f"the head did not come within {self.bounds.head_s:g} s"
            self._refuse(Refused(408, told, "head_timeout"))
        else:
            self.transport.close()

    def _refuse(self, refused: Refused) -> None:
        """A response before there is a request to answer."""
        if self._answering or self.transport.is_closing():
            self.abort()
            return
        body = dumps(failure(refused).body)
        phrase = HTTPStatus(refused.status).phrase
        head = (
            f"HTTP/1.1 {refused.status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """Says when it is up, and leaves signals to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A running server. address: host:port that it listens on."""

    def __init__(self, server: _Uvicorn, door: Door, host: str, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.address = address_of(host, self.port)
        self._server = server
        self._door = door
        self._serving = asyncio.create_task(server.serve([listener]))

    async def drain(self, grace_s: float) -> None:
        """Stop for good: no call is let in, what runs has grace_s to finish, what is left then ends
        with an error. A second call with less time hurries the first."""
        self._door.drain()
        self._server.should_exit = True
        if await self._ended(grace_s):
            return
        self._door.shut()
        if await self._ended(FAREWELL_S):
            return
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, BoundedProtocol):
                connection.abort()
        await self._serving

    async def _ended(self, within_s: float) -> bool:
        done, _ = await asyncio.wait([self._serving], timeout=within_s)
        return bool(done)


@asynccontextmanager
async def serve_http(
    app: ASGIApp,
    door: Door,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: TlsFiles | None = None,
    config: HttpConfig | None = None,
) -> AsyncIterator[HttpServer]:
    """Serves inside the context and drains at its end. door: the application's. port 0: any free.

    Raises ConfigError for an address that cannot be had and for TLS files that cannot be read.
    """
    config = config or HttpConfig()
    settings = uvicorn.Config(
        app,
        http=type("Protocol", (BoundedProtocol,), {"bounds": config}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.idle_s,
        **({} if tls is None else tls_settings(tls)),
    )
    try:
        settings.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"tls: {tls and tls.certificate}: {error}") from error
    listener = listen(host, port)
    server = _Uvicorn(settings)
    running = HttpServer(server, door, host, listener)
    await server.up.wait()
    try:
        yield running
    finally:
        await running.drain(config.drain_s)


def tls_settings(tls: TlsFiles) -> dict[str, Any]:
    settings: dict[str, Any] = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    if tls.client_ca is not None:
        settings |= {"ssl_ca_certs": str(tls.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return settings
