"""How the store is reached: strict, and silent about passwords."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.core.errors import ConfigError
from dspark.scheduler.store.config import Server, StoreConfig, check_version


@pytest.mark.parametrize(
    ("url", "server", "where"),
    [
        (
            "redis://localhost",
            Server("localhost", 6379, None, 0, False, None, None),
            "redis://localhost:6379/0",
        ),
        (
            "rediss://me:p%40ss@[::1]:7000/3",
            Server("::1", 7000, None, 3, True, "me", "p@ss"),
            "rediss://[::1]:7000/3",
        ),
        (
            "redis://:secret@r.example",
            Server("r.example", 6379, None, 0, False, None, "secret"),
            "redis://r.example:6379/0",
        ),
        (
            "unix:///run/a%20b.sock",
            Server("", 0, "/run/a b.sock", 0, False, None, None),
            "unix:///run/a b.sock",
        ),
    ],
)
def test_a_url_is_taken_apart(url: str, server: Server, where: str) -> None:
    assert Server.of(url) == server
    assert server.where == where


@pytest.mark.parametrize(
    "url",
    [
        "http://:hush@host",
        "host:6379",
        "redis://:hush@host:99999",
        "redis://:hush@host/one",
        "redis://:hush@host?ssl_cert_reqs=none",
        "redis://:hush@host#x",
        "redis://:hush@[::1",
        "unix://host/path",
        "unix://",
    ],
)
def test_a_url_that_says_something_else_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url of the store: ") as refused:
        StoreConfig(url)
    assert "hush" not in str(refused.value)


def test_no_text_shows_the_password(tmp_path: Path) -> None:
    config = StoreConfig("redis://u:hush@host")
    assert (
        "hush" not in f"{config} {config!r} {Server.of(config.url)!r} {Server.of(config.url).where}"
    )
    assert config.password() == "hush"
    file = tmp_path / "password"
    file.write_text("hush\n")
    assert StoreConfig("redis://host", password_file=file).password() == "hush"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("cluster", {"cluster": "{x}"}),
        ("connect_timeout_s", {"connect_timeout_s": 0}),
        ("answer_timeout_s", {"answer_timeout_s": float("nan")}),
        ("connections", {"connections": 0}),
        ("password_file", {"url": "redis://:p@host", "password_file": Path("x")}),
        ("password_file", {"url": "memory://", "password_file": Path("x")}),
        ("ca_file", {"url": "redis://host", "ca_file": Path("x")}),
        ("ca_file", {"ca_file": Path("x")}),
        ("cert_file", {"url": "unix:///x", "cert_file": Path("x")}),
        ("key_file", {"url": "rediss://host", "key_file": Path("x")}),
    ],
)
def test_what_does_not_fit_is_named(field: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        StoreConfig(**arguments)  # type: ignore[arg-type]


def test_a_password_file_must_hold_one(tmp_path: Path) -> None:
    for file in (tmp_path / "missing", tmp_path / "empty"):
        config = StoreConfig("redis://host", password_file=file)
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(ConfigError, match=f"^password_file: {file}: "):
            config.password()


@pytest.mark.parametrize("version", ["6.2.0", "6.2", "7.0.15", "8.2.1", "10.0.0"])
def test_new_enough(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["6.0.16", "5.0.7", "2.8", "unknown", ""])
def test_too_old_names_both_versions(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"Redis {version}: 6\.2 or newer"):
        check_version(version)
