"""A cluster of real processes on this machine, each `dspark replica …` on the tiny checkpoint, with
a Valkey of its own. Every process ends with the test, also if that is killed.

    with cluster(directory, checkpoint) as processes:
        processes.start("scheduler"); verifier = processes.start("verifier")
        ...
        verifier.kill()
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dspark.scheduler.store.embedded import binary_path, until_we_die

from ..cli.conftest import DSPARK

# Seconds until something that must happen has not. A replica starts in 5 on an idle machine, many
# times that on one that is full.
PATIENCE_S = 240.0

ENGINE: Mapping[str, Any] = {"kv_tokens": 16_384, "max_sequences": 16, "max_step_tokens": 64}


@dataclass
class Replica:
    """One process. said: its ready line. out, err: files of its streams."""

    pool: str
    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    said: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def name(self) -> str:
        return self.said.split()[2]

    @property
    def address(self) -> str:
        """Of its gRPC server."""
        return self.said.rpartition(" ")[2]

    @property
    def url(self) -> str:
        """Of a gateway's HTTP."""
        return str(re.findall(r"https?://\S+", self.said)[0])

    @property
    def log(self) -> str:
        return self.err.read_text(encoding="utf-8", errors="replace")

    def until_ready(self) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, f"the {self.pool} ended: {self.log}"
            self.said = self.out.read_text().rstrip() if "\n" in self.out.read_text() else ""
            return bool(self.said)

        until(holds, lambda: f"the {self.pool} is not ready: {self.log}")

    def logged(self, words: str) -> None:
        """Wait until it says so."""
        until(lambda: words in self.log, lambda: f"{words!r} is not in {self.log}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ended(self, within_s: float = PATIENCE_S) -> int:
        """Its exit status."""
        return self.process.wait(within_s)


@dataclass
class Valkey:
    """A server of the cluster's own at a socket that stays the same; what ends it ends its
    memory."""

    directory: Path
    password: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For replicas: with its password."""
        secret = f":{self.password}@" if self.password else ""
        return f"unix://{secret}{self.directory}/valkey.sock"

    def start(self) -> None:
        socket_path, log = self.directory / "valkey.sock", self.directory / "valkey.log"
        socket_path.unlink(missing_ok=True)
        options = {"port": 0, "unixsocket": socket_path, "dir": self.directory, "save": ""}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                until_we_die([str(binary_path()), *words]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        until(socket_path.exists, lambda: f"no Valkey: {log.read_text()}")
        if self.password:
            self.tell(f"CONFIG SET requirepass {self.password}", password="")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def tell(self, command: str, password: str | None = None) -> None:
        """By its own command. password: None for the one that it has."""
        secret = self.password if password is None else password
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(PATIENCE_S)
            link.connect(str(self.directory / "valkey.sock"))
            for words in (*((f"AUTH {secret}",) if secret else ()), command):
                link.sendall(f"{words}\r\n".encode())
                answer = link.recv(256)
                assert answer[:1] in b"+:", answer


def until(holds: Callable[[], object], told: Callable[[], str] = lambda: "") -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {told()}"
        threading.Event().wait(0.01)


@dataclass
class Processes:
    """valkey: None if there is none. replicas: all that were started, in this order."""

    directory: Path
    file: Path
    environment: Mapping[str, str]
    valkey: Valkey | None = None
    replicas: list[Replica] = field(default_factory=list)

    def start(self, pool: str, *arguments: object, ready: bool = True) -> Replica:
        """ready: wait until it is."""
        number = len(self.replicas)
        out, err = (self.directory / f"{number}-{pool}.{end}" for end in ("out", "err"))
        command = [str(DSPARK), "replica", pool, "-f", str(self.file), *map(str, arguments)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                until_we_die(command),
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C in a terminal is the test's
            )
        self.replicas.append(Replica(pool, process, out, err))
        if ready:
            self.replicas[-1].until_ready()
        return self.replicas[-1]

    def start_all(self, *pools: str) -> list[Replica]:
        """At once, then wait for all of them."""
        started = [self.start(pool, ready=False) for pool in pools]
        for replica in started:
            replica.until_ready()
        return started

    @property
    def logs(self) -> str:
        return "\n".join(replica.log for replica in self.replicas)

    def kill_all(self) -> None:
        for replica in self.replicas:
            replica.process.kill()
        for replica in self.replicas:
            replica.process.wait()


@contextmanager
def cluster(
    directory: Path,
    checkpoint: Path,
    *,
    environment: Mapping[str, str] | None = None,
    valkey: bool = True,
    password: str = "",
    cache: Path | None = None,
    **config: Any,
) -> Iterator[Processes]:
    """The configuration is `tiny_cluster` and what is given, in directory/cluster.yaml. valkey:
    False for none, unless `environment` names one; it asks for the password. cache: for what
    replicas keep, shared by clusters to measure a step's cost once."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump(tiny_cluster(checkpoint, **config)))
    told = {
        "DSPARK_CACHE": str(cache or directory / "cache"),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    store = None
    with ExitStack() as stack:
        if valkey:
            # A socket's path is short, and a test's folder is not.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dspark-"))
            store = Valkey(Path(folder), password)
            store.start()
            stack.callback(store.kill)
            told.setdefault("REDIS_URL", store.url)
        processes = Processes(directory, file, told, store)
        stack.callback(processes.kill_all)
        yield processes


def tiny_cluster(checkpoint: Path, **config: Any) -> dict[str, Any]:
    """For cluster.yaml: two replicas may be had of each pool on ports that were free a moment ago.
    config: by section, merged into it."""
    http, grpc, scheduler = free_ports(3)
    whole: dict[str, Any] = {
        "name": "tests",
        "model": str(checkpoint),
        "served_name": "tiny",
        "scheduler": {"replicas": 1, "port": scheduler},
        "gateway": {"replicas": 1, "http_port": http, "grpc_port": grpc},
        "verifier": {"replicas": 2, "threads": 1, "engine": dict(ENGINE)},
        "drafter": {"replicas": 1, "threads": 1},
        "drain_s": 2.0,
    }
    for name, section in config.items():
        known = whole.get(name)
        whole[name] = {**known, **section} if isinstance(known, dict) else section
    return whole


def free_ports(count: int) -> list[int]:
    """For one replica each. The kernel's own choice lies above Ray's."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
