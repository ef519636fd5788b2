"""What a drafter takes from its target: embedding, LM head, and how the target scales and caps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark.core.errors import ModelError
from dspark.models.checkpoint import check_checkpoint, summary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = 8192


@dataclass(frozen=True)
class TargetTensors:
    """embedding, head: [V, D], any float dtype. embed_scale: factor on embeddings. logit_softcap:
    of its logits. layers: its decoder layers."""

    embedding: torch.Tensor
    head: torch.Tensor
    embed_scale: float
    logit_softcap: float | None
    layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetTensors:
        """Of a loaded target, shared with it. Take them before a backend repacks its layers."""
        config = model.config.get_text_config()
        head = getattr(model.get_output_embeddings(), "weight", None)
        if head is None:
            raise ModelError("the target's LM head is repacked already: take its tensors before")
        return cls._of(config, model.get_input_embeddings().weight.detach(), head.detach())

    @classmethod
    def read(cls, directory: Path) -> TargetTensors:
        """From a target's checkpoint, without loading the rest of it. Raises ModelError."""
        from safetensors import safe_open
        from transformers import AutoConfig, AutoModelForCausalLM

        check_checkpoint(directory)
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config.get_text_config())
        except Exception as error:  # a strange configuration ends in whatever its code runs into
            raise ModelError(f"{directory}: cannot be read: {summary(error)}") from error
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        found: dict[str, torch.Tensor] = {}
        wanted = {
            part: names[id(layer.weight)]
            for part, layer in (
                ("embedding", model.get_input_embeddings()),
                ("head", model.get_output_embeddings()),
            )
        }
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                held = set(tensors.keys())
                for part, name in wanted.items():
                    if name in held:
                        found[part] = tensors.get_tensor(name)
        if getattr(config.get_text_config(), "tie_word_embeddings", False):
            found.setdefault("head", found.get("embedding", torch.empty(0)))
        if missing := sorted(set(wanted) - set(found)):
            raise ModelError(f"{directory}: lacks the tensor {wanted[missing[0]]}")
        return cls._of(config.get_text_config(), found["embedding"], found["head"])

    @classmethod
    def _of(cls, config: Any, embedding: torch.Tensor, head: torch.Tensor) -> TargetTensors:
        """All Gemmas, and of what is served only they, scale embeddings by √D."""
        scaled = str(config.model_type).startswith("gemma")
        return cls(
            embedding,
            head,
            embed_scale=float(config.hidden_size) ** 0.5 if scaled else 1.0,
            logit_softcap=getattr(config, "final_logit_softcapping", None),
            layers=int(config.num_hidden_layers),
        )

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @cached_property
    def embedding_hash(self) -> str:
        return tensor_hash(self.embedding)

    @cached_property
    def head_hash(self) -> str:
        return tensor_hash(self.head)


def tensor_hash(tensor: torch.Tensor) -> str:
    """Of shape and values rounded to bfloat16, so that a target is the same in both precisions."""
    digest = hashlib.blake2b(repr(tuple(tensor.shape)).encode(), digest_size=8)
    for rows in torch.split(tensor.detach(), _ROWS):
        digest.update(rows.bfloat16().contiguous().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()
