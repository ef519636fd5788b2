"""A whole cluster on a real Ray: up, used, resized and repaired under streams, down. One cluster
for the whole file, so the tests stand in the order in which they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..cli.conftest import make_checkpoint
from ..deploy.processes import ENGINE, PATIENCE_S, tiny_cluster, until
from .running import Streams, Up, upped

pytestmark = pytest.mark.timeout(600)

# Tokens of an answer: seconds of the tiny model's work, and more than a drain waits for.
LONG, DRAIN_S = 1500, 0.2
PROMPTS = ("the cat", "the dog", "one two three")

Ids = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    # A draft token a step at most, or the answers would be over too soon.
    engine = {**ENGINE, "verify": "fixed:1"}
    config = tiny_cluster(checkpoint, verifier={"replicas": 1, "engine": engine}, drain_s=DRAIN_S)
    with upped(tmp_path_factory.mktemp("up"), config) as up:
        up.says("READY", "out")
        yield up


@pytest.fixture(scope="module")
def undisturbed(up: Up) -> Ids:
    ids = streams(up).end()
    assert {len(answer) for answer in ids.values()} == {LONG}
    return ids


def streams(up: Up) -> Streams:
    return Streams(up.grpc, PROMPTS, LONG).begin()


def test_the_ready_block_says_where_and_what_first(up: Up) -> None:
    url = f"http://127.0.0.1:{up.config['gateway']['http_port']}"
    assert f"{url}/v1" in up.out
    assert up.grpc in up.out
    assert "dspark status --cluster tests" in up.out
    asked = {"model": "tiny", "prompt": "the cat", "max_tokens": 5, "temperature": 0}
    told = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_S)
    assert told.status_code == 200, told.text
    assert told.json()["usage"]["completion_tokens"] == 5


def test_status_tells_the_pools_and_their_replicas(up: Up) -> None:
    state = up.state()
    assert state["cluster"] == "tests"
    for name in ("scheduler", "gateway", "verifier", "drafter"):
        pool = state["pools"][name]
        assert (pool["wanted"], pool["ready"], pool["draining"]) == (1, 1, 0)
        assert pool["replicas"][0]["address"].startswith("127.0.0.1:")
    assert state["scheduler"]["leader"] == state["pools"]["scheduler"]["replicas"][0]["id"]
    assert state["store"] == {"there": True, "away_s": None}
    text = up.run("status")
    assert "verifier: 1 of 1 ready" in text
    assert state["pools"]["verifier"]["replicas"][0]["id"] in text


def test_pools_are_resized_under_streams_and_none_is_cut(up: Up, undisturbed: Ids) -> None:
    assert "drafter: 2 ready" in up.run("scale", "drafter", 2)
    assert "verifier: 2 ready" in up.run("scale", "verifier", 2)
    assert (len(up.ready("verifier")), len(up.ready("drafter"))) == (2, 2)
    running = streams(up)
    assert "verifier: 1 ready" in up.run("scale", "verifier", 1)
    assert "drafter: 1 ready" in up.run("scale", "drafter", 1)
    assert running.end() == undisturbed
    assert "goes on elsewhere" in up.err
    assert (len(up.ready("verifier")), len(up.ready("drafter"))) == (1, 1)


def test_what_a_pool_cannot_be_scaled_to_is_refused_with_both_numbers(up: Up) -> None:
    assert "9 replicas were asked for, and 8 ports" in up.run("scale", "gateway", 9, status=2)
    assert "0 replicas were asked for, 1 is the least" in up.run("scale", "verifier", 0, status=2)
    assert "scheduler.replicas" in up.run("scale", "scheduler", 2, status=2)
    assert "is no pool of this cluster" in up.run("scale", "judge", 2, status=1)


def test_the_only_verifier_drains_when_another_is_there(up: Up, undisturbed: Ids) -> None:
    (before,) = up.ready("verifier")
    drained = threading.Thread(target=up.run, args=("drain", before))
    drained.start()
    until(lambda: len(up.ready("verifier")) == 2)
    running = streams(up)
    drained.join()
    (after,) = up.ready("verifier")
    assert after != before
    assert running.end() == undisturbed
    assert "no such replica" in up.run("drain", before, status=1)


def test_a_killed_replica_is_replaced(up: Up) -> None:
    (before,) = up.replicas("drafter")
    up.kill(before["pid"])
    until(lambda: up.ready("drafter") not in ([], [before["id"]]))


def test_a_killed_store_comes_back(up: Up) -> None:
    (valkey,) = (pid for pid, words in up.left().items() if "valkey-server" in words)
    up.kill(valkey)
    up.says("the store is back, empty")
    until(lambda: up.state()["store"]["there"] and len(up.ready("verifier")) == 1)


def test_a_second_up_applies_the_file(up: Up) -> None:
    assert "nothing to change" in up.run("up", "-f", up.file)
    drafter, verifier = up.ready("drafter"), up.ready("verifier")
    up.config["drafter"]["gamma"] = 3
    up.write()
    assert "changed: drafter" in up.run("up", "-f", up.file)
    assert up.ready("verifier") == verifier
    assert len(up.ready("drafter")) == 1
    assert up.ready("drafter") != drafter


def test_what_cannot_start_takes_nothing_from_what_runs(up: Up, tmp_path: Path) -> None:
    drafter = up.ready("drafter")
    up.config["drafter"]["checkpoint"] = str(tmp_path)  # holds no drafter
    up.write()
    told = up.run("up", "-f", up.file, status=1)
    assert "drafter cannot start: " in told
    assert str(tmp_path) in told
    until(lambda: up.ready("drafter") == drafter)


def test_down_leaves_nothing(up: Up) -> None:
    assert "is down" in up.run("down")
    assert up.ended() == 0
    assert "gateway: gone" in up.err
    up.nothing_is_left()
    assert "no cluster runs on this machine" in up.run("status", status=1)
    assert "no cluster runs on this machine" in up.run("down", status=1)
