"""The embedded Valkey is ours alone, keeps nothing, and never outlives us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.core.errors import ConfigError, Unavailable
from dspark.scheduler.store import EmbeddedValkey, MemoryStore, StoreConfig, open_store

from .cluster import join

pytestmark = pytest.mark.usefixtures("valkey")  # skips where there is no binary

OWNER = """
import asyncio, sys
from dspark.scheduler.store import EmbeddedValkey

async def main():
    async with EmbeddedValkey() as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(str(path))
        except OSError:
            return False
        return True


def becomes(true: Callable[[], bool], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.005)
    return done


async def test_it_is_ours_alone_and_gone_at_exit(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path) as url:
        path = Path(url.removeprefix("unix://"))
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o077 == 0
        assert answers(path)
    assert not answers(path)
    assert list(tmp_path.iterdir()) == []


async def test_a_store_without_a_url_brings_its_own_and_keeps_nothing() -> None:
    async with open_store(StoreConfig(answer_timeout_s=5)) as store:
        await store.ping()
        first = await join(store, "v")
        listed = await store.members()
        assert listed is not None
        assert [m.replica for m in listed.members] == [first]
        assert abs(first.epoch / 1000 - time.time()) < 60  # the server's clock counts
    async with open_store(StoreConfig(answer_timeout_s=5)) as store:
        listed = await store.members()
        assert listed is not None
        assert listed.members == ()


async def test_a_store_in_this_process_needs_no_server() -> None:
    async with open_store(StoreConfig("memory://")) as store:
        assert isinstance(store, MemoryStore)
        await store.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_owner(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip().removeprefix("unix://"))
        assert answers(path)
        owner.send_signal(number)
        owner.wait()
        assert becomes(lambda: not answers(path))
    finally:
        owner.kill()
        owner.communicate()
        for left in path.parent.iterdir():  # nobody was left to do it
            left.unlink()
        path.parent.rmdir()


async def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"did not start: [\s\S]*no-such-option"):
        async with EmbeddedValkey(tmp_path, options=("--no-such-option", "1")):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_a_directory_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(ConfigError, match=r"^directory: .* too long"):
        async with EmbeddedValkey(deep):
            pass
    assert list(deep.iterdir()) == []
