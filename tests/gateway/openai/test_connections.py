"""Connections that behave badly: each is bounded, and the others do not notice."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dspark.core.errors import ConfigError
from dspark.gateway.openai import Door, HttpConfig, serve_http
from dspark.serving import TlsFiles, listen

from ..toy_front import certificate, needs_ipv6, needs_openssl
from .served import FOR_EVER, HeldBackend, Served, said, saying, serve, toy

SHORT = HttpConfig(head_s=0.3, body_s=0.3, idle_s=1, stall_timeout_s=0.3, drain_s=0.2)


def request_bytes(version: str = "1.1", **body: Any) -> bytes:
    content = json.dumps({"prompt": "Hi", "temperature": 0} | body).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nhost: here\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def read_until(connection: socket.socket, sign: bytes) -> bytes:
    data = b""
    while sign not in data:
        part = connection.recv(65536)
        assert part, f"{sign!r} never came"
        data += part
    return data


def alive(front: Served) -> None:
    began = time.monotonic()
    assert front.post(prompt="Hi", temperature=0).json()["choices"][0]["text"] == said("Hi", 16)
    assert time.monotonic() - began < 5


# --- half requests


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"POST /v1/comp", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: here\r\n", b"408"),
        (request_bytes()[:-5], b"408"),
        (request_bytes(version="1.0")[:-5], b"408"),
    ],
)
def test_half_a_request_then_silence(sent: bytes, status: bytes) -> None:
    with serve(config=SHORT) as front, front.connect() as connection:
        connection.sendall(sent)
        answer = read_all(connection)
        assert answer[9:12] == status
        if answer:
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert "within 0.3 s" in error["message"]
        alive(front)


def test_a_second_request_that_never_comes_whole() -> None:
    with serve(config=SHORT) as front, front.connect() as connection:
        connection.sendall(request_bytes())
        read_until(connection, b'"usage"')
        connection.sendall(request_bytes()[:40])
        assert b"HTTP/1.1 408" in read_all(connection)
        # One that came beside the first waits as idle connections do.
        with front.connect() as other:
            other.sendall(request_bytes() + request_bytes()[:40])
            assert b"HTTP/1.1 200" in read_all(other)
        alive(front)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a port that has none
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_no_http(front: Served, sent: bytes) -> None:
    with front.connect() as connection:
        connection.sendall(sent)
        answer = read_all(connection)
        assert answer[:12] == b"HTTP/1.1 400"
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_head"
    alive(front)


def test_a_head_without_end(front: Served) -> None:
    with front.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        try:
            for i in range(100_000):
                connection.sendall(b"x-%d: %s\r\n" % (i, b"y" * 1000))
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert i < 20_000, "it is read without end"
    alive(front)


def test_a_thousand_idle_connections(front: Served) -> None:
    connections = [front.connect() for _ in range(1000)]
    try:
        alive(front)
        chunks = front.client.completions.create(
            model="toy", prompt="Hi", max_tokens=50, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == said("Hi", 50)
    finally:
        for connection in connections:
            connection.close()
    alive(front)


# --- old and odd clients


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_a_body_without_chunks(front: Served, stream: bool) -> None:
    with front.connect() as connection:
        connection.sendall(request_bytes("1.0", stream=stream, max_tokens=30))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    if stream:
        events = body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        text = "".join(piece["choices"][0]["text"] for piece in pieces)
    else:
        text = json.loads(body)["choices"][0]["text"]
    assert text == said("Hi", 30)


def test_http_1_0_is_told_of_failures(front: Served) -> None:
    with front.connect() as connection:
        connection.sendall(request_bytes("1.0", stream=True, deadline=0.5, max_tokens=FOR_EVER))
        answer = read_all(connection)
    assert b"event: error" in answer
    assert b"[DONE]" not in answer
    with front.connect() as connection:
        connection.sendall(request_bytes("1.0", n=0))
        assert b"400 Bad Request" in read_all(connection)


def test_requests_in_a_row_are_answered_in_order(front: Served) -> None:
    with front.connect() as connection:
        connection.sendall(b"".join(request_bytes(max_tokens=n) for n in (9, 3, 6)))
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 3 or not data.endswith(b"}"):
            data += connection.recv(65536)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in data.split(b"HTTP/1.1 200 OK")[1:]]
    tokens = [json.loads(body)["usage"]["completion_tokens"] for body in bodies]
    assert tokens == [9, 3, 6]


def test_a_body_that_waits_to_be_asked_for(front: Served) -> None:
    head, _, body = request_bytes().partition(b"\r\n\r\n")
    with front.connect() as connection:
        connection.sendall(head + b"\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        assert b"200 OK" in read_all(connection)


# --- clients that vanish or do not read


@pytest.mark.parametrize("stream", [True, False])
def test_a_hundred_clients_that_vanish(stream: bool) -> None:
    with serve(toy(max_sequences=64)) as front:
        sent = request_bytes(
            stream=stream, max_tokens=300 if stream else FOR_EVER, prompt="Hi " * 5
        )
        # Streams that would outlast the test many times over, were they read to the end.
        sent = request_bytes(stream=stream, max_tokens=FOR_EVER, prompt="Hi " * 5)
        connections = [front.connect() for _ in range(100)]
        for connection in connections:
            connection.sendall(sent)
        if stream:
            for connection in connections[:20]:
                read_until(connection, b"data: ")
        front.wait_active(100)
        for i, connection in enumerate(connections):
            if i % 2:  # some say so, some are cut off
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        front.wait_freed(2)
        alive(front)
        text = httpx.get(front.url + "/metrics").text
        status = '200"' if stream else '499"'
        assert f'route="/v1/completions",status="{status}' in text


def test_one_that_vanishes_in_the_queue() -> None:
    held = HeldBackend(saying(), hold_at=1)
    with serve(toy(backend=held)) as front:
        connection = front.connect()
        connection.sendall(request_bytes(max_tokens=FOR_EVER))
        front.wait_active(1)
        connection.close()
        held.go_on.set()
        front.wait_freed(2)


def test_a_client_of_the_library_that_closes_its_stream(front: Served) -> None:
    stream = front.client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "Hi"}], max_tokens=FOR_EVER, stream=True
    )
    next(iter(stream))
    stream.close()
    front.wait_freed(2)


# Ids and log-probabilities make the stream heavy: it fills what the kernel buffers.
HEAVY: dict[str, Any] = {"stream": True, "logprobs": 20, "return_token_ids": True}


def test_a_reader_that_comes_back_too_late_is_told() -> None:
    with serve(toy(), stall_timeout_s=0.3) as front, front.connect(4096) as stalled:
        stalled.sendall(request_bytes(max_tokens=FOR_EVER, **HEAVY))
        for _ in range(3):
            alive(front)
        front.wait_active(1)
        front.wait_freed(30)
        time.sleep(0.7)  # the status waits longer than the call did
        stream = read_until(stalled, b"0\r\n\r\n")
        assert b"[DONE]" not in stream
        last = stream.rpartition(b"event: error\ndata: ")[2].partition(b"\n")[0]
        error = json.loads(last)["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert error["message"] == "the reader took nothing for 0.3 s, and its buffer is full"
        alive(front)


def test_a_reader_that_never_comes_back_is_cut_off() -> None:
    """In twice the time, and not before it is told to whoever comes back."""
    config = HttpConfig(stall_timeout_s=0.3, drain_s=0.2)
    with serve(toy(), config=config, stall_timeout_s=0.3) as front, front.connect(4096) as stalled:
        stalled.sendall(request_bytes(max_tokens=FOR_EVER, **HEAVY))
        front.wait_active(1)
        front.wait_freed(30)
        gone = 'route="/v1/completions",status="200"'
        while gone not in httpx.get(front.url + "/metrics").text:
            time.sleep(0.01)
        assert b"event: error" not in read_all(stalled)
        alive(front)


# --- the end


def test_streams_finish_in_a_drain_and_nothing_else_is_let_in() -> None:
    held = HeldBackend(saying(), hold_at=6)
    with serve(toy(backend=held), config=HttpConfig(drain_s=30)) as front:
        stream = front.client.completions.create(
            model="toy", prompt="Hi", max_tokens=120, temperature=0, stream=True
        )
        text = next(iter(stream)).choices[0].text
        idle = httpx.Client(base_url=front.url)
        assert idle.get("/readyz").status_code == 200
        front.call(front.door.drain)
        response = idle.get("/readyz")
        assert (response.status_code, response.json()) == (503, {"status": "draining"})
        refused = front.post(prompt="Hi")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        front.begin_drain()
        held.go_on.set()
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == said("Hi", 120)
        idle.close()
    with pytest.raises(httpx.ConnectError):
        front.post(prompt="Hi")


def test_what_outlasts_the_drain_ends_with_an_error() -> None:
    with serve(config=HttpConfig(drain_s=0.2)) as front:
        ask: Any = {"model": "toy", "prompt": "Hi", "max_tokens": FOR_EVER}
        stream = front.client.completions.create(**ask, stream=True)
        next(iter(stream))
        ends: list[openai.APIError] = []

        def wait() -> None:
            try:
                front.client.completions.create(**ask)
            except openai.APIError as error:
                ends.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        front.wait_active(2)
        front.begin_drain()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "unavailable"
        waiting.join(10)
        assert isinstance(ends[0], openai.InternalServerError)
        assert ends[0].status_code == 503


def test_half_requests_do_not_hold_up_the_end() -> None:
    bounds = HttpConfig(drain_s=0.1)
    began = time.monotonic()
    with serve(config=bounds) as front:
        connections = [front.connect() for _ in range(3)]
        for connection, sent in zip(
            connections, (b"", b"GET / HT", request_bytes()[:-3]), strict=True
        ):
            connection.sendall(sent)
        alive(front)
    assert time.monotonic() - began < 8
    for connection in connections:
        read_all(connection)
        connection.close()


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody calls it")


# --- TLS


@needs_openssl
@pytest.mark.parametrize("shown", ["caller", None, "stranger"])
def test_tls_and_client_certificates(tmp_path: Path, shown: str | None) -> None:
    pairs = {name: certificate(tmp_path, name) for name in ("server", "caller", "stranger")}
    with serve(tls=TlsFiles(*pairs["server"], client_ca=pairs["caller"][0])) as front:
        url = f"https://{front.server.address}/v1/models"
        trust = ssl.create_default_context(cafile=str(pairs["server"][0]))
        if shown is not None:
            trust.load_cert_chain(*pairs[shown])
        if shown == "caller":
            assert httpx.get(url, verify=trust).status_code == 200
        else:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                httpx.get(url, verify=trust)


@needs_ipv6
def test_an_ipv6_address_has_brackets() -> None:
    with serve(host="::1") as front:
        assert front.server.address == f"[::1]:{front.server.port}"
        assert httpx.get(f"http://{front.server.address}/readyz").status_code == 200


@needs_ipv6
async def test_an_ipv6_port_in_use_is_named() -> None:
    with (
        listen("::1", 0) as taken,
        pytest.raises(ConfigError, match=rf"address: \[::1\]:{taken.getsockname()[1]} cannot"),
    ):
        async with serve_http(nobody, Door(), "::1", taken.getsockname()[1]):
            pass


@pytest.mark.parametrize("content", [None, b"no certificate"])
async def test_tls_files_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "server.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tls: .*server\.pem"):
        async with serve_http(nobody, Door(), tls=TlsFiles(file, file)):
            pass


async def test_a_port_in_use_is_named(front: Served) -> None:
    with pytest.raises(ConfigError, match=str(front.server.port)):
        async with serve_http(nobody, Door(), port=front.server.port):
            pass
    with pytest.raises(ConfigError, match="nowhere"):
        async with serve_http(nobody, Door(), "nowhere.invalid"):
            pass
    assert len(asyncio.all_tasks()) == 1
