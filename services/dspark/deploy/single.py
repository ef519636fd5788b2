"""One process: a checkpoint becomes an engine with its drafter, no Ray and no Redis."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from dspark.core.config import EngineConfig
from dspark.core.drafts import Drafter
from dspark.core.errors import ConfigError
from dspark.gateway.tokenizer import Tokenizer
from dspark.models import load_target, resolve
from dspark.models.cache import default_cache
from dspark.models.targets.backend import Backend
from dspark.scheduler import OnlineStepCost, StepCost, cost_key, hardware
from dspark.verifier.engine import Engine
from dspark.verifier.profiling import profile_step_cost

BACKENDS = ("transformers",)
DTYPES = ("float32", "bfloat16")
DRAFTERS = ("ngram", "none")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Which target runs here and how. device: "cpu", "cuda", "cuda:0"… threads: of the forward pass,
    0 for what torch finds."""

    model: str = "smollm2-135m"
    backend: str = "transformers"
    dtype: str = "float32"
    device: str = "cpu"
    drafter: str = "ngram"
    threads: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("backend", self.backend, BACKENDS),
            ("dtype", self.dtype, DTYPES),
            ("drafter", self.drafter, DRAFTERS),
        ):
            if value not in choices:
                raise ConfigError(f"{name}: {value!r} is not one of: {', '.join(choices)}")
        if self.threads < 0:
            raise ConfigError(f"threads: {self.threads} must be at least 0")


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine ready to run, and the words to talk to it. profiled: the cost was measured now."""

    engine: Engine
    tokenizer: Tokenizer
    path: Path
    config: TargetConfig
    cost: StepCost
    profiled: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Where long work reports: `line` for a sentence, `steps(done, all)` for a measured walk."""

    line: Callable[[str], None] = lambda _: None
    steps: Callable[[int, int], None] = lambda _done, _all: None


def load(
    config: TargetConfig, progress: Progress | None = None, *, profile: bool = False
) -> Loaded:
    """Resolve, load and profile. profile: measure the step cost even if it is cached.

    Raises ModelError, ConfigError.
    """
    import torch

    from dspark.models.targets.transformers import TransformersBackend

    progress = progress or Progress()
    if config.threads:
        torch.set_num_threads(config.threads)
    # Denormals cost tens of times a normal operation and change nothing that is seen.
    torch.set_flush_denormal(True)
    path = resolve(config.model, progress=progress.line)
    tokenizer = Tokenizer.load(path)
    model = load_target(path, dtype=getattr(torch, config.dtype), device=config.device)
    backend = TransformersBackend(model, config.engine.block_size)
    key = cost_key(
        hardware() if config.device == "cpu" else torch.cuda.get_device_name(config.device),
        f"{path.name}-{backend.target_id}",
        config.dtype,
        backend.name,
        torch.get_num_threads(),
    )
    file = default_cache() / "step-cost" / key
    cost = None if profile else _cached_cost(file, progress)
    profiled = cost is None
    if cost is None:
        progress.line("measuring what a step costs on this machine (once)")
        cost = profile_step_cost(
            backend,
            config.engine.max_step_tokens,
            config.engine.max_sequences,
            progress=progress.steps,
        )
        _keep_cost(cost, file, progress)
    engine = make_engine(backend, config, cost, tokenizer.eos_ids)
    return Loaded(engine, tokenizer, path, config, cost, profiled)


def make_engine(
    backend: Backend, config: TargetConfig, cost: StepCost, eos_ids: Collection[int]
) -> Engine:
    """An engine over a loaded backend, whose KV blocks it allocates for itself."""
    from dspark.models.drafters import NgramDrafter

    drafters: dict[str, Drafter] = {}
    if config.drafter == "ngram" and config.engine.gamma:
        drafters["ngram"] = NgramDrafter(config.engine.gamma)
    return Engine(backend, config.engine, OnlineStepCost(cost), drafters=drafters, eos_ids=eos_ids)


def _cached_cost(file: Path, progress: Progress) -> StepCost | None:
    try:
        return StepCost.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        progress.line(f"the cached step cost cannot be used ({error}); measuring again")
        return None


def _keep_cost(cost: StepCost, file: Path, progress: Progress) -> None:
    try:
        cost.save(file)
    except OSError as error:
        progress.line(f"the step cost could not be kept ({error}); the next start measures again")
