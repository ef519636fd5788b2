"""What a trained drafter looks like: one frozen configuration for all kinds, checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import ConfigError

# Trained kinds. `dspark` and `dflash` propose a whole block in one pass, `eagle3` and `mtp` token
# by token. (`ngram` and `none` have no weights.)
PARALLEL_KINDS = ("dspark", "dflash")
KINDS = (*PARALLEL_KINDS, "eagle3", "mtp")
# Sequential heads (§3.1): eq. 5, the public code's gated form of it, eq. 6.
HEADS = ("none", "vanilla", "gated", "rnn")

_SIZES = (
    "gamma",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "target_layers",
    "max_positions",
    "window",
)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shapes of one drafter; its layers are Qwen3's whatever the target. Raises ConfigError.

    gamma: tokens of its block. vocab_size: V of the target. hidden_size: d, also the target's D,
    since embedding and LM head are the target's. target_layer_ids: m layers it reads, i = output of
    decoder layer i, -1 = embeddings, of target_layers layers, never the last. mask_token_id: what
    stands at block positions after the anchor (parallel kinds). head, rank: sequential head and
    its r. confidence_reads_prev: the confidence head reads [h; W1[prev]] (eq. 7), else h alone.
    draft_vocab_size: ids it can propose, 0 = all of V. embed_scale: factor on embeddings (Gemma's
    √D). logit_softcap: of base logits, as the target's. max_positions: its rotary range. window:
    context positions before the anchor that it reads when it drafts.
    """

    kind: str
    gamma: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...]
    target_layers: int
    mask_token_id: int = 0
    head: str = "none"
    rank: int = 0
    confidence: bool = False
    confidence_reads_prev: bool = True
    draft_vocab_size: int = 0
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    max_positions: int = 8192
    window: int = 4096

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KINDS)
        _one_of("head", self.head, HEADS)
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.gamma > MAX_GAMMA:
            raise ConfigError(f"gamma: {self.gamma} is above {MAX_GAMMA}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"num_heads: {self.num_heads} must be a multiple of num_kv_heads = "
                f"{self.num_kv_heads}, and head_dim = {self.head_dim} even"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id: {self.mask_token_id} is not an id of the vocabulary "
                f"[0, {self.vocab_size})"
            )
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size: {self.draft_vocab_size} must be in [0, {self.vocab_size}]"
            )
        for name in ("rope_theta", "rms_norm_eps", "embed_scale", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}: {value} must be a number above 0")
        self._check_layer_ids()
        self._check_heads()

    def _check_layer_ids(self) -> None:
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            raise ConfigError(f"target_layer_ids: {list(ids)} must be growing, and not empty")
        if ids[0] < -1 or ids[-1] > self.target_layers - 2:
            raise ConfigError(
                f"target_layer_ids: {list(ids)} must lie in [-1, {self.target_layers - 2}]: the "
                f"target has {self.target_layers} layers, the last one is not allowed"
            )

    def _check_heads(self) -> None:
        if (self.head == "none") != (self.rank == 0) or self.rank < 0:
            raise ConfigError(f"rank: {self.rank} does not go with head = {self.head!r}")
        if self.kind != "dspark" and (self.head != "none" or self.confidence):
            raise ConfigError(
                f"kind: {self.kind!r} has no sequential and no confidence head, but head = "
                f"{self.head!r}, confidence = {self.confidence}"
            )
        if self.confidence and self.confidence_reads_prev and self.head == "none":
            raise ConfigError("confidence_reads_prev: needs a sequential head, whose W1 it reads")
        if self.kind == "mtp" and self.gamma != 1:
            raise ConfigError(f"gamma: {self.gamma} must be 1: mtp is a one-token head")
        if self.kind in ("eagle3", "mtp") and self.num_layers != 1:
            raise ConfigError(f"num_layers: {self.num_layers} must be 1 for {self.kind}")

    @property
    def parallel(self) -> bool:
        """Whether the block comes from one pass."""
        return self.kind in PARALLEL_KINDS

    @property
    def draft_vocab(self) -> int:
        """Ids it can propose."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**facts, "target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> DrafterConfig:
        """Strict: an unknown, missing or wrongly typed key raises ConfigError naming it."""
        known = {field.name: field for field in fields(cls)}
        if unknown := sorted(set(facts) - set(known)):
            raise ConfigError(f"{unknown[0]}: is not a key of a drafter's configuration")
        values: dict[str, Any] = {}
        for name, field in known.items():
            if name not in facts:
                if field.default is not MISSING:
                    continue
                raise ConfigError(f"{name}: is missing")
            values[name] = _typed(name, facts[name], str(field.type))
        return cls(**values)


def _typed(name: str, value: Any, kind: str) -> Any:
    """A JSON value as what the annotation of its field asks for."""
    plain = {"str": str, "bool": bool, "int": int}
    if kind in plain and type(value) is plain[kind]:
        return value
    if kind.startswith("float") and type(value) in (int, float):
        return float(value)
    if kind.endswith("None") and value is None:
        return None
    is_list = kind.startswith("tuple") and isinstance(value, list | tuple)
    if is_list and all(type(item) is int for item in value):
        return tuple(value)
    raise ConfigError(f"{name}: {value!r} is not a {kind}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is not one of: {', '.join(choices)}")
