"""The pools of a cluster as cluster.yaml describes them: how many replicas of each, with what, and
where they are reached."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from dspark.core.drafts import MAX_GAMMA
from dspark.deploy.serve_config import BoundsSection, EngineSection, TlsSection, section
from dspark.deploy.single import MAX_THREADS
from dspark.drafter.batching import BatchingConfig
from dspark.gateway.strict_file import Strict
from dspark.models.drafters.shipped import AUTO
from dspark.scheduler.central import SchedulerConfig

POOLS = ("scheduler", "gateway", "verifier", "drafter")
PER_NODE: Literal["per-node"] = "per-node"

# Ray's workers take any of these, so a server of ours that wants one may find it taken.
RAY_PORTS = range(10_000, 20_000)

# Where a server is reached from its own machine only.
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_Host = Field(default="127.0.0.1", min_length=1)
_AnyPort = Field(default=0, ge=0, le=65_535)
_Threads = Field(default=0, ge=0, le=MAX_THREADS)

# What follows from other sections of the file, or has a form of its own.
SettingsSection: Any = section(SchedulerConfig, leave_out=("shares", "gamma", "prefill_chunk"))
BatchingSection: Any = section(BatchingConfig)


class Autoscale(Strict):
    """Between `min` and `max` replicas, so many that each carries `target` of what it can take
    (`roles.Load.pressure`). up_s, down_s: seconds that the load asks for more, or for fewer, before
    there are; a replica takes seconds to load and a drain may take drain_s. min: of a
    pool of none nobody could tell the load."""

    min: int = Field(default=1, ge=1)
    max: int = Field(ge=1)
    target: float = Field(default=0.7, gt=0, le=1)
    up_s: float = Field(default=3.0, ge=0)
    down_s: float = Field(default=60.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Autoscale:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max, {self.max}")
        return self


class Resources(Strict):
    """What Ray keeps for one replica: cores, GPUs, bytes of memory, and resources that nodes were
    given by name. The default 0 of all lets any node take any number."""

    cpus: float = Field(default=0.0, ge=0)
    gpus: float = Field(default=0.0, ge=0)
    memory: int | None = Field(default=None, gt=0)
    custom: dict[str, PositiveFloat] = Field(default_factory=dict)


class PoolSection(Strict):
    """replicas: how many, or "per-node", one on each node that offers the custom resource; or
    autoscale; neither is one replica. host: to listen on, loopback unless you mean it. advertise:
    the host that others are told, where it is not the same; a host that means all addresses tells
    the machine's own."""

    replicas: int | Literal["per-node"] | None = None
    autoscale: Autoscale | None = None
    resources: Resources = Resources()
    host: str = _Host
    advertise: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_size(self) -> PoolSection:
        if self.replicas is not None and self.autoscale is not None:
            raise ValueError("replicas and autoscale: exactly one of them says how many")
        if isinstance(self.replicas, int) and self.replicas < self.least:
            raise ValueError(f"replicas: {self.replicas} must be at least {self.least}")
        if self.replicas == PER_NODE and not self.resources.custom:
            raise ValueError(
                "replicas: per-node needs resources.custom, to tell which nodes are meant"
            )
        return self

    @property
    def least(self) -> int:
        """Replicas without which there is no cluster."""
        return 1

    @property
    def initial(self) -> int | Literal["per-node"]:
        """Replicas to begin with."""
        if self.autoscale is not None:
            return self.autoscale.min
        return 1 if self.replicas is None else self.replicas

    @property
    def most(self) -> int:
        """Replicas that one machine may come to run: so many ports a fixed port stands for."""
        if self.autoscale is not None:
            return self.autoscale.max
        return self.replicas if isinstance(self.replicas, int) else 1

    def fixed_ports(self) -> dict[str, range]:
        """By field, the ports that this pool's replicas take, the first free one each."""
        fields = {"port": getattr(self, "port", 0)}
        return {name: range(port, port + self.most) for name, port in fields.items() if port}


class SchedulerPool(PoolSection):
    """port: the first of as many as there are replicas. addresses: where the replicas are reached,
    if not there, as behind one name in a container network. settings: intervals, times to live and
    bounds (SchedulerConfig). shares: by tenant, beside those of the gateway's file of keys.
    Autoscaling it would move addresses that everybody knows, so it takes a number."""

    port: int = Field(default=50_060, ge=1, le=65_535)
    addresses: list[str] = Field(default_factory=list)
    settings: SettingsSection = SettingsSection()
    shares: dict[str, PositiveFloat] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_autoscale(self) -> SchedulerPool:
        if self.autoscale is not None:
            raise ValueError("autoscale: the scheduler takes a fixed number of replicas")
        return self


class GatewayPool(PoolSection):
    """http_port, grpc_port: the first of as many as there may be replicas. keys: file of API keys
    and tenants; without one everybody may call. tls: of these two ports, for clients; without it
    they are plain, whatever the services speak among themselves. couple_unseeded: draw a seed for
    every request that has none (design.md §4, L3). wait_s: seconds without a verifier before a
    gateway that starts gives up."""

    http_port: int = Field(default=8000, ge=0, le=65_535)
    grpc_port: int = Field(default=50_051, ge=0, le=65_535)
    keys: str | None = None
    tls: TlsSection | None = None
    bounds: BoundsSection = BoundsSection()
    couple_unseeded: bool = False
    wait_s: float = Field(default=600.0, gt=0)

    def fixed_ports(self) -> dict[str, range]:
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port}
        return {name: range(port, port + self.most) for name, port in ports.items() if port}


class VerifierPool(PoolSection):
    """port: 0 is any free one, which the replica registers. threads: of the forward pass, 0 for all
    cores. engine: bounds of each engine (EngineConfig). fallback: what drafts while no drafter
    replica can be asked."""

    port: int = _AnyPort
    threads: int = _Threads
    engine: EngineSection = EngineSection()
    fallback: Literal["ngram", "none"] = "ngram"


class DrafterPool(PoolSection):
    """port: 0 is any free one, which the replica registers. threads: of the draft pass, 0 for all
    cores. checkpoint: a trained drafter's directory or hub id, ngram, or auto: the one that comes
    with dspark for the model, else ngram. gamma: tokens of a block of ngram, the engine's if not
    given. window: positions that it reads; candidates: of its
    sequential head, 0 for the whole vocabulary; both as trained, if not given. feature_dtype: as
    features travel. batching: bounds of its passes (BatchingConfig). 0 replicas: verifiers draft
    with their fallback."""

    port: int = _AnyPort
    threads: int = _Threads
    checkpoint: str = Field(default=AUTO, min_length=1)
    gamma: int | None = Field(default=None, ge=1, le=MAX_GAMMA)
    window: int | None = Field(default=None, ge=1)
    candidates: int | None = Field(default=None, ge=0)
    feature_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    batching: BatchingSection = BatchingSection()

    @property
    def least(self) -> int:
        return 0
