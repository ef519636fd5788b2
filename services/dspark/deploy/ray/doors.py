"""Ways to Serve's controller: what is deployed, and what should be. Both speak the same plain data,
that of Serve's REST API (ServeInstanceDetails, ServeDeploySchema), and need no Ray here."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dspark.core.errors import ConfigError, DeadlineExceeded, DsparkError, Unavailable
from dspark.deploy.pools import POOLS
from dspark.deploy.ray.observed import deployed
from dspark.deploy.ray.serve_config import LOGGING

# Seconds for one answer; the controller answers in milliseconds, on a busy machine in a second.
ANSWER_S = 30.0
APPLICATIONS = "/api/serve/applications/"
# Bytes of an answer: a thousand replicas are a megabyte.
MOST_BYTES = 64 * 2**20


class Door(Protocol):
    """Each may raise Unavailable, and ConfigError for what the other side does not take."""

    def details(self) -> dict[str, Any]: ...

    def put(self, config: Mapping[str, Any]) -> None:
        """What should be deployed: what is not named goes."""
        ...

    def close(self, *, force: bool, told: Callable[[str], None]) -> None:
        """End the cluster of the other side, where it has one of its own."""
        ...


class KeeperDoor:
    """The keeper of a cluster on this machine, over a unix socket: a line of JSON asks, lines of
    JSON answer, {"said": …} while it works and {"done": …} or {"error": …} at its end.

    until: on time.monotonic, when an answer is waited for no longer: then DeadlineExceeded, and
    what was asked for goes on."""

    def __init__(self, path: str, until: float = math.inf) -> None:
        self._path = path
        self._until = until

    def details(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("details")
        return found

    def put(self, config: Mapping[str, Any]) -> None:
        self._ask("put", config=config)

    def close(self, *, force: bool, told: Callable[[str], None]) -> None:
        try:
            self._ask("down", told, force=force)
        except Unavailable:
            if not force:
                raise  # else it ended before it could say so

    def _ask(self, what: str, told: Callable[[str], None] = print, **rest: Any) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            try:
                link.settimeout(self._patience_s())
                link.connect(self._path)
                link.sendall(json.dumps({"ask": what, **rest}).encode() + b"\n")
                with link.makefile("rb") as answers:
                    # A `down` says something at least every ten seconds.
                    for answer in map(json.loads, answers):
                        link.settimeout(self._patience_s())
                        if "said" in answer:
                            told(answer["said"])
                        elif "error" in answer:
                            raise Unavailable(answer["error"])
                        else:
                            return answer["done"]
            except TimeoutError:
                self._patience_s()
                raise Unavailable(f"the cluster does not answer within {ANSWER_S:g} s") from None
            except (OSError, ValueError) as error:
                raise Unavailable(f"the cluster does not answer: {error}") from None
        raise Unavailable("the cluster ended before it had answered")

    def _patience_s(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the cluster was not done in time")
        return min(left, ANSWER_S)


class RestDoor:
    """Ray's dashboard, http://host:8265. token: of RAY_AUTH_MODE=token."""

    def __init__(self, address: str, token: str | None) -> None:
        self._address = address.rstrip("/")
        parts = urllib.parse.urlsplit(self._address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path:
            raise ConfigError(
                f"--address: {address!r} must be that of Ray's dashboard, as http://127.0.0.1:8265"
            )
        self._token = token

    def details(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._call("GET"))
        return found

    def put(self, config: Mapping[str, Any]) -> None:
        self._call("PUT", json.dumps(config).encode())

    def close(self, *, force: bool, told: Callable[[str], None]) -> None:
        """Remove the pools, and end Serve where nobody else has an application on it: what puts
        nothing at all would leave its processes behind, and what deletes takes all there is."""
        details = self.details()
        others = [
            name
            for name, application in (details.get("applications") or {}).items()
            if name not in POOLS and application["status"] != "DELETING"
        ]
        if not others:
            self._call("DELETE")
            return
        told(f"Serve stays, for what else runs there: {', '.join(others)}")
        stay = {name: one for name, one in deployed(details).items() if name not in POOLS}
        self.put(whole(stay))

    def _call(self, method: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self._address + APPLICATIONS, body, method=method)
        request.add_header("Content-Type", "application/json")
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            # Proxies are for the world outside.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=ANSWER_S) as answer:
                found: bytes = answer.read(MOST_BYTES)
                return found
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Unavailable(f"Ray at {self._address} does not answer: {reason}") from None

    def _refused(self, error: urllib.error.HTTPError) -> DsparkError:
        if error.code == 401:
            return ConfigError(
                f"Ray at {self._address} wants a token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            )
        if error.code == 403:
            return ConfigError(f"Ray at {self._address} does not take this token")
        lines = error.read(10_000).decode(errors="replace").strip().splitlines()
        said = lines[-1][:500] if lines else error.reason
        if error.code == 400:
            return ConfigError(f"Ray at {self._address} refuses this configuration: {said}")
        return Unavailable(f"Ray at {self._address}: {error.code}: {said}")


def whole(applications: Mapping[str, Any]) -> dict[str, Any]:
    """What should be deployed, for `Door.put`: these and no others."""
    return {
        "proxy_location": "Disabled",
        "logging_config": dict(LOGGING),
        "applications": list(applications.values()),
    }


def auth_token(environment: Mapping[str, str] = os.environ) -> str | None:
    """Ray's own variables: RAY_AUTH_TOKEN, or the file RAY_AUTH_TOKEN_PATH. Raises ConfigError."""
    if token := environment.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        if named:
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: {file}: {error}") from None
        return None
