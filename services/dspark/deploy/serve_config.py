"""Configuration of `dspark serve`: one strict tree from a file, the environment and flags.

Later sources win, field by field: defaults, file, environment, flags. An environment variable is
the field's path in capitals behind DSPARK_, its parts joined by two underscores:
DSPARK_HTTP__PORT=8080. A name that is no field, wherever it stands, is an error that names it, and
no error shows a value that could not be read (it may be a secret in the wrong place).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, Field, ValidationError, create_model

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError
from dspark.deploy.single import TargetConfig
from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.strict_file import Strict, read_strict, told
from dspark.models.drafters.shipped import AUTO
from dspark.serving.tls import TlsFiles
from dspark.telemetry.config import TelemetryConfig

PREFIX = "DSPARK_"
# Variables of other parts of dspark.
NOT_OURS = {"DSPARK_CACHE", "DSPARK_ADDRESS", "DSPARK_API_KEY"}

T = TypeVar("T")


def section(kind: type[Any], leave_out: tuple[str, ...] = ()) -> type[Strict]:
    """The fields of a configuration dataclass as a strict model, with its defaults."""
    hints = get_type_hints(kind)
    known: dict[str, Any] = {
        f.name: (hints[f.name], f.default) for f in fields(kind) if f.name not in leave_out
    }
    return create_model(kind.__name__, __base__=Strict, **known)


EngineSection: Any = section(EngineConfig)
BoundsSection: Any = section(HttpConfig, leave_out=("stall_timeout_s", "drain_s"))


class Listen(Strict):
    """host: loopback unless you mean it. port: 0 is any free one."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65_535)


class TlsSection(Strict):
    """PEM files. client_ca: clients must show a certificate that it signed (mTLS)."""

    certificate: str
    key: str
    client_ca: str | None = None

    def files(self) -> TlsFiles:
        ca = None if self.client_ca is None else Path(self.client_ca)
        return TlsFiles(Path(self.certificate), Path(self.key), ca)


class ServeConfig(Strict):
    """model … threads: as `dspark generate`. name: what requests call the model; default `model`.
    http, grpc: where to listen. verification: for gateways of other processes, off by default.
    keys: file of API keys and tenants; without one everybody may call. couple_unseeded: draw a
    seed for every request that has none (design.md §4, L3). drain_s: seconds that running requests
    get when the server stops. telemetry: traces, metrics elsewhere than at /metrics, log format.
    """

    model: str = "smollm2-135m"
    name: str | None = None
    backend: str = "auto"
    dtype: str = "float32"
    device: str = "cpu"
    drafter: str = AUTO
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
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def served_name(self) -> str:
        return self.name or Path(self.model).name

    def target(self) -> TargetConfig:
        """Raises ConfigError, or InvalidRequest for the verify policy."""
        return TargetConfig(
            model=self.model,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            drafter=self.drafter,
            threads=self.threads,
            engine=made("engine", EngineConfig, self.engine),
        )

    def bounds(self) -> HttpConfig:
        """Raises ConfigError."""
        return made(
            "http_bounds",
            HttpConfig,
            self.http_bounds,
            stall_timeout_s=self.engine.stall_timeout_s,
            drain_s=self.drain_s,
        )

    def to_yaml(self) -> str:
        """As a file that gives this configuration again."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def made(name: str, kind: Callable[..., T], section: Strict, **rest: object) -> T:
    """A section as the configuration that it stands for. Raises ConfigError naming the field."""
    try:
        return kind(**section.model_dump(), **rest)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, where it goes, and who said so."""

    source: str
    path: tuple[str, ...]
    value: Any


def configure(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> ServeConfig:
    """The configuration of one process. flags: by path ("http.port"), None where not given.

    Raises ConfigError that names the source, the field, and what it must be, or InvalidRequest for
    the verify policy.
    """
    settings = [
        *([] if file is None else _of_file(file)),
        *_of_environment(environment),
        *(
            Setting("command line", tuple(flag.split(".")), value)
            for flag, value in flags.items()
            if value is not None
        ),
    ]
    tree: dict[str, Any] = {}
    for setting in settings:
        tree = _with(tree, setting.path, setting.value)
    try:
        config = ServeConfig.model_validate(tree)
    except ValidationError as error:
        places = [problem["loc"] for problem in error.errors(include_input=False)]
        sources = dict.fromkeys(_source(settings, place) for place in places)
        raise ConfigError(f"{', '.join(sources)}: {told(error)}") from None
    config.target()  # these know limits of their own
    config.bounds()
    return config


class _AnyFile(Strict):
    model_config = ConfigDict(extra="allow")


def _of_file(file: Path) -> Iterator[Setting]:
    for name, value in (read_strict(file, _AnyFile).model_extra or {}).items():
        yield Setting(str(file), (name,), value)


def _of_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    for name, text in sorted(environment.items()):
        if name.startswith(PREFIX) and name not in NOT_OURS:
            path = tuple(name.removeprefix(PREFIX).lower().split("__"))
            try:
                yield Setting(name, path, text if _is_text(path) else yaml.safe_load(text))
            except yaml.YAMLError:
                raise ConfigError(f"{name}: is not YAML") from None


def _is_text(path: Sequence[str]) -> bool:
    """Whether a field takes a string: "8000" is a good name for a model, and no number then."""
    kinds: tuple[Any, ...] = (ServeConfig,)
    for name in path:
        known = {k: v for kind in kinds for k, v in getattr(kind, "model_fields", {}).items()}
        if name not in known:
            return True  # no field: refused by its name
        kinds = get_args(known[name].annotation) or (known[name].annotation,)
    return str in kinds


def _with(tree: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    inner = tree.get(path[0])
    if len(path) > 1:
        value = _with(inner if isinstance(inner, Mapping) else {}, path[1:], value)
    return {**tree, path[0]: value}


def _source(settings: Sequence[Setting], place: Sequence[object]) -> str:
    """Who last said something about a field, or if nobody did, about its section."""

    def shared(setting: Setting) -> int:
        return sum(a == b for a, b in zip(setting.path, place, strict=False))

    return max(reversed(settings), key=shared).source
