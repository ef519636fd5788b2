"""From a configuration to what a run needs: its data, its drafter, its target's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.core.errors import ConfigError
from dspark.models import load_target, resolve
from dspark.models.drafters.checkpoint import TargetFacts
from dspark.models.drafters.config import DrafterConfig
from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.models.drafters.kinds import new_drafter
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import Trunk
from dspark.training.config import DrafterSection, TrainConfig
from dspark.training.draft_vocabulary import choose_vocabulary
from dspark.training.errors import DataError
from dspark.training.examples import Layout
from dspark.training.initial import begin_as
from dspark.training.prompts import Room, read_prompts
from dspark.training.reading import Reader
from dspark.training.sources import ShardSource, Source, TextSource, split
from dspark.training.warm_start import warm_start

# Of a target, layers that are read where nobody says: as many as the public configurations have.
LAYERS_READ = 5
# Ids kept of each distribution. The default model's hold 0.97 of its mass at temperature 1.
TOP_K = 64
# Answers whose features say how large queries and keys are.
_SIZING = 8


@dataclass(frozen=True)
class Data:
    """source: all examples; train, held_out: indices into it. facts: what the folders say of their
    target, empty for answers that are read here."""

    source: Source
    train: list[int]
    held_out: list[int]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class TargetModel:
    """path: its checkpoint. sizes: its text configuration."""

    name: str
    path: Path
    tensors: TargetTensors
    sizes: Any

    @classmethod
    def find(cls, name: str) -> TargetModel:
        """Raises ModelError."""
        from transformers import AutoConfig

        path = resolve(name)
        sizes = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        return cls(name, path, TargetTensors.read(path), sizes)

    def facts(self, data: Mapping[str, Any]) -> TargetFacts:
        return TargetFacts(
            self.name,
            str(data.get("target_id", "")),
            str(data.get("tokenizer_hash", "")),
            self.tensors.embedding_hash,
            self.tensors.head_hash,
        )


def usual_layers(layers: int) -> tuple[int, ...]:
    """LAYERS_READ target layers, spread as the public configurations spread them: from the second
    to the third from the top."""
    lowest, highest = min(1, layers - 2), max(layers - 3, 0)
    step = (highest - lowest) / (LAYERS_READ - 1)
    return tuple(sorted({round(lowest + i * step) for i in range(LAYERS_READ)}))


def open_data(config: TrainConfig, target: TargetModel) -> Data:
    """Raises DataError for data of another target, with both values."""
    section = config.data
    source: ShardSource | TextSource
    if section.answers is None:
        source = ShardSource([Path(f) for f in section.folders], config.drafter.layer_ids)
        facts = source.facts
        _check_target(section.folders[0], facts, target)
    else:
        source, facts = _given_answers(config, target), {}
    train, held_out = split(source, section.held_out)
    if not train:
        raise DataError(f"data: none of {len(source.lengths)} answers is left to train on")
    return Data(source, train, held_out, facts)


def _check_target(folder: str, facts: Mapping[str, Any], target: TargetModel) -> None:
    tensors = target.tensors
    layout = facts.get("layout", {})
    for name, theirs, ours in (
        ("vocabulary", facts.get("vocab_size"), tensors.vocab_size),
        ("width", layout.get("width"), tensors.hidden_size),
        ("embedding", facts.get("embedding_hash"), tensors.embedding_hash),
    ):
        if theirs != ours:
            raise DataError(
                f"{folder}: was made with another target: its {name} is {theirs!r}, that of "
                f"{target.name} is {ours!r}"
            )


def _given_answers(config: TrainConfig, target: TargetModel) -> TextSource:
    from dspark.models.targets.transformers import TransformersBackend

    def no_chat(_: object) -> tuple[int, ...]:
        raise DataError("answers to train on need prompt_ids, not prompts")

    backend = TransformersBackend(load_target(target.path, dtype=torch.float32, device="cpu"))
    room = Room(backend.vocab_size, backend.context_length)
    path = Path(config.data.answers or "")
    prompts, _ = read_prompts(path, no_chat, room)
    ids = config.drafter.layer_ids or usual_layers(target.tensors.layers)
    top_k = min(TOP_K, backend.vocab_size)
    layout = Layout(tuple(ids), target.tensors.hidden_size, top_k)
    longest = max(len(p.ids) + len(p.answer_ids or ()) for p in prompts)
    kv_tokens = max(16_384, longest + backend.block_size)
    return TextSource(prompts, Reader(backend, layout, kv_tokens=kv_tokens))


def drafter_config(section: DrafterSection, data: Data, target: TargetModel) -> DrafterConfig:
    """The sizes are the target's. Raises ConfigError."""
    sizes, tensors = target.sizes, target.tensors
    parallel = section.kind in ("dspark", "dflash")
    head = section.head if section.kind == "dspark" else "none"
    confidence = section.kind == "dspark" and section.confidence
    if section.draft_vocab > tensors.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab: {section.draft_vocab} is above the target's {tensors.vocab_size}"
        )
    rope = getattr(sizes, "rope_parameters", None) or {}
    return DrafterConfig(
        kind=section.kind,
        gamma=1 if section.kind == "mtp" else section.gamma,
        vocab_size=tensors.vocab_size,
        hidden_size=tensors.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=section.layers,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        head_dim=getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads,
        target_layer_ids=data.source.layout.layer_ids,
        target_layers=tensors.layers,
        mask_token_id=section.mask_token_id if parallel else 0,
        head=head,
        rank=0 if head == "none" else section.rank,
        confidence=confidence,
        confidence_reads_prev=head != "none",
        # A draft vocabulary of all ids is none.
        draft_vocab_size=section.draft_vocab % tensors.vocab_size,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        rms_norm_eps=float(sizes.rms_norm_eps),
        embed_scale=tensors.embed_scale,
        logit_softcap=tensors.logit_softcap,
        max_positions=int(sizes.max_position_embeddings),
    )


def first_drafter(config: TrainConfig, data: Data, target: TargetModel) -> tuple[Trunk, float]:
    """The drafter at step 0, and which share of the answers its vocabulary covers."""
    source, train = data.source, data.train
    shape = drafter_config(config.drafter, data, target)
    vocabulary, coverage = None, 1.0
    if shape.draft_vocab_size:
        chosen = choose_vocabulary(
            _one_by_one(source, train), shape.draft_vocab_size, shape.vocab_size, _ends(target)
        )
        vocabulary, coverage = chosen.vocabulary, chosen.coverage
    drafter = _new(shape, target, vocabulary, config.training.seed)
    if config.drafter.initial is not None:
        begin_as(drafter, resolve(config.drafter.initial), target.tensors)
    elif config.drafter.warm_start:
        warm_start(drafter, target.path, source.examples(train[:_SIZING]))
    return drafter, coverage


def _new(
    shape: DrafterConfig, target: TargetModel, vocabulary: DraftVocabulary | None, seed: int
) -> Trunk:
    generator = torch.Generator().manual_seed(seed)
    return new_drafter(shape, target.tensors, vocabulary, generator=generator)


def _one_by_one(source: Source, indices: Sequence[int]) -> Any:
    for i in indices:
        yield from source.examples([i], features=False)


def _ends(target: TargetModel) -> tuple[int, ...]:
    """Ids that end an answer, which a drafter has to be able to say."""
    eos = getattr(target.sizes, "eos_token_id", None)
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
