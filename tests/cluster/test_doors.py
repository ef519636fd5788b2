"""Ray's REST API through a server that speaks it: what is asked, and what its refusals mean."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dspark.cli.main import main
from dspark.core.errors import ConfigError, Unavailable
from dspark.deploy.ray.doors import KeeperDoor, RestDoor, auth_token

TOKEN = "sesame-sesame"


class Dashboard(BaseHTTPRequestHandler):
    applications: dict[str, Any]
    asked: list[str]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        given = self.headers.get("Authorization")
        status, said = 200, b"{}"
        if given is None:
            status, said = 401, b"Unauthorized: Missing authentication token"
        elif given != f"Bearer {TOKEN}":
            status, said = 403, b"Forbidden: Invalid authentication token"
        elif self.path != "/api/serve/applications/":
            status = 404
        elif self.command == "PUT" and json.loads(body) == {"bad": True}:
            status, said = 400, b"Traceback ...\nValueError: what is bad"
        elif self.command == "GET":
            said = json.dumps({"applications": self.applications}).encode()
        elif self.command == "PUT":
            self._deploy({one["name"]: one for one in json.loads(body)["applications"]})
        elif self.command == "DELETE":
            self.applications.clear()
        self.asked.append(self.command)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_PUT = do_DELETE = _answer  # noqa: N815

    def _deploy(self, wanted: dict[str, Any]) -> None:
        """As Serve: what was begun by a program, not by a configuration, stays."""
        for name in list(self.applications):
            if name not in wanted and self.applications[name]["deployed_app_config"] is not None:
                del self.applications[name]

    def log_message(self, *_: object) -> None:
        return


def application(name: str, *, declared: bool = True) -> dict[str, Any]:
    config = {"name": name, "import_path": "x:y", "deployments": [{"name": name}]}
    return {
        "status": "RUNNING",
        "deployed_app_config": config if declared else None,
        "deployments": {},
    }


@pytest.fixture
def dashboard() -> Iterator[str]:
    Dashboard.applications, Dashboard.asked = {}, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_right_token(dashboard: str) -> None:
    door = RestDoor(dashboard + "/", TOKEN)
    assert door.details() == {"applications": {}}
    door.put({"applications": []})
    door.close(force=False, told=lambda _: None)
    with pytest.raises(ConfigError, match="refuses this configuration: ValueError: what is bad"):
        door.put({"bad": True})


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_applications_of_others_outlive_ours(
    dashboard: str, monkeypatch: pytest.MonkeyPatch, force: bool, declared: bool
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    pools = ("scheduler", "gateway", "verifier", "drafter")
    Dashboard.applications |= {name: application(name) for name in pools}
    Dashboard.applications["other"] = application("other", declared=declared)
    assert main(["down", "--address", dashboard, *(["--force"] if force else [])]) == 0
    assert set(Dashboard.applications) == {"other"}
    assert "DELETE" not in Dashboard.asked


@pytest.mark.parametrize("force", [False, True])
def test_where_nobody_else_has_any_serve_ends(
    dashboard: str, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    Dashboard.applications["gateway"] = application("gateway")
    Dashboard.applications["gone"] = {**application("gone"), "status": "DELETING"}
    assert main(["down", "--address", dashboard, *(["--force"] if force else [])]) == 0
    assert Dashboard.asked[-1] == "DELETE"


def test_a_wrong_token_or_none_is_a_line(dashboard: str) -> None:
    with pytest.raises(ConfigError, match="does not take this token") as refused:
        RestDoor(dashboard, "open").details()
    assert "open" not in str(refused.value)
    with pytest.raises(ConfigError, match="wants a token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_P"):
        RestDoor(dashboard, None).details()


def test_nobody_there(dashboard: str) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        RestDoor("http://127.0.0.1:1", TOKEN).details()
    with pytest.raises(Unavailable, match="does not answer"):
        KeeperDoor("/nowhere/control.sock").details()


@pytest.mark.parametrize("address", ["head:6379", "ray://head:10001", "http://head/x", "http://"])
def test_an_address_that_is_no_dashboard(address: str) -> None:
    with pytest.raises(ConfigError, match="must be that of Ray's dashboard"):
        RestDoor(address, None)


def test_where_a_token_may_be(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert auth_token({"RAY_AUTH_TOKEN": TOKEN}) == TOKEN
    assert auth_token({"RAY_AUTH_TOKEN_PATH": str(file)}) == TOKEN
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH: "):
        auth_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})
