"""What `dspark up` tells the keeper below it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

SOCKET = "control.sock"


@dataclass(frozen=True, slots=True)
class Order:
    """name: of the cluster. folder: its own, for sockets and logs. pipe, lock: descriptors; the
    pipe ends when `dspark up` does. serve: Serve's configuration. embed: a Valkey is started here.
    ready: lines for stdout when all pools are."""

    name: str
    folder: str
    pipe: int
    lock: int
    serve: dict[str, Any]
    embed: bool
    ready: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))
