"""Replicas as processes, without Ray: `dspark replica` starts them, signals end them, and streams
outlive them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from dspark.client import Client, Retry
from dspark.deploy.one_replica import FENCED
from dspark.scheduling.client import SchedulingClient

from ..cli.conftest import make_checkpoint
from .processes import PATIENCE_S, Processes, Replica, cluster, until

PASSWORD = "hunter2-hunter2"
# Tokens of an answer: seconds of the tiny model's work, and more than a drain waits for.
LONG, DRAIN_S = 700, 0.2
PROMPTS = ("the cat", "the dog", "one two three")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Processes]:
    """Started at once, in no order, on a store that asks for a password."""
    directory = tmp_path_factory.mktemp("cluster")
    with cluster(directory, checkpoint, password=PASSWORD, drain_s=DRAIN_S) as processes:
        processes.start_all("scheduler", "gateway", "verifier", "verifier", "drafter")
        yield processes


def of(processes: Processes, pool: str) -> list[Replica]:
    """That run."""
    return [r for r in processes.replicas if r.pool == pool and r.process.poll() is None]


def freeze(processes: Processes, verifier: Replica) -> None:
    """Until the cluster has forgotten it: all streams then run elsewhere."""
    verifier.signal(signal.SIGSTOP)
    (scheduler,) = of(processes, "scheduler")

    async def is_forgotten() -> bool:
        async with SchedulingClient([scheduler.address], call_s=PATIENCE_S) as client:
            members = (await client.status()).members
        return verifier.name not in {one.member.replica.replica_id for one in members}

    until(lambda: asyncio.run(is_forgotten()))


@dataclass
class Streams:
    """Seeded answers, which no draft makes short, each read in a thread of its own by a client that
    never tries again. ids: of whole ones, by prompt."""

    address: str
    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> Streams:
        """Until each has said something."""
        for prompt in PROMPTS:
            self.threads.append(threading.Thread(target=self._read, args=(prompt,), daemon=True))
            self.threads[-1].start()
        until(lambda: self.errors or self.begun == set(PROMPTS))
        return self

    def end(self) -> dict[str, tuple[int, ...]]:
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert not self.errors
        return self.ids

    def _read(self, prompt: str) -> None:
        try:
            with (
                Client(self.address, retry=Retry(attempts=1)) as client,
                client.stream(prompt, max_tokens=LONG, seed=7, ignore_eos=True) as stream,
            ):
                for _ in stream:
                    self.begun.add(prompt)
                self.ids[prompt] = stream.generation.token_ids
        except BaseException as error:
            self.errors.append(error)


@pytest.fixture(scope="module")
def undisturbed(processes: Processes) -> dict[str, tuple[int, ...]]:
    (gateway,) = of(processes, "gateway")
    ids = Streams(gateway.address).begin().end()
    assert {len(answer) for answer in ids.values()} == {LONG}
    return ids


def test_a_request_over_http(processes: Processes) -> None:
    (gateway,) = of(processes, "gateway")
    assert httpx.get(f"{gateway.url}/readyz").json() == {"status": "ready"}
    asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 5, "temperature": 0}
    told = httpx.post(f"{gateway.url}/v1/completions", json=asked, timeout=PATIENCE_S)
    assert told.status_code == 200, told.text
    assert told.json()["usage"]["completion_tokens"] == 5


def test_sigterm_drains_a_verifier_and_its_streams_go_on_elsewhere(
    processes: Processes, undisturbed: dict[str, tuple[int, ...]]
) -> None:
    """There is another soon enough: one that the cluster had given up."""
    (gateway,) = of(processes, "gateway")
    first, second = of(processes, "verifier")
    freeze(processes, second)
    streams = Streams(gateway.address).begin()
    first.signal(signal.SIGTERM)
    second.signal(signal.SIGCONT)
    assert first.ended() == 0
    assert streams.end() == undisturbed, "no token is lost or said twice"
    assert "goes on elsewhere" in gateway.log
    assert "Traceback" not in first.log


def test_a_verifier_that_is_killed_costs_no_stream(
    processes: Processes, undisturbed: dict[str, tuple[int, ...]]
) -> None:
    (gateway,) = of(processes, "gateway")
    processes.start("verifier")
    first, second = of(processes, "verifier")
    freeze(processes, second)
    moved = gateway.log.count("goes on elsewhere")
    streams = Streams(gateway.address).begin()
    first.kill()
    second.signal(signal.SIGCONT)
    assert streams.end() == undisturbed
    assert gateway.log.count("goes on elsewhere") > moved


def test_a_name_that_is_taken_over_ends_the_older_process(processes: Processes) -> None:
    (drafter,) = of(processes, "drafter")
    processes.start("drafter", "--name", drafter.name)
    assert drafter.ended() == FENCED
    assert "a newer life of it has registered" in drafter.log


def test_what_cannot_start_says_so_and_costs_nobody_anything(processes: Processes) -> None:
    """Bad input is 2, in one line; a scheduler of the same port finds it taken."""
    for arguments, told in (
        (("magic",), "pool: 'magic' is not one of: scheduler, gateway, verifier, drafter"),
        (("scheduler",), "scheduler.port: "),
    ):
        replica = processes.start(*arguments, ready=False)
        assert replica.ended() == 2
        assert replica.log.splitlines()[-1].startswith(f"dspark: {told}")
        assert "Traceback" not in replica.log
    assert len(of(processes, "scheduler")) == 1


def test_the_stores_password_is_in_no_command_line_and_no_log(processes: Processes) -> None:
    """Also not when it is wrong."""
    for replica in processes.replicas:
        if replica.process.poll() is None:
            words = Path(f"/proc/{replica.pid}/cmdline").read_bytes()
            assert replica.pool.encode() in words
            assert PASSWORD.encode() not in words
    (scheduler,) = of(processes, "scheduler")
    assert processes.valkey is not None
    processes.valkey.tell("CONFIG SET requirepass another")
    processes.valkey.tell("CLIENT KILL TYPE normal SKIPME yes", password="another")
    scheduler.logged("the store is away")
    assert PASSWORD not in processes.logs
