"""The configuration of a training run: one strict TOML file.

An unknown key, a value of another type or out of range is an error that names it. Defaults are the
public configurations' (paper, §3.3 and §5.1) where a small machine does not ask for less.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import ConfigError
from dspark.training.losses import Weights

# w_k of EAGLE-3 fall by 0.8 a step.
EAGLE_DECAY = -1.0 / math.log(0.8)


class Strict(BaseModel):
    """No unknown key, no value that is nearly of the right type, no change afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DrafterSection(Strict):
    """kind: dspark, dflash, eagle3, mtp. gamma: tokens of a block. layers: of the drafter. head:
    none, vanilla, gated, rnn, and its rank. draft_vocab: ids it can propose, 0 for all.
    layer_ids: target layers it reads, of those the data keeps; all of them unless given.
    mask_token_id: an id that no text holds. warm_start: begin as the target's own last layers.
    initial: or as the drafter of this checkpoint, of the same form. Sizes are the target's.
    """

    kind: Literal["dspark", "dflash", "eagle3", "mtp"] = "dspark"
    gamma: int = Field(default=7, ge=1, le=MAX_GAMMA)
    layers: int = Field(default=2, ge=1)
    head: Literal["none", "vanilla", "gated", "rnn"] = "vanilla"
    rank: int = Field(default=256, ge=1)
    confidence: bool = True
    draft_vocab: int = Field(default=0, ge=0)
    layer_ids: list[int] | None = None
    mask_token_id: int = Field(default=0, ge=0)
    warm_start: bool = True
    initial: str | None = None


class DataSection(Strict):
    """folders: of `dspark data generate`. answers: in their place a file of lines with answer_ids,
    which the target reads as training goes. held_out: share of the lines that are not trained on.
    balance: each domain as often as the largest."""

    folders: list[str] = []
    answers: str | None = None
    held_out: float = Field(default=0.02, ge=0.0, lt=1.0)
    balance: bool = False


class TrainingSection(Strict):
    """steps, sequences a step, anchors a sequence. learning_rate: its peak, after `warmup` (share
    of the steps), falling to 0 as a cosine. grad_norm: gradients are clipped to. together:
    sequences that run at once, which bounds memory and changes no result. chunk_rows: block tokens
    whose logits exist at once, likewise. precision: of products. device: cpu, cuda or cuda:N.
    """

    steps: int = Field(ge=1)
    sequences: int = Field(default=8, ge=1)
    anchors: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=6e-4, gt=0.0)
    warmup: float = Field(default=0.04, ge=0.0, le=1.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    grad_norm: float = Field(default=1.0, gt=0.0)
    together: int = Field(default=8, ge=1)
    chunk_rows: int = Field(default=512, ge=1)
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = Field(default="cpu", pattern="^(cpu|cuda(:[0-9]+)?)$")
    seed: int = Field(default=0, ge=0)


class LossSection(Strict):
    """Weights of eq. 12, None for what the public configuration of the kind has. position_decay:
    w_k = exp(-(k - 1) / position_decay)."""

    ce: float | None = Field(default=None, ge=0.0)
    tv: float | None = Field(default=None, ge=0.0)
    confidence: float | None = Field(default=None, ge=0.0)
    soft: float | None = Field(default=None, ge=0.0)
    position_decay: float | None = Field(default=None, gt=0.0)

    def weights(self, kind: str, has_confidence: bool) -> Weights:
        usual = {
            "dspark": Weights(0.1, 0.9, 1.0, 0.0, 4.0),
            "dflash": Weights(1.0, 0.0, 0.0, 0.0, 4.0),
        }.get(kind, Weights(0.0, 0.0, 0.0, 1.0, EAGLE_DECAY))
        names = ("ce", "tv", "confidence", "soft", "position_decay")
        own = [getattr(self, name) for name in names]
        values = [
            getattr(usual, name) if value is None else value
            for name, value in zip(names, own, strict=True)
        ]
        if not has_confidence:
            if self.confidence:
                raise ConfigError(f"loss.confidence: {self.confidence} needs a confidence head")
            values[2] = 0.0
        return Weights(*values)


class RunSection(Strict):
    """folder: of checkpoints and curves. A checkpoint every checkpoint_steps, the last `keep` stay.
    Held-out figures every evaluate_steps on evaluate_sequences answers. tensorboard: event files
    too."""

    folder: str
    checkpoint_steps: int = Field(default=200, ge=1)
    keep: int = Field(default=2, ge=1)
    log_steps: int = Field(default=10, ge=1)
    evaluate_steps: int = Field(default=200, ge=1)
    evaluate_sequences: int = Field(default=64, ge=0)
    tensorboard: bool = False


class TrainConfig(Strict):
    """target: as `dspark generate --model`."""

    target: str = "smollm2-135m"
    drafter: DrafterSection = DrafterSection()
    data: DataSection
    training: TrainingSection
    loss: LossSection = LossSection()
    run: RunSection

    def check(self) -> None:
        """What one field cannot tell by itself. Raises ConfigError."""
        data = self.data
        if bool(data.folders) == (data.answers is not None):
            raise ConfigError("data: give folders, or answers: one of them")
        drafter = self.drafter
        if drafter.kind in ("eagle3", "mtp") and drafter.layers != 1:
            raise ConfigError(f"drafter.layers: {drafter.layers} must be 1 for {drafter.kind}")

    @property
    def weights(self) -> Weights:
        drafter = self.drafter
        return self.loss.weights(drafter.kind, drafter.kind == "dspark" and drafter.confidence)


def read_config(path: Path) -> TrainConfig:
    """Raises ConfigError that names the file, the key, and what it must be."""
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
        config = TrainConfig.model_validate(facts)
        config.check()
        _ = config.weights
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise ConfigError(f"{path}: {'; '.join(map(_told, problems))}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def _told(problem: object) -> str:
    assert isinstance(problem, dict)
    where = ".".join(map(str, problem["loc"])) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where}: is not a known key"
    if problem["type"] == "missing":
        return f"{where}: is missing"
    return f"{where}: {problem['input']!r}: {problem['msg']}"
