"""Configuration of `dspark serve`: one strict tree from a file, the environment and flags.

Later sources win: defaults, file, environment, flags. An environment variable is the field's path
in capitals behind DSPARK_, its parts joined by two underscores: DSPARK_HTTP__PORT=8080. A name
that is no field, wherever it stands, is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import Field, ValidationError, create_model

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError
from dspark.deploy.single import TargetConfig
from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.strict_file import Strict, read_strict, told

PREFIX = "DSPARK_"
# Variables of other parts of dspark.
NOT_OURS = {"DSPARK_CACHE", "DSPARK_ADDRESS", "DSPARK_API_KEY"}


def section(kind: type[Any], leave_out: tuple[str, ...] = ()) -> type[Strict]:
    """The fields of a configuration dataclass as a strict model, with its defaults."""
    hints = get_type_hints(kind)
    known: dict[str, Any] = {
        f.name: (hints[f.name], f.default) for f in fields(kind) if f.name not in leave_out
    }
    return create_model(kind.__name__, __base__=Strict, **known)


EngineSection: Any = section(EngineConfig)
BoundsSection: Any = section(HttpConfig, leave_out=("drain_s",))


class Listen(Strict):
    """host: loopback unless you mean it. port: 0 is any free one."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65_535)


class TlsSection(Strict):
    """PEM files. client_ca: clients must show a certificate that it signed (mTLS)."""

    certificate: str
    key: str
    client_ca: str | None = None


class ServeConfig(Strict):
    """model … threads: as `dspark generate`. name: what requests call the model; default `model`.
    http, grpc: where to listen. verification: for gateways of other processes, off by default.
    keys: file of API keys and tenants; without one everybody may call. couple_unseeded: draw a
    seed for every request that has none (design.md §4, L3). drain_s: seconds that running requests
    get when the server stops.
    """

    model: str = "smollm2-135m"
    name: str | None = None
    backend: str = "transformers"
    dtype: str = "float32"
    device: str = "cpu"
    drafter: str = "ngram"
    threads: int = 0
    engine: EngineSection = EngineSection()
    http: Listen = Listen(port=8000)
    http_bounds: BoundsSection = BoundsSection()
    grpc: Listen = Listen(port=50051)
    verification: Listen | None = None
    keys: str | None = None
    tls: TlsSection | None = None
    couple_unseeded: bool = False
    drain_s: float = Field(30.0, gt=0)
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")

    def target(self) -> TargetConfig:
        """Raises ConfigError, or InvalidRequest for the verify policy."""
        return TargetConfig(
            model=self.model,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            drafter=self.drafter,
            threads=self.threads,
            engine=EngineConfig(**self.engine.model_dump()),
        )

    def bounds(self) -> HttpConfig:
        return HttpConfig(**self.http_bounds.model_dump(), drain_s=self.drain_s)

    def to_yaml(self) -> str:
        """As a file that gives this configuration again."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def configure(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> ServeConfig:
    """The configuration of one process. flags: by path ("http.port"), None where not given.

    Raises ConfigError that names the source, the field, and what it must be.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        tree = read_strict(file, ServeConfig).model_dump(exclude_unset=True)
    for name, text in sorted(environment.items()):
        if name.startswith(PREFIX) and name not in NOT_OURS:
            path = name.removeprefix(PREFIX).lower().split("__")
            tree = _with(tree, path, yaml.safe_load(text))
            _checked(tree, name)
    for flag, value in flags.items():
        if value is not None:
            tree = _with(tree, flag.split("."), value)
    return _checked(tree, "configuration")


def _with(tree: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    inner = tree.get(path[0]) or {}
    if len(path) > 1:
        value = _with(inner if isinstance(inner, Mapping) else {}, path[1:], value)
    return {**tree, path[0]: value}


def _checked(tree: Mapping[str, Any], source: str) -> ServeConfig:
    try:
        return ServeConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {told(error)}") from None
