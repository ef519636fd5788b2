"""Checkpoints of trained drafters: ours, and the public DeepSpec format.

Ours is config.json, model.safetensors and perhaps calibration.json. It leaves the frozen embedding
and LM head to the target unless asked otherwise, and carries the draft vocabulary, the feature_id
and what is known of its training. Ids are checked on loading, so parts of two checkpoints never
pass for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.core.errors import ConfigError, ModelError
from dspark.core.plans import CalibrationTable
from dspark.models.drafters import deepspec
from dspark.models.drafters.calibration_file import read_calibration
from dspark.models.drafters.checkpoint_files import (
    CONFIG,
    Tensors,
    check_tensors,
    content_hash,
    read_files,
    write_files,
)
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.kinds import check_target, empty_drafter, take_target_tensors
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import TARGET_TENSORS, Trunk
from dspark.models.targets.features import FeatureProjection

MODEL_TYPE = "dspark_drafter"
VERSION = 1
VOCABULARY = "draft_vocabulary.ids"
_KEYS = {
    "model_type",
    "version",
    "drafter_id",
    "drafter",
    "target",
    "feature_id",
    "holds_target_tensors",
    "training",
}


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Which target a drafter was made for; "" where nobody said."""

    name: str = ""
    target_id: str = ""
    tokenizer_hash: str = ""
    embedding_hash: str = ""
    head_hash: str = ""


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A loaded drafter. model: float32, on the CPU. drafter_id: kind and hash of configuration and
    tensors. calibration: by mode, for that drafter_id. training: free facts."""

    model: Trunk
    drafter_id: str
    target: TargetFacts = TargetFacts()
    calibration: tuple[CalibrationTable, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> DrafterConfig:
        return self.model.config


def load_checkpoint(directory: Path, target: TargetTensors | None = None) -> DrafterCheckpoint:
    """Read either format. target: gives what the checkpoint leaves out, and is checked against it.

    Raises ModelError for files that are missing, damaged or cut short, tensors that are missing,
    unknown or of another shape, and a target it was not made for; with both values.
    """
    facts, tensors = read_files(directory)
    try:
        ours = facts.get("model_type") == MODEL_TYPE
        return (_load_ours if ours else _load_deepspec)(directory, facts, tensors, target)
    except ConfigError as error:
        raise ModelError(f"{directory}: {error}") from error


def save_checkpoint(
    directory: Path,
    model: Trunk,
    target: TargetFacts = TargetFacts(),
    *,
    training: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    with_target_tensors: bool = False,
    replace: bool = False,
) -> str:
    """Write our format, whole or not at all; its drafter_id. dtype: of the tensors in the file.

    Raises ModelError.
    """
    own = _own_tensors(model)
    check_tensors(directory, own, _shapes(model, with_target_tensors=False))
    if with_target_tensors:
        own |= {name: model.get_parameter(name) for name in TARGET_TENSORS}
    elif not (target.embedding_hash and target.head_hash):
        raise ModelError(
            f"{directory}: leaves out embedding and LM head, so their hashes must be given"
        )
    stored: Tensors = {name: tensor.detach().to(dtype) for name, tensor in own.items()}
    config = model.config.to_dict()
    norm = "hidden_norm.weight" if model.feature_norm() is not None else None
    projection = FeatureProjection(
        model.config.target_layer_ids,
        stored["fc.weight"].float(),
        None if norm is None else stored[norm].float(),
        model.config.rms_norm_eps,
    )
    if not model.vocabulary.is_whole:
        stored[VOCABULARY] = torch.from_numpy(model.vocabulary.ids).int()
    drafter_id = f"{model.config.kind}-{content_hash(config, stored)}"
    facts = {
        "model_type": MODEL_TYPE,
        "version": VERSION,
        "drafter_id": drafter_id,
        "drafter": config,
        "target": asdict(target),
        "feature_id": projection.feature_id,
        "holds_target_tensors": with_target_tensors,
        "training": dict(training or {}),
    }
    write_files(directory, facts, stored, replace=replace)
    return drafter_id


def export_deepspec(
    directory: Path,
    checkpoint: DrafterCheckpoint,
    target: TargetTensors | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    replace: bool = False,
) -> None:
    """Write the public format. target: needed for a reduced draft vocabulary, whose LM head is not
    whole. Raises ModelError, also for what the format cannot say."""
    model = checkpoint.model
    try:
        facts = deepspec.write_config(model.config)
    except ConfigError as error:
        raise ModelError(f"{directory}: {error}") from error
    if model.vocabulary.is_whole:
        head = model.lm_head.weight
    elif target is not None:
        head = target.head
    else:
        raise ModelError(
            f"{directory}: the LM head has {len(model.vocabulary)} of {model.config.vocab_size} "
            "rows; give the target, which has the rest"
        )
    own = _own_tensors(model)
    check_tensors(directory, own, _shapes(model, with_target_tensors=False))
    tensors = deepspec.write_tensors(own, model.vocabulary, head)
    tensors["embed_tokens.weight"] = model.embed_tokens.weight
    stored = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
    write_files(
        directory,
        facts | {"dtype": str(dtype).removeprefix("torch.")},
        stored,
        replace=replace,
    )


def _load_ours(
    directory: Path, facts: Mapping[str, Any], tensors: Tensors, target: TargetTensors | None
) -> DrafterCheckpoint:
    if facts.get("version") != VERSION:
        raise ModelError(
            f"{directory}: is of version {facts.get('version')!r}, this dspark reads {VERSION}"
        )
    if wrong := sorted(set(facts) ^ _KEYS):
        missing = wrong[0] in _KEYS
        raise ConfigError(f"{wrong[0]}: is {'missing' if missing else 'not a known key'}")
    config = DrafterConfig.from_dict(_mapping(facts, "drafter"))
    made_for = _target_facts(_mapping(facts, "target"))
    found_id = f"{config.kind}-{content_hash(config.to_dict(), tensors)}"
    if found_id != facts["drafter_id"]:
        raise ModelError(
            f"{directory}: {CONFIG} is of {facts['drafter_id']!r}, its tensors make {found_id!r}"
        )
    tensors, vocabulary = dict(tensors), None
    if config.draft_vocab_size:
        ids = tensors.pop(VOCABULARY, None)
        if ids is None or ids.dtype != torch.int32 or ids.ndim != 1:
            raise ModelError(f"{directory}: {VOCABULARY} is not there as int32 [Vd]")
        vocabulary = DraftVocabulary(ids.long().numpy(), config.vocab_size)
    model = empty_drafter(config, vocabulary)
    holds = facts["holds_target_tensors"] is True
    check_tensors(directory, tensors, _shapes(model, with_target_tensors=holds))
    if target is not None:
        check_target(config, target)
        _check_hashes(directory, made_for, target)
    values = {name: tensor.float() for name, tensor in tensors.items()}
    if not holds:
        if target is None:
            raise ModelError(
                f"{directory}: leaves embedding and LM head to its target "
                f"{made_for.name or 'model'!r}; give that"
            )
        values |= take_target_tensors(model, target)
    _fill(model, values)
    if (feature_id := model.projection().feature_id) != facts["feature_id"]:
        raise ModelError(
            f"{directory}: feature_id {facts['feature_id']!r}, its tensors make {feature_id!r}"
        )
    calibration = read_calibration(directory, found_id)
    return DrafterCheckpoint(
        model, found_id, made_for, calibration, dict(_mapping(facts, "training"))
    )


def _load_deepspec(
    directory: Path, facts: Mapping[str, Any], tensors: Tensors, target: TargetTensors | None
) -> DrafterCheckpoint:
    config = deepspec.read_config(facts)
    model = empty_drafter(config)
    check_tensors(directory, tensors, _shapes(model, with_target_tensors=True))
    if target is not None:
        check_target(config, target)
    _fill(model, {name: tensor.float() for name, tensor in tensors.items()})
    own = {name: tensor for name, tensor in tensors.items() if name not in TARGET_TENSORS}
    drafter_id = f"{config.kind}-{content_hash(config.to_dict(), own)}"
    return DrafterCheckpoint(model, drafter_id, calibration=read_calibration(directory, drafter_id))


def _fill(model: Trunk, values: Tensors) -> None:
    model.load_state_dict(values, assign=True)
    model.eval().requires_grad_(False)


def _own_tensors(model: Trunk) -> Tensors:
    return {n: t for n, t in model.state_dict().items() if n not in TARGET_TENSORS}


def _shapes(model: Trunk, *, with_target_tensors: bool) -> dict[str, torch.Size]:
    """Of all tensors that a checkpoint of this model holds."""
    whole = empty_drafter(model.config, model.vocabulary).state_dict()
    return {
        name: tensor.shape
        for name, tensor in whole.items()
        if with_target_tensors or name not in TARGET_TENSORS
    }


def _check_hashes(directory: Path, made_for: TargetFacts, target: TargetTensors) -> None:
    for part, ours, theirs in (
        ("embedding", made_for.embedding_hash, target.embedding_hash),
        ("LM head", made_for.head_hash, target.head_hash),
    ):
        if ours and ours != theirs:
            raise ModelError(
                f"{directory}: was made for a target ({made_for.name or 'unnamed'}) whose {part} "
                f"has the hash {ours}, this target's has {theirs}"
            )


def _target_facts(facts: Mapping[str, Any]) -> TargetFacts:
    wanted: Sequence[str] = TargetFacts.__slots__
    if set(facts) != set(wanted) or not all(isinstance(v, str) for v in facts.values()):
        raise ConfigError(f"target: {dict(facts)} must have the texts {', '.join(wanted)}")
    return TargetFacts(**facts)


def _mapping(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts[name]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: {value!r} is not an object")
    return value
