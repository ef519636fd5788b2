"""One process: a checkpoint becomes an engine with its drafter, no Ray and no Redis.

Importing this is light, so that a bad `TargetConfig` is refused before torch is even imported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.core.config import EngineConfig
from dspark.core.errors import ConfigError, ModelError
from dspark.core.replicas import VerifierCard
from dspark.models import load_target, resolve
from dspark.models.cache import default_cache
from dspark.models.drafters.shipped import AUTO, chosen_drafter
from dspark.scheduler import OnlineStepCost, Policy, StepCost, cost_key, hardware

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dspark.core.drafts import Drafter
    from dspark.gateway.tokenizer import Tokenizer
    from dspark.models.drafters.drafting import ModelDrafter
    from dspark.models.targets.backend import Backend
    from dspark.verifier.engine import Engine

# Backend -> what it computes in.
# What each backend can be had in. auto: native where it serves, else transformers.
PRECISIONS = {
    "auto": ("float32", "bfloat16", "int8"),
    "native": ("float32", "int8"),
    "transformers": ("float32", "bfloat16"),
}
BACKENDS = tuple(PRECISIONS)
DTYPES = ("float32", "bfloat16", "int8")
DRAFTERS = (AUTO, "ngram", "none")
MAX_THREADS = 1024  # more than any machine's cores; OpenMP dies of a number it cannot start


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Which target runs here and how. device: "cpu", "cuda", "cuda:0"… drafter: one of DRAFTERS, or
    a trained one's directory or hub id. threads: of the forward pass, 0 for what torch finds.
    Raises ConfigError, or InvalidRequest for the verify policy."""

    model: str = "smollm2-135m"
    backend: str = "auto"
    dtype: str = "float32"
    device: str = "cpu"
    drafter: str = AUTO
    threads: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("backend", self.backend, BACKENDS),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in choices:
                raise ConfigError(f"{name}: {value!r} is not one of: {', '.join(choices)}")
        if self.dtype not in PRECISIONS[self.backend]:
            raise ConfigError(
                f"dtype: the {self.backend} backend has no {self.dtype}, it has: "
                f"{', '.join(PRECISIONS[self.backend])}"
            )
        if (
            self.drafter not in DRAFTERS
            and "/" not in self.drafter
            and not Path(self.drafter).is_dir()
        ):
            raise ConfigError(
                f"drafter: {self.drafter!r} is not one of: {', '.join(DRAFTERS)}, a directory or "
                "a hub id"
            )
        if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device):
            raise ConfigError(f"device: {self.device!r} is not one of: cpu, cuda, cuda:N")
        if self.device != "cpu" and (self.backend == "native" or self.dtype == "int8"):
            what = "native backend" if self.backend == "native" else "int8 precision"
            raise ConfigError(f"device: the {what} runs on cpu, not on {self.device!r}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads: {self.threads} must be in [0, {MAX_THREADS}]")
        Policy.parse(self.engine.verify)

    @property
    def tries_native(self) -> bool:
        """Whether the native backend is to serve if it can."""
        auto = self.backend == "auto" and self.device == "cpu" and self.dtype != "bfloat16"
        return auto or self.backend == "native"

    @property
    def weights_dtype(self) -> str:
        """In which a checkpoint is loaded: int8 is made of float32."""
        return "float32" if self.dtype == "int8" else self.dtype

    @property
    def chosen_drafter(self) -> str:
        """What `drafter` stands for: `auto` is decided by the model's name."""
        return chosen_drafter(self.drafter, self.model)

    @property
    def has_plain_drafter(self) -> bool:
        """One without weights."""
        return self.chosen_drafter in ("ngram", "none")


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine ready to run on `backend`, and the words to talk to it. config: as it came to be,
    see `open_backend`. layers: of the target. profiled: the cost was measured now. hardware,
    threads: what it was measured on."""

    engine: Engine
    backend: Backend
    tokenizer: Tokenizer
    path: Path
    config: TargetConfig
    layers: int
    cost: StepCost
    profiled: bool
    hardware: str
    threads: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where long work reports: `line` for a sentence, `steps(done, all)` for a measured walk."""

    line: Callable[[str], None] = lambda _: None
    steps: Callable[[int, int], None] = lambda _done, _all: None


def load(
    config: TargetConfig,
    progress: Progress | None = None,
    *,
    profile: bool = False,
    exact: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Loaded:
    """Resolve, load and profile. profile: measure the step cost even if it is cached. exact: see
    `open_backend`.

    Raises ModelError, and ConfigError for a KV cache beyond the memory there is.
    """
    import torch

    from dspark.deploy.memory import bytes_per_token, check_kv_tokens, free_bytes
    from dspark.gateway.tokenizer import Tokenizer
    from dspark.models.drafters import load_drafter
    from dspark.models.drafters.native import NativeDraftOptions
    from dspark.models.drafters.target_tensors import TargetTensors

    progress = progress or Progress()
    if config.threads:
        torch.set_num_threads(config.threads)
    path = resolve(config.model, progress=progress.line)
    tokenizer = Tokenizer.load(path)
    model = load_target(path, dtype=getattr(torch, config.weights_dtype), device=config.device)
    layers = int(model.config.get_text_config().num_hidden_layers)
    # Before the backend lays the weights out anew.
    tensors = None if config.has_plain_drafter else TargetTensors.of(model)
    config, backend = open_backend(config, model, progress, exact=exact)
    if config.device == "cpu":
        machine, free = hardware(), free_bytes()
    else:
        machine = torch.cuda.get_device_name(config.device)
        free = torch.cuda.mem_get_info(config.device)[0]
    check_kv_tokens(config.engine, bytes_per_token(backend), free)
    threads = torch.get_num_threads()
    target = f"{path.name}-{backend.target_id}"
    file = cost_key(machine, target, config.dtype, backend.name, threads)
    cost, profiled = step_cost(
        backend,
        config.engine,
        default_cache() / "step-cost" / file,
        progress,
        again=profile,
        clock=clock,
    )
    trained = None
    if tensors is not None and config.engine.gamma:
        trained = load_drafter(
            config.chosen_drafter,
            tensors,
            target_id=backend.target_id,
            tokenizer_hash=tokenizer.tokenizer_hash,
            native=NativeDraftOptions.beside_target(backend),
            progress=progress.line,
        )
    engine = make_engine(backend, config, cost, tokenizer.eos_ids, trained)
    return Loaded(
        engine, backend, tokenizer, path, config, layers, cost, profiled, machine, threads
    )


def verifier_card(loaded: Loaded, model: str) -> VerifierCard:
    """What this engine says of itself to others. model: what requests call it."""
    engine = loaded.engine
    return VerifierCard(
        model=model,
        target_id=engine.target_id,
        tokenizer_hash=loaded.tokenizer.tokenizer_hash,
        backend=engine.backend_name,
        limits=engine.limits,
        block_size=engine.config.block_size,
        max_sequences=engine.config.max_sequences,
        max_waiting=engine.config.max_waiting,
    )


def open_backend(
    config: TargetConfig, model: PreTrainedModel, progress: Progress, *, exact: bool = False
) -> tuple[TargetConfig, Backend]:
    """The backend a configuration names, or transformers in float32 where the native one does not
    fit the model or the machine: one line says why, and the configuration that comes back names
    what serves.

    exact: nothing may serve in place of what is named. Replicas of a pool go on with each
    other's answers, which needs the same arithmetic. Raises ModelError.
    """
    from dspark.models.targets.transformers import TransformersBackend

    if config.tries_native:
        from dspark.models.targets.native import (
            NativeOptions,
            NativeUnavailable,
            Shelf,
            open_native,
        )

        # Replicas of one machine map the same weights.
        shelf = Shelf(default_cache() / "native" / "weights")
        options = NativeOptions(precision=config.dtype, threads=config.threads, shelf=shelf)
        try:
            native = open_native(model, config.engine.block_size, options, progress.line)
            return replace(config, backend="native"), native
        except NativeUnavailable as why:
            if exact and (config.backend == "native" or config.dtype == "int8"):
                raise ModelError(f"backend: the native one does not serve here: {why}") from why
            progress.line(f"the native backend does not serve here, transformers does: {why}")
    config = replace(config, backend="transformers", dtype=config.weights_dtype)
    return config, TransformersBackend(model, config.engine.block_size)


def make_engine(
    backend: Backend,
    config: TargetConfig,
    cost: StepCost,
    eos_ids: Collection[int],
    trained: ModelDrafter | None = None,
) -> Engine:
    """An engine over a loaded backend, whose KV blocks it allocates for itself. trained: the
    drafter that a configuration names which has none of the plain ones."""
    from dspark.models.drafters import NgramDrafter
    from dspark.verifier.engine import Engine

    drafters: dict[str, Drafter] = {}
    if trained is not None:
        backend.load_projection(trained.projection)
        drafters[trained.card.kind] = trained
    elif config.chosen_drafter == "ngram" and config.engine.gamma:
        drafters["ngram"] = NgramDrafter(config.engine.gamma)
    settings = replace(config.engine, heartbeat_s=heartbeat_s(cost, config.engine))
    engine = Engine(backend, settings, OnlineStepCost(cost), drafters=drafters, eos_ids=eos_ids)
    if trained is not None:
        engine.guidance.ship(trained.calibration)
    return engine


def heartbeat_s(cost: StepCost, engine: EngineConfig) -> float:
    """Seconds between signs of life that the engine can keep: they are given between steps, so a
    step that is as full as it can be may not look like a death."""
    longest_s = cost.seconds(
        engine.prefill_chunk, engine.max_sequences, engine.max_step_tokens, engine.kv_tokens
    )
    return max(engine.heartbeat_s, longest_s / 2)


def step_cost(
    backend: Backend,
    engine: EngineConfig,
    file: Path,
    progress: Progress,
    *,
    again: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[StepCost, bool]:
    """(what a step costs, whether that was measured now). The cost kept in `file` serves while it
    is sound and holds; a file that cannot be read or written costs a line and a measurement."""
    from dspark.verifier.profiling import profile_step_cost, still_holds

    cost, why = (None, "once") if again else _kept_cost(file)
    if cost is not None:
        if still_holds(cost, backend, clock=clock):
            return cost, False
        why = "again: the kept figures do not fit it any more"
    progress.line(f"measuring what a step costs on this machine ({why})")
    cost = profile_step_cost(
        backend,
        engine.max_step_tokens,
        engine.max_sequences,
        progress=progress.steps,
        clock=clock,
    )
    try:
        cost.save(file)
    except OSError as error:
        progress.line(f"the step cost could not be kept ({error}); the next start measures again")
    return cost, True


def _kept_cost(file: Path) -> tuple[StepCost | None, str]:
    """The cost kept in a file, or None and why it has to be measured."""
    try:
        return StepCost.load(file), ""
    except FileNotFoundError:
        return None, "once"
    except (OSError, ConfigError) as error:
        return None, f"again: the kept figures cannot be used: {error}"
