"""The target of a command that makes data or measures drafters, and the words to talk to it."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.console import say
from dspark.core.errors import InvalidRequest

if TYPE_CHECKING:
    from dspark.core.drafts import Drafter
    from dspark.gateway.tokenizer import Tokenizer
    from dspark.training.prompts import Prompt


class Target:
    """A target in this process. Raises ModelError, ConfigError."""

    def __init__(self, model: str, backend: str, dtype: str, device: str, threads: int) -> None:
        from dspark.deploy.single import Progress, TargetConfig, open_backend

        # Refuses what is not one of its choices before torch is imported.
        self.config = TargetConfig(
            model, backend, dtype, device=device, drafter="none", threads=threads
        )
        import torch

        from dspark.models import load_target, resolve
        from dspark.models.drafters.target_tensors import TargetTensors

        if threads:
            torch.set_num_threads(threads)
        self.path: Path = resolve(model, progress=say)
        weights = getattr(torch, self.config.weights_dtype)
        loaded = load_target(self.path, dtype=weights, device=device)
        self.tensors = TargetTensors.of(loaded)
        # The backend takes the linear layers' weights apart: hashes before it.
        self.embedding_hash = self.tensors.embedding_hash
        self.config, self.backend = open_backend(self.config, loaded, Progress(line=say))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from dspark.gateway.tokenizer import Tokenizer

        return Tokenizer.load(self.path)

    @property
    def speaks(self) -> bool:
        """Whether there is a tokenizer: one that only takes ids needs none."""
        return (self.path / "tokenizer.json").is_file()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        if self.speaks:
            return self.tokenizer.eos_ids
        ids = json.loads((self.path / "config.json").read_text(encoding="utf-8")).get(
            "eos_token_id"
        )
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    @property
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def prompts(self, path: Path, *, skip_bad: bool) -> list[Prompt]:
        """Encoded lines of a file; what is left out is told."""
        from dspark.training.prompts import Room, read_prompts, told

        room = Room(self.vocab_size, self.backend.context_length)
        read, bad = read_prompts(path, self.tokenizer.chat, room, skip_bad=skip_bad)
        if bad:
            say(f"left out: {told(bad, most=10)}")
        return read

    def layers(self, given: str | None) -> tuple[int, ...]:
        """Layers that a drafter may read: of "1,8,14", or the usual ones. Raises InvalidRequest."""
        from dspark.training.start import usual_layers

        if given is None:
            return usual_layers(self.tensors.layers)
        try:
            chosen = tuple(sorted({int(layer) for layer in given.split(",")}))
        except ValueError:
            raise InvalidRequest("layers", given, "must be numbers, as 1,8,14,21,27") from None
        last = self.tensors.layers - 2
        if not all(-1 <= layer <= last for layer in chosen):
            raise InvalidRequest(
                "layers", given, f"must lie in [-1, {last}]: the target's last layer is not allowed"
            )
        return chosen

    def facts(self) -> dict[str, Any]:
        """What data says of the target it was made with."""
        return {
            "model": self.config.model,
            "dtype": self.config.dtype,
            "target_id": self.backend.target_id,
            "tokenizer_hash": self.tokenizer.tokenizer_hash,
            "vocab_size": self.vocab_size,
            "embedding_hash": self.embedding_hash,
        }

    def drafter(self, name: str, *, gamma: int = 7, candidates: int | None = None) -> Drafter:
        """A trained drafter by directory or hub id, with its projection loaded into the backend; or
        ngram. candidates: of its sequential head, 0 for the whole vocabulary. Raises ModelError."""
        from dspark.models.drafters import NgramDrafter
        from dspark.models.drafters.loading import load_drafter
        from dspark.models.drafters.native import NativeDraftOptions

        if name == "ngram":
            return NgramDrafter(gamma)
        drafter = load_drafter(
            name,
            self.tensors,
            target_id=self.backend.target_id,
            tokenizer_hash=self.tokenizer.tokenizer_hash if self.speaks else "",
            candidates=candidates,
            native=NativeDraftOptions.beside_target(self.backend),
            progress=say,
        )
        self.backend.load_projection(drafter.projection)
        return drafter
