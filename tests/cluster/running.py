"""A `dspark up` of a test, its commands, and every process that it brought about.

All of them inherit a mark in their environment, so that those which are left are found whoever
their parent is by then; a Valkey, which writes over its environment, by the folder it is in.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.cli.main import main
from dspark.client import Client, Retry
from dspark.deploy.ray.cluster_file import find_cluster
from dspark.deploy.ray.doors import KeeperDoor
from dspark.deploy.ray.observed import seen
from dspark.deploy.ray.state import cluster_state, config_of, views
from dspark.scheduler.store.embedded import until_we_die

from ..cli.conftest import DSPARK
from ..deploy.processes import PATIENCE_S, until

MARK = "DSPARK_TEST_MARK"


@dataclass
class Up:
    """config: of the file, which a test may change and write again. folder: of the cluster's
    sockets, "" before there is one."""

    directory: Path
    config: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    folder: str = ""

    @property
    def file(self) -> Path:
        return self.directory / "cluster.yaml"

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "DSPARK_CACHE": str(self.directory / "cache"),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }

    @property
    def out(self) -> str:
        return (self.directory / "up.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.directory / "up.err").read_text(errors="replace")

    @property
    def grpc(self) -> str:
        """Of the first gateway."""
        return f"127.0.0.1:{self.config['gateway']['grpc_port']}"

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.config))

    def start(self) -> None:
        self.write()
        command = until_we_die([str(DSPARK), "up", "-f", str(self.file)])
        with (
            (self.directory / "up.out").open("wb") as out,
            (self.directory / "up.err").open("wb") as err,
        ):
            self.process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def says(self, words: str, where: str = "err") -> None:
        """Wait until it does."""

        def said() -> bool:
            assert self.process is not None
            for file in (self.directory / "cache" / "clusters").glob("*.json"):
                self.folder = str(Path(json.loads(file.read_text())["socket"]).parent)
            text = getattr(self, where)
            assert words in text or self.process.poll() is None, f"it ended: {self.err}"
            return words in text

        until(said, lambda: f"{words!r} is not in {self.err}")

    def run(self, *words: object, status: int = 0) -> str:
        """A command from another terminal; what it printed. In this process: each would import for
        a second."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            patch.setenv("DSPARK_CACHE", self.environment["DSPARK_CACHE"])
            found = main(list(map(str, words)))
        assert found == status, f"{words}: {found}: {out.getvalue()}{err.getvalue()}"
        return out.getvalue() if status == 0 else err.getvalue()

    def state(self) -> dict[str, Any]:
        """Of `dspark status`, whether all is well or not."""
        found = find_cluster("tests", self.directory / "cache" / "clusters")
        pools = seen(KeeperDoor(found.socket).details())
        return cluster_state(pools, asyncio.run(views(config_of(pools))))

    def replicas(self, pool: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.state()["pools"][pool]["replicas"]
        return found

    def ready(self, pool: str) -> list[str]:
        """Ids."""
        return [one["id"] for one in self.replicas(pool) if one["state"] == "ready"]

    def kill(self, pid: int) -> None:
        assert pid in self.left(), f"{pid} is none of ours"
        os.kill(pid, signal.SIGKILL)

    def ended(self) -> int:
        """Wait; its exit status."""
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def left(self) -> dict[int, str]:
        """Command lines of all processes that it brought about, by pid."""
        found = {}
        mark = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit():
                    marked = mark in (entry / "environ").read_bytes().split(b"\0")
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words and (marked or (self.folder and f"{self.folder}/" in words)):
                        found[int(entry.name)] = words
            except OSError:
                continue  # ended, or not ours to look at
        return found

    def nothing_is_left(self) -> None:
        """Processes, its folder, and what says that it runs."""
        until(lambda: not self.left(), lambda: f"left: {self.left()}")
        assert self.folder
        until(lambda: not Path(self.folder).exists(), lambda: f"left: {self.folder}")
        assert not list((self.directory / "cache" / "clusters").glob("*.json"))


@contextmanager
def upped(directory: Path, config: dict[str, Any]) -> Iterator[Up]:
    """Started, ready or not; all its processes are killed at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    up = Up(directory, config)
    up.start()
    try:
        yield up
    finally:
        assert up.process is not None
        up.process.kill()
        up.process.wait()
        until(lambda: not up.left(), lambda: f"left: {up.left()}")


@dataclass
class Streams:
    """Greedy answers over gRPC, each read in a thread of its own by a client that tries nothing
    again: a stream that is cut is an error. ids: of whole ones, by prompt."""

    address: str
    prompts: tuple[str, ...]
    tokens: int
    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> Streams:
        """Until each has said something."""
        for prompt in self.prompts:
            self.threads.append(threading.Thread(target=self._read, args=(prompt,), daemon=True))
            self.threads[-1].start()
        until(lambda: self.errors or self.begun == set(self.prompts))
        return self

    def end(self) -> dict[str, tuple[int, ...]]:
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert not self.errors, self.errors
        return self.ids

    def _read(self, prompt: str) -> None:
        try:
            with (
                Client(self.address, retry=Retry(attempts=1)) as client,
                client.stream(
                    prompt, max_tokens=self.tokens, temperature=0, ignore_eos=True
                ) as stream,
            ):
                for _ in stream:
                    self.begun.add(prompt)
                self.ids[prompt] = stream.generation.token_ids
        except BaseException as error:
            self.errors.append(error)
