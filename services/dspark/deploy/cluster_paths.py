"""Relative paths in cluster.yaml begin at its own folder, wherever a replica is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Fields that hold the path of a file.
_FILES = (
    *(
        ("store", name)
        for name in ("url_file", "password_file", "ca_file", "cert_file", "key_file")
    ),
    *(("tls", name) for name in ("ca", "certificate", "key")),
    *(("gateway", "tls", name) for name in ("certificate", "key", "client_ca")),
    ("gateway", "keys"),
    ("telemetry", "otlp", "ca"),
)
# Fields that hold a path or a name: a path where something stands.
_PLACES = (("model",), ("drafter", "checkpoint"))


def anchored(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration as plain data, changed in place: relative paths begin at `folder`."""
    for *sections, name in (*_FILES, *_PLACES):
        inner: Any = data
        for section in sections:
            inner = (inner or {}).get(section)
        if inner and inner.get(name) is not None:
            place = folder / Path(inner[name]).expanduser()
            if (*sections, name) in _FILES or place.exists():
                inner[name] = str(place)
    return data
