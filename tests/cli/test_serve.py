"""`dspark serve` as a process of its own on the tiny checkpoint, met as its users meet it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from dspark.client import Client, Retry, Tls, Unauthenticated, Unavailable
from dspark.gateway.keys import new_key

from .conftest import DSPARK, Ran

# Seconds until something that must happen has not. Starting takes 5 on an idle machine, many times
# that on one that is full.
PATIENCE_S = 240.0

# A request that only its end from outside ends: minutes of the tiny model's work.
ENDLESS: dict[str, Any] = {"max_tokens": 3500, "temperature": 0}


@dataclass
class Server:
    """A running process. said: what it has printed on stdout so far."""

    process: subprocess.Popen[bytes]
    log: Path
    said: list[str] = field(default_factory=list)

    @property
    def stderr(self) -> str:
        return self.log.read_text()

    @property
    def url(self) -> str:
        return str(re.findall(r"https?://\S+", self.said[0])[0])

    @property
    def http(self) -> str:
        return self.url.partition("//")[2]

    @property
    def grpc(self) -> str:
        return self.said[0].rpartition(" ")[2]

    @property
    def paste(self) -> str:
        return self.said[1].removeprefix("try: ")

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options}
        )

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        end, unread = time.monotonic() + PATIENCE_S, b""
        while unread.count(b"\n") < 2:
            ready, _, _ = select.select([self.process.stdout], [], [], end - time.monotonic())
            assert ready, f"not ready within {PATIENCE_S:g} s: {self.stderr}"
            more = os.read(self.process.stdout.fileno(), 4096)
            assert more, f"it ended: {self.stderr}"
            unread += more
        self.said = unread.decode().splitlines()

    def logged(self, words: str) -> None:
        """Wait until it says so."""
        wait_until(lambda: words in self.stderr)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, within_s: float = PATIENCE_S) -> int:
        return self.process.wait(within_s)


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s"
        threading.Event().wait(0.005)


Serve = Callable[..., Server]


@contextmanager
def starter(checkpoint: Path, cache: Path, directory: Path) -> Iterator[Serve]:
    """Starts servers; what still runs at the end is killed."""
    started: list[Server] = []

    def serve(*arguments: object, http: int = 0, grpc: int = 0, ready: bool = True) -> Server:
        log = directory / f"stderr-{len(started)}"
        options = ("--threads", 1, "--http-port", http, "--grpc-port", grpc)
        process = subprocess.Popen(
            [DSPARK, "serve", "--model", checkpoint, *map(str, (*options, *arguments))],
            env={**os.environ, "DSPARK_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
        )
        started.append(Server(process, log))
        if ready:
            started[-1].until_ready()
        return started[-1]

    try:
        yield serve
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()
            assert server.process.stdout is not None
            server.process.stdout.close()


@pytest.fixture
def serve(checkpoint: Path, shared_cache: Path, tmp_path: Path) -> Iterator[Serve]:
    with starter(checkpoint, shared_cache, tmp_path) as serve:
        yield serve


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One for all tests that leave it as it was; it ends well after all of them."""
    with starter(checkpoint, shared_cache, tmp_path_factory.mktemp("serve")) as serve:
        server = serve("--name", "tiny")
        yield server
        server.signal(signal.SIGTERM)
        assert server.ended() == 0, server.stderr
        assert "Traceback" not in server.stderr


def shell(command: str, **environment: str) -> str:
    """What a shell that the command is pasted into prints."""
    done = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def events(text: str) -> list[Any]:
    """Of a stream that ended as it should."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refused(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    return False


# --- a newcomer ----------------------------------------------------------------------------------


def test_the_ready_line_names_both_addresses(server: Server) -> None:
    assert re.fullmatch(
        r"dspark serves tiny: http://127\.0\.0\.1:\d+ and gRPC 127\.0\.0\.1:\d+", server.said[0]
    )
    assert not refused(server.http)
    assert not refused(server.grpc)


def test_it_says_what_auto_has_come_to(server: Server) -> None:
    (line,) = [line for line in server.stderr.splitlines() if "; drafter " in line]
    assert re.search(r"backend \S.*, \d+ threads; drafter ngram\S*, up to \d+ tokens", line)


def test_the_command_to_paste_works(server: Server) -> None:
    """Its first event is enough: the whole answer is as long as the context."""
    process = subprocess.Popen(["sh", "-c", f"exec {server.paste}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.terminate()
    process.wait()
    process.stdout.close()
    chunk = json.loads(first.removeprefix(b"data: "))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["model"] == "tiny"


def test_curl_gets_a_whole_stream(server: Server) -> None:
    command = server.paste.replace('"stream": true', '"stream": true, "max_tokens": 5')
    assert command != server.paste
    chunks = events(shell(command))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_four_clients_get_one_answer(server: Server) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    with Client(server.grpc) as client:
        answer = client.generate("the cat", **asked)
        assert client.model_info().name == "tiny"
        streamed = "".join(chunk.text for chunk in client.stream("the cat", **asked))
    assert answer.text
    assert streamed == answer.text
    body = json.dumps({"model": "tiny", "prompt": "the cat", **asked})
    by_curl = shell(
        f"curl -s {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    )
    assert json.loads(by_curl)["choices"][0]["text"] == answer.text
    with server.openai() as client:
        whole = client.completions.create(model="tiny", prompt="the cat", **asked)
        parts = client.completions.create(model="tiny", prompt="the cat", stream=True, **asked)
        assert whole.choices[0].text == answer.text
        assert "".join(part.choices[0].text for part in parts) == answer.text
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "the cat"}], max_tokens=5
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5


def test_reflection_tells_all_that_a_call_needs(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            "dspark.v1.Generation",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        file = database.FindFileContainingSymbol("dspark.v1.Generation")
        methods = {method.name for service in file.service for method in service.method}
    assert methods == {"Generate", "CountTokens", "ModelInfo"}


def test_health_readiness_and_metrics(server: Server) -> None:
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "alive"}
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"^dspark_steps_total [1-9]", metrics, re.MULTILINE)
    assert "dspark_event_loop_lag_seconds_bucket" in metrics


def test_a_model_without_a_chat_template_gets_another_command(
    checkpoint: Path, shared_cache: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "it's bare"
    bare.mkdir()
    for file in checkpoint.iterdir():
        if "chat_template" not in file.name:
            (bare / file.name).write_bytes(file.read_bytes())
    told = json.loads((bare / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(told))
    with starter(bare, shared_cache, tmp_path) as serve:
        chunks = events(shell(serve().paste))
    assert chunks[0]["model"] == "it's bare"


# --- stopping ------------------------------------------------------------------------------------


def streams(server: Server, count: int, answers: list[Any], **asked: Any) -> list[threading.Thread]:
    """Half over gRPC and half over HTTP, each past its first token. answers: how each ended, a
    finish reason or an error."""

    def by_grpc(begun: threading.Event) -> object:
        once = Retry(attempts=1)
        with (
            Client(server.grpc, retry=once) as client,
            client.stream("the cat", **asked) as stream,
        ):
            for _ in stream:
                begun.set()
            return stream.generation.finish_reason

    def by_http(begun: threading.Event) -> object:
        reason = None
        with server.openai() as client:
            for part in client.completions.create(
                model=MODEL, prompt="the cat", stream=True, **asked
            ):
                begun.set()
                reason = part.choices[0].finish_reason or reason
        return reason

    def run(read: Callable[[threading.Event], object], begun: threading.Event) -> None:
        try:
            answers.append(read(begun))
        except Exception as error:
            answers.append(error)

    readers = [(by_http if i % 2 else by_grpc, threading.Event()) for i in range(count)]
    threads = [threading.Thread(target=run, args=reader, daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    for _, begun in readers:
        assert begun.wait(PATIENCE_S), answers
    return threads


MODEL = "tiny"


def closed(server: Server) -> None:
    """Nothing new is accepted, neither a connection nor a call."""
    wait_until(lambda: refused(server.http) and refused(server.grpc))


def test_sigterm_lets_20_streams_finish(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("drain_s: 100\n")
    server = serve("--config", tmp_path / "serve.yaml", "--drafter", "none")
    answers: list[Any] = []
    with kept_connections(server) as ask:
        threads = streams(server, 20, answers, max_tokens=1200, temperature=0)
        server.signal(signal.SIGTERM)
        server.logged("stopping: what runs has up to 100 s to finish")
        closed(server)
        ask()
        assert server.process.poll() is None
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [str(answer) for answer in answers] == ["length"] * 20
    assert server.ended() == 0
    assert "Traceback" not in server.stderr
    assert server.stderr.rstrip().endswith("stopped")
    with pytest.raises(ProcessLookupError):
        os.kill(server.process.pid, 0)


@contextmanager
def kept_connections(server: Server) -> Iterator[Callable[[], None]]:
    """Asks over connections that were open before the server was told to stop."""
    with httpx.Client() as http, Client(server.grpc, retry=Retry(attempts=1)) as client:
        assert http.get(f"{server.url}/readyz").status_code == 200
        client.count_tokens("a")

        def ask() -> None:
            with pytest.raises(Unavailable):
                client.generate("the cat", max_tokens=1)
            try:
                reply = http.post(f"{server.url}/v1/completions", json={"prompt": "the cat"})
            except httpx.TransportError:
                return  # the connection was idle, and so it is closed
            assert reply.status_code == 503

        yield ask


def test_what_is_not_finished_in_time_ends_with_a_status(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("drain_s: 0.2\n")
    server = serve("--config", tmp_path / "serve.yaml")
    answers: list[Any] = []
    threads = streams(server, 20, answers, **ENDLESS)
    server.signal(signal.SIGTERM)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert_told(answers)
    assert server.ended() == 0
    assert "Traceback" not in server.stderr


def assert_told(answers: list[Any]) -> None:
    """Each stream was ended by the server's own word, not by a lost connection."""
    assert len(answers) == 20
    for answer in answers:
        if isinstance(answer, Unavailable):
            assert "this gateway has stopped" in str(answer)
        else:
            assert isinstance(answer, openai.APIError), answer
            assert "this server cannot answer now" in answer.message
    assert sum(isinstance(answer, Unavailable) for answer in answers) == 10


def test_a_second_signal_does_not_wait(serve: Serve) -> None:
    server = serve()
    answers: list[Any] = []
    threads = streams(server, 20, answers, **ENDLESS)
    server.signal(signal.SIGINT)
    server.logged("stopping: what runs has up to 30 s")
    begin = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.ended(20.0) == 0
    assert time.monotonic() - begin < 10.0, "seconds on a busy machine, not the drain"
    for thread in threads:
        thread.join(PATIENCE_S)
    assert_told(answers)
    assert "Traceback" not in server.stderr


def test_a_signal_to_an_idle_server(serve: Serve) -> None:
    server = serve()
    begin = time.monotonic()
    server.signal(signal.SIGINT)
    assert server.ended() == 0
    assert time.monotonic() - begin < 10.0
    assert refused(server.http)
    assert refused(server.grpc)


# --- what cannot be served -----------------------------------------------------------------------


def said(server: Server) -> str:
    """The one line of a server that could not start."""
    assert server.ended() == 2, server.stderr
    (line,) = server.stderr.splitlines()
    return line


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_port_in_use(serve: Serve, server: Server, door: str) -> None:
    address = getattr(server, door)
    port = int(address.rpartition(":")[2])
    line = said(serve(ready=False, **{door: port}))
    assert line.startswith(f"dspark: address: {address} cannot be listened on: ")
    assert "in use" in line
    assert httpx.get(f"{server.url}/readyz").status_code == 200, "who has it is undisturbed"


def test_one_port_for_two(dspark: Callable[..., Ran]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ran = dspark("serve", "--http-port", port, "--grpc-port", port)
    assert ran.status == 2
    assert f"127.0.0.1:{port} cannot be listened on" in ran.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file or directory"),
        ("", "the file: "),
        ("tenants: {}", "tenants: "),
        ("tenants: {a: {keys: [dspark-secret]}}", "tenants.a.keys.0: "),
        ("tenants: {a: {keys: [], quota: 3}}", "tenants.a.quota: is not a known field"),
    ],
)
def test_a_bad_keys_file(
    dspark: Callable[..., Ran], tmp_path: Path, text: str | None, told: str
) -> None:
    keys = tmp_path / "keys.yaml"
    if text is not None:
        keys.write_text(text)
    ran = dspark("serve", "--keys", keys)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"dspark: {keys}: {told}")
    assert ran.err.count("\n") == 1
    assert "secret" not in ran.err


def test_a_cache_beyond_the_memory(dspark: Callable[..., Ran], checkpoint: Path) -> None:
    ports = ("--http-port", 0, "--grpc-port", 0)
    ran = dspark("serve", "--model", checkpoint, *ports, "--kv-tokens", 10**14)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"dspark: kv_tokens: {10**14} need ")
    assert ran.err.count("\n") == 1


def test_a_bad_certificate(dspark: Callable[..., Ran], tmp_path: Path) -> None:
    missing, text = tmp_path / "none.pem", tmp_path / "text.pem"
    text.write_text("no certificate")
    for certificate, told in (
        (missing, f"tls: {missing}: No such file or directory"),
        (text, f"tls: {text} and {text} are no certificate and its key: "),
    ):
        ran = dspark("serve", "--tls-certificate", certificate, "--tls-key", text)
        assert ran.status == 2
        assert ran.err.startswith(f"dspark: {told}")


# --- keys and TLS --------------------------------------------------------------------------------


def test_a_key_is_asked_for_over_both_protocols(serve: Serve, tmp_path: Path) -> None:
    key, hashed = new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"tenants: {{acme: {{keys: [{hashed}]}}}}")
    server = serve("--keys", keys)
    for given in (None, "dspark-wrong"):
        with (
            Client(server.grpc, api_key=given, retry=Retry(attempts=1)) as client,
            pytest.raises(Unauthenticated),
        ):
            client.generate("the cat", max_tokens=2)
    with server.openai(api_key="dspark-wrong") as http, pytest.raises(openai.AuthenticationError):
        http.completions.create(model=MODEL, prompt="the cat", max_tokens=2)
    with Client(server.grpc, api_key=key) as client:
        assert len(client.generate("the cat", max_tokens=2).token_ids) == 2
    with server.openai(api_key=key) as http:
        answer = http.completions.create(model=MODEL, prompt="the cat", max_tokens=2)
        assert answer.choices[0].finish_reason == "length"
    command = server.paste.replace('"stream": true', '"stream": true, "max_tokens": 2')
    assert events(shell(command, DSPARK_API_KEY=key))
    assert "invalid_api_key" in shell(command, DSPARK_API_KEY="dspark-wrong")
    server.signal(signal.SIGTERM)
    assert server.ended() == 0
    assert key not in server.stderr
    assert hashed not in server.stderr


@dataclass(frozen=True)
class Certificate:
    file: Path
    key: Path


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    """Signed by itself, for 127.0.0.1 and localhost."""
    made = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", made.key, "-out", made.file, "-days", "2"),
            *("-subj", "/CN=dspark", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return made


def test_tls_on_both_doors(serve: Serve, certificate: Certificate) -> None:
    server = serve("--tls-certificate", certificate.file, "--tls-key", certificate.key)
    assert server.url.startswith("https://")
    with Client(server.grpc, tls=Tls(certificate.file)) as client:
        answer = client.generate("the cat", max_tokens=4, temperature=0)
    with (
        httpx.Client(verify=ssl.create_default_context(cafile=certificate.file)) as trusting,
        server.openai(http_client=trusting) as http,
    ):
        again = http.completions.create(model=MODEL, prompt="the cat", max_tokens=4, temperature=0)
    assert again.choices[0].text == answer.text
    command = server.paste.replace('"stream": true', '"stream": true, "max_tokens": 2')
    assert events(shell(command))
    once = Retry(attempts=1)
    for tls in (False, True):
        with Client(server.grpc, tls=tls, retry=once) as stranger, pytest.raises(Unavailable):
            stranger.model_info(deadline_s=20)
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/healthz")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/healthz")
    assert server.process.poll() is None
    server.signal(signal.SIGTERM)
    assert server.ended() == 0


# --- a server that dies --------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}])
def test_a_stream_goes_on_through_a_killed_server(serve: Serve, asked: dict[str, Any]) -> None:
    """Another one on the same port: no token is lost, none comes twice, the text is the same."""
    first = serve()
    http, port = (int(a.rpartition(":")[2]) for a in (first.http, first.grpc))
    asked = {**asked, "max_tokens": 1500, "ignore_eos": True}
    patient = Retry(attempts=60, first_s=0.1, most_s=1.0)
    with ExitStack() as stack:
        client = stack.enter_context(Client(first.grpc, retry=patient))
        whole = client.generate("the cat", **asked)
        stream = client.stream("the cat", **asked)
        chunks = [next(stream) for _ in range(3)]
        first.signal(signal.SIGKILL)
        assert first.ended() == -signal.SIGKILL
        workers = stack.enter_context(ThreadPoolExecutor(1))
        rest = workers.submit(lambda: list(stream))
        serve(http=http, grpc=port)
        chunks += rest.result(PATIENCE_S)
    position = 0
    for chunk in chunks:
        assert chunk.index == position
        position += len(chunk.ids)
    assert position == 1500
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert stream.generation.token_ids == whole.token_ids
    assert stream.generation.choices[0].usage == whole.choices[0].usage


def test_a_client_that_dies_harms_nobody(server: Server) -> None:
    """Killed mid-stream, over either protocol: its work ends, the others' goes on."""
    program = (
        "import sys; from dspark.client import Client\n"
        "for c in Client(sys.argv[1]).stream('the cat', max_tokens=3500): print(c.index, flush=1)"
    )
    python = DSPARK.parent / "python"
    body = json.dumps({"prompt": "the cat", "stream": True, "max_tokens": 3500})
    with Client(server.grpc) as client, client.stream("the dog", **ENDLESS) as other:
        next(other)
        by_curl = ("curl", "-sN", f"{server.url}/v1/completions", "-d", body)
        for command in (
            [str(python), "-c", program, server.grpc],
            [*by_curl, "-H", "Content-Type: application/json"],
        ):
            victim = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert victim.stdout is not None
            assert victim.stdout.readline()
            victim.kill()
            victim.wait()
            victim.stdout.close()
        alone = "dspark_requests_running 1.0"
        wait_until(lambda: alone in httpx.get(f"{server.url}/metrics").text)
        assert next(other).ids
    idle = 'dspark_kv_blocks{state="owned"} 0.0'
    wait_until(lambda: idle in httpx.get(f"{server.url}/metrics").text)
