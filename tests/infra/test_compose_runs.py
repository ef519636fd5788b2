"""What docker-compose.yml says, run: see local_compose.py for how, without containers."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dspark.client import Client

from ..cli.conftest import DSPARK, make_checkpoint
from .local_compose import PATIENCE_S, LocalCompose, local_compose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ASKED = {"model": "tiny", "prompt": "the cat sat", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCompose]:
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    directory = Path(tempfile.mkdtemp(prefix="dc-"))  # short: it holds Ray's sockets
    try:
        with local_compose(directory, model) as compose:
            compose.up()
            yield compose
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def key(compose: LocalCompose) -> str:
    return (compose.directory / "secrets/api_key").read_text()


def url(compose: LocalCompose) -> str:
    return f"http://{compose.address('gateway')}:8000"


def test_deploy_ends_well_and_the_gateway_is_healthy_then(compose: LocalCompose) -> None:
    deploy = compose.one("deploy")
    assert compose.until_ended(deploy) == 0, deploy.log
    compose.until_healthy(compose.one("gateway"))


def test_http_and_grpc_answer_alike(compose: LocalCompose) -> None:
    told = httpx.post(
        f"{url(compose)}/v1/completions",
        json=ASKED,
        headers={"Authorization": f"Bearer {key(compose)}"},
        timeout=PATIENCE_S,
    )
    assert told.status_code == 200, told.text
    text = told.json()["choices"][0]["text"]
    assert told.json()["usage"]["completion_tokens"] == 24
    with Client(f"{compose.address('gateway')}:50051", api_key=key(compose)) as client:
        answer = client.generate("the cat sat", max_tokens=24, temperature=0)
    assert answer.text == text


def test_nobody_is_served_without_the_key(compose: LocalCompose) -> None:
    told = httpx.post(f"{url(compose)}/v1/completions", json=ASKED, timeout=PATIENCE_S)
    assert told.status_code == 401


def test_no_secret_is_in_a_command_line_or_a_log(compose: LocalCompose) -> None:
    secrets = [
        (compose.directory / "secrets" / name).read_text()
        for name in ("redis_password", "ray_auth_token", "api_key")
    ]
    seen = [*compose.processes().values(), *(c.log for c in compose.containers)]
    assert len(seen) > 20
    assert not [words for words in seen if any(secret in words for secret in secrets)]


def test_a_second_drafter_node_gets_a_drafter_by_itself(compose: LocalCompose) -> None:
    """`docker compose up --scale drafter=2`."""
    assert ready(compose, "drafter") == 1
    node = compose.start("drafter")
    compose.until_healthy(node)
    until_ready(compose, "drafter", 2)


def test_a_node_that_is_stopped_leaves_and_serving_goes_on(compose: LocalCompose) -> None:
    """`docker compose up --scale drafter=1`."""
    node = compose.containers[-1]
    assert node.service == "drafter"
    node.process.terminate()
    node.process.wait(PATIENCE_S)
    until_ready(compose, "drafter", 1)
    test_http_and_grpc_answer_alike(compose)


def test_down_leaves_no_process(compose: LocalCompose) -> None:
    assert compose.down() == []
    end = time.monotonic() + PATIENCE_S
    while compose.processes() and time.monotonic() < end:
        time.sleep(0.1)
    assert compose.processes() == {}


def ready(compose: LocalCompose, pool: str) -> int:
    """Replicas of a pool, by `docker compose exec ray-head dspark status`."""
    head = compose.one("ray-head")
    told = subprocess.run(
        [str(DSPARK), "status", f"--address=http://{head.address}:8265", "--json"],
        env=compose.environment(head),
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert told.returncode in (0, 1), told.stderr
    replicas = json.loads(told.stdout)["pools"][pool]["replicas"]
    return sum(replica["state"] == "ready" for replica in replicas)


def until_ready(compose: LocalCompose, pool: str, count: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while (found := ready(compose, pool)) != count:
        assert time.monotonic() < end, f"{found} of pool {pool} are ready, not {count}"
        time.sleep(0.5)
