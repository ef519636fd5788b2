"""GET /metrics of a replica: the smallest HTTP that Prometheus speaks, with bounds on all of it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dspark.core.errors import ConfigError
from dspark.serving.addresses import address_of, listen
from dspark.telemetry.config import METRICS_PORTS, MetricsListen

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Bytes of a request's head, and seconds for all of a request: Prometheus needs 300 and 10.
MAX_HEAD_BYTES = 8192
REQUEST_S = 10.0
# Requests at a time; more are hung up on.
MOST_AT_ONCE = 8


@asynccontextmanager
async def serve_metrics(where: MetricsListen, text: Callable[[], bytes]) -> AsyncIterator[str]:
    """Serves inside the context; host:port. text: made in a thread. Of METRICS_PORTS from
    where.port on the first free one is taken. Raises ConfigError if none is."""
    serving: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(serving) < MOST_AT_ONCE:
                serving.add(task)
                async with asyncio.timeout(REQUEST_S):
                    await _answer(reader, writer, text)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a request for metrics was not finished")
        finally:
            serving.discard(task)
            writer.close()

    listener = _listen(where)
    port: int = listener.getsockname()[1]
    server = await asyncio.start_server(one, sock=listener, limit=MAX_HEAD_BYTES)
    try:
        yield address_of(where.host, port)
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await server.wait_closed()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: Callable[[], bytes]
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
    path = rest.split(b" ")[0].split(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", b"only GET\n"
    elif path == b"/metrics":
        status, body = "200 OK", await asyncio.to_thread(text)
    elif path == b"/healthz":
        status, body = "200 OK", b"alive\n"
    else:
        status, body = "404 Not Found", b"/metrics is here\n"
    begin = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(begin.encode() + (b"" if method == b"HEAD" else body))
    await writer.drain()


def _listen(where: MetricsListen) -> socket.socket:
    last = where.port + METRICS_PORTS - 1 if where.port else 0
    for port in range(where.port, last + 1):
        try:
            return listen(where.host, port)
        except ConfigError as error:
            why = error
    raise ConfigError(f"telemetry.metrics.port: none of {where.port} to {last} is free: {why}")
