"""`make secrets`: what it makes, who may read it, and that it never makes it anew."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

from dspark.gateway.keys import KeyRing

from .tools import INFRA, ROOT

NAMES = {"redis_password", "ray_auth_token", "grafana_password", "api_key", "api_keys.yaml"}


def make(folder: Path) -> str:
    done = subprocess.run(
        [str(INFRA / "compose/make-secrets"), str(folder / "secrets")],
        env={"PATH": os.environ["PATH"], "DSPARK_ENV_FILE": str(folder / ".env")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (folder / "secrets").iterdir()}


def test_each_is_long_random_and_its_owners_alone(tmp_path: Path) -> None:
    make(tmp_path)
    assert set(contents(tmp_path)) == NAMES
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    for file in (tmp_path / "secrets").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    other = tmp_path / "other"
    other.mkdir()
    make(other)
    for name in NAMES:
        assert contents(tmp_path)[name] != contents(other)[name]
    assert len(contents(tmp_path)["redis_password"]) == 64
    assert len(contents(tmp_path)["ray_auth_token"]) == 64


def test_nothing_of_them_is_printed(tmp_path: Path) -> None:
    said = make(tmp_path)
    for name in ("redis_password", "ray_auth_token", "grafana_password", "api_key"):
        assert contents(tmp_path)[name] not in said


def test_a_second_time_nothing_changes_and_what_is_missing_is_made(tmp_path: Path) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    make(tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / "secrets/redis_password").unlink()
    (tmp_path / ".env").write_text("DSPARK_HTTP_PORT=8100\n")
    make(tmp_path)
    after = contents(tmp_path)
    assert after.pop("redis_password") != before.pop("redis_password")
    assert after == before
    assert (tmp_path / ".env").read_text() == "DSPARK_HTTP_PORT=8100\n"


def test_the_gateway_takes_the_key(tmp_path: Path) -> None:
    make(tmp_path)
    key = (tmp_path / "secrets/api_key").read_text()
    assert key not in (tmp_path / "secrets/api_keys.yaml").read_text()
    ring = KeyRing.load(tmp_path / "secrets/api_keys.yaml")
    assert ring.authenticate(f"Bearer {key}").name == "default"


def test_env_names_the_owner_of_the_files(tmp_path: Path) -> None:
    make(tmp_path)
    said = dict(line.split("=") for line in (tmp_path / ".env").read_text().split())
    assert set(said) == {"DSPARK_UID", "DSPARK_GID"}
    assert said["DSPARK_UID"] != "0"
    for file in (tmp_path / "secrets").iterdir():
        assert (file.stat().st_uid, file.stat().st_gid) == tuple(map(int, said.values()))


def test_make_has_it() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "secrets"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "infra/compose/make-secrets" in done.stdout
