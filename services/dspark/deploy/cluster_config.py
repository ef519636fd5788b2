"""Configuration of a cluster: one strict file for all of its processes (examples/cluster/).

A name that is no field, a value that cannot be and a port that clashes are errors that name the
file, the field, the value and the limit. Passwords are in the environment or in files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError, InvalidRequest
from dspark.deploy.cluster_paths import anchored
from dspark.deploy.cluster_ports import check_ports
from dspark.deploy.pools import (
    POOLS,
    DrafterPool,
    GatewayPool,
    PoolSection,
    SchedulerPool,
    VerifierPool,
)
from dspark.deploy.serve_config import made
from dspark.deploy.single import TargetConfig
from dspark.drafter.batching import BatchingConfig
from dspark.gateway.openai.config import HttpConfig
from dspark.gateway.strict_file import Strict, read_strict, told
from dspark.models.drafters.shipped import AUTO, chosen_drafter
from dspark.scheduler.central import SchedulerConfig
from dspark.scheduler.store import StoreConfig
from dspark.scheduler.store.config import Server
from dspark.scheduler.store.names import check_cluster
from dspark.serving import PeerFiles, address_of
from dspark.telemetry.config import TelemetryConfig

__all__ = ["POOLS", "ClusterConfig", "read_cluster"]

# The environment's word on where the store is.
STORE_URL = "REDIS_URL"
_STORE = StoreConfig()  # whose defaults hold


class StoreSection(Strict):
    """url: of a Redis or Valkey, without its password; url_file: holds a URL that may have one.
    Either gives way to REDIS_URL in the environment; without any an embedded Valkey is started.
    The rest as of `StoreConfig`."""

    url: str | None = None
    url_file: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    connect_timeout_s: float = Field(default=_STORE.connect_timeout_s, gt=0)
    answer_timeout_s: float = Field(default=_STORE.answer_timeout_s, gt=0)
    connections: int = Field(default=_STORE.connections, gt=0)


class PeerTls(Strict):
    """PEM files of mutual TLS between all services: each shows `certificate` and takes only who
    `ca` has signed. server_name: a name that every certificate carries, checked in place of hosts,
    for replicas whose addresses nobody knows beforehand. Files are read at the start of a replica;
    a new certificate is taken up by starting it again."""

    ca: str
    certificate: str
    key: str
    server_name: str | None = Field(default=None, min_length=1)

    def files(self) -> PeerFiles:
        return PeerFiles(
            Path(self.ca), Path(self.certificate), Path(self.key), self.server_name or ""
        )


class ClusterConfig(Strict):
    """name: of the cluster, for its keys in the store and its commands. model … device: as `dspark
    serve`. served_name: what requests call the model; default `model`. drain_s: seconds that what
    runs gets when a replica stops; streams left then go on on another one."""

    name: str = "default"
    model: str = "smollm2-135m"
    served_name: str | None = Field(default=None, min_length=1)
    backend: str = "auto"
    dtype: str = "float32"
    device: str = "cpu"
    store: StoreSection = StoreSection()
    scheduler: SchedulerPool = SchedulerPool()
    gateway: GatewayPool = GatewayPool()
    verifier: VerifierPool = VerifierPool()
    drafter: DrafterPool = DrafterPool()
    tls: PeerTls | None = None
    telemetry: TelemetryConfig = TelemetryConfig()
    drain_s: float = Field(default=30.0, gt=0)
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ClusterConfig:
        """From plain data, as `model_dump` gives it. Raises ConfigError."""
        try:
            config = cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(told(error)) from None
        config.check()
        return config

    @classmethod
    def of_json(cls, text: str) -> ClusterConfig:
        """Raises ConfigError."""
        try:
            config = cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(told(error)) from None
        config.check()
        return config

    def to_json(self) -> str:
        """A text that gives this configuration again."""
        return self.model_dump_json()

    def to_yaml(self) -> str:
        """As a file that gives this configuration again."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)

    def check(self) -> None:
        """What no field alone can tell. Raises ConfigError."""
        try:
            check_cluster(self.name)
        except ConfigError as error:
            raise ConfigError(str(error).replace("cluster:", "name:", 1)) from None
        check_ports({name: self.pool(name) for name in POOLS})
        try:
            self.target()
        except InvalidRequest as error:  # of the verify policy
            raise ConfigError(f"verifier.engine.{error}") from None
        self.http_bounds()
        self.batching()
        self.scheduler_config()
        if self.store.url and self.store.url_file:
            raise ConfigError("store.url_file: store.url says where the store is already")
        if self.store.url and Server.of(self.store.url).password:
            raise ConfigError(
                f"store.url: holds a password, which belongs into {STORE_URL}, store.url_file or "
                "store.password_file"
            )
        drafter = self.drafter
        if not (
            drafter.checkpoint in (AUTO, "ngram")
            or "/" in drafter.checkpoint
            or Path(drafter.checkpoint).is_dir()
        ):
            raise ConfigError(
                f"drafter.checkpoint: {drafter.checkpoint!r} is not auto, ngram, a directory or a "
                "hub id"
            )

    # --- what each process is told ----------------------------------------------------------------

    def pool(self, name: str) -> PoolSection:
        """Raises ConfigError for what is no pool."""
        if name not in POOLS:
            raise ConfigError(f"pool: {name!r} is not one of: {', '.join(POOLS)}")
        section: PoolSection = getattr(self, name)
        return section

    @property
    def model_name(self) -> str:
        return self.served_name or Path(self.model).name

    @property
    def drafts_plainly(self) -> bool:
        """The drafters need no weights."""
        return self.chosen_drafter == "ngram"

    @property
    def chosen_drafter(self) -> str:
        """What `drafter.checkpoint` stands for: `auto` is decided by the model's name."""
        return chosen_drafter(self.drafter.checkpoint, self.model)

    @property
    def engine(self) -> EngineConfig:
        return made("verifier.engine", EngineConfig, self.verifier.engine)

    def target(self) -> TargetConfig:
        """A verifier's, with its fallback as the drafter in its process."""
        return TargetConfig(
            model=self.model,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            drafter=self.verifier.fallback,
            threads=self.verifier.threads,
            engine=self.engine,
        )

    def batching(self) -> BatchingConfig:
        return made("drafter.batching", BatchingConfig, self.drafter.batching)

    def http_bounds(self) -> HttpConfig:
        return made(
            "gateway.bounds",
            HttpConfig,
            self.gateway.bounds,
            stall_timeout_s=self.engine.stall_timeout_s,
            drain_s=self.drain_s,
        )

    def scheduler_config(self, shares: Mapping[str, float] | None = None) -> SchedulerConfig:
        """shares: of tenants, beside those that the file gives, which win."""
        return made(
            "scheduler.settings",
            SchedulerConfig,
            self.scheduler.settings,
            gamma=max(self.engine.gamma, 1),
            prefill_chunk=self.engine.prefill_chunk,
            shares={**(shares or {}), **self.scheduler.shares},
        )

    def scheduler_addresses(self) -> tuple[str, ...]:
        """Where every other replica asks."""
        pool = self.scheduler
        if pool.addresses:
            return tuple(pool.addresses)
        host = pool.advertise or (pool.host if pool.host not in ("0.0.0.0", "::") else "127.0.0.1")
        return tuple(address_of(host, port) for port in pool.fixed_ports()["port"])

    def store_config(self, environment: Mapping[str, str]) -> StoreConfig:
        """Raises ConfigError whose text holds no URL, for it may hold a password."""
        store = self.store
        files = {
            name: Path(given)
            for name in ("password_file", "ca_file", "cert_file", "key_file")
            if (given := getattr(store, name)) is not None
        }
        source, url = STORE_URL, environment.get(STORE_URL, "")
        if not url:
            source, url = "store.url", store.url or ""
        if not url and store.url_file is not None:
            source, url = "store.url_file", _secret("store.url_file", Path(store.url_file))
        try:
            return StoreConfig(
                url,
                self.name,
                connect_timeout_s=store.connect_timeout_s,
                answer_timeout_s=store.answer_timeout_s,
                connections=store.connections,
                **files,
            )
        except ConfigError as error:
            what, _, why = str(error).partition(": ")
            where = source if what.startswith("url") else f"store.{what}"
            raise ConfigError(f"{where}: {why}") from None


def read_cluster(file: Path) -> ClusterConfig:
    """Of a YAML or JSON file, whose relative paths begin at its own folder. Raises ConfigError that
    names the file."""
    config = read_strict(file, ClusterConfig)
    try:
        return ClusterConfig.of(anchored(config.model_dump(), file.resolve().parent))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _secret(field: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {file}: {error}") from None
