"""Adding to a folder of shards: whole files, and settings that stay what they were."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dspark.training.errors import DataError
from dspark.training.examples import FEATURE_DTYPES, Example, Layout
from dspark.training.shards import FACTS, FORMAT, Dropped, read_labels, shard_files
from dspark.training.whole_files import read_json, whole_file, write_json


class ShardWriter:
    """Adds examples to a folder; `flush` and every `shard_tokens` tokens make a shard.

    facts: what the folder is made with, JSON. A folder made with other facts is refused with both
    values, but for the names in `may_differ`. done: jobs (line, sample) of the shards that were
    there. Raises `DataError`.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        facts: dict[str, Any],
        *,
        shard_tokens: int = 16_384,
        may_differ: Iterable[str] = (),
    ) -> None:
        self.folder = folder
        self.layout = layout
        self.shard_tokens = shard_tokens
        self._examples: list[Example] = []
        self._dropped: list[Dropped] = []
        self._tokens = 0
        whole = {"format": FORMAT, "layout": _as_json(layout), **facts}
        file = folder / FACTS
        if file.exists():
            check_facts(folder, read_json(file), whole, may_differ)
        write_json(file, whole)
        self._number, self.done = 0, set[tuple[int, int]]()
        for path in shard_files(folder):
            self._number = int(path.stem.removeprefix("shard-")) + 1
            origins, dropped = read_labels(path)
            self.done |= {(origin.line, origin.sample) for origin in origins}
            self.done |= {(line, sample) for line, sample, _ in dropped}

    def add(self, example: Example) -> None:
        self._examples.append(example)
        self._tokens += len(example.token_ids)
        if self._tokens >= self.shard_tokens:
            self.flush()

    def drop(self, line: int, sample: int, reason: str) -> None:
        """Remember that a job is done although nothing came of it."""
        self._dropped.append((line, sample, reason))

    def flush(self) -> None:
        """Write what is held as one shard; nothing if nothing is held."""
        if not self._examples and not self._dropped:
            return
        path = self.folder / f"shard-{self._number:05d}.safetensors"
        _write(path, self.layout, self._examples, self._dropped)
        self._number += 1
        self._examples, self._dropped, self._tokens = [], [], 0


def check_facts(
    folder: Path, held: dict[str, Any], asked: dict[str, Any], may_differ: Iterable[str] = ()
) -> None:
    """Raise `DataError` naming the first fact that differs, with both values."""
    free = set(may_differ)
    for name in sorted({*held, *asked} - free):
        if held.get(name) != asked.get(name):
            raise DataError(
                f"{folder}: was made with {name} = {held.get(name)!r}, now it is "
                f"{asked.get(name)!r}; go on with the same, or choose another folder"
            )


def _write(
    path: Path, layout: Layout, examples: Sequence[Example], dropped: Sequence[Dropped]
) -> None:
    dtype = FEATURE_DTYPES[layout.feature_dtype]
    K, width = layout.top_k, layout.feature_width

    def rows(parts: list[torch.Tensor], empty: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        joined = torch.cat(parts) if parts else torch.empty(empty)
        return joined.to(kind).contiguous()

    features = rows([e.features for e in examples], (0, width), dtype)
    if not torch.isfinite(features).all():
        raise DataError(
            f"{path}: a hidden state does not fit {layout.feature_dtype}: use bfloat16 features"
        )
    targets = [e.target for e in examples]
    lengths = [[e.prompt_tokens, e.answer_tokens] for e in examples]
    tensors = {
        "token_ids": rows([e.token_ids for e in examples], (0,), torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32).reshape(-1, 2),
        "features": features,
        "top_ids": rows([t.top_ids for t in targets], (0, K), torch.int32),
        "top_p": rows([t.top_p for t in targets], (0, K), torch.float16),
        "tail": rows([t.tail for t in targets], (0,), torch.float32),
    }
    labels = {
        "sequences": json.dumps([asdict(e.origin) for e in examples]),
        "dropped": json.dumps(list(dropped)),
    }
    with whole_file(path) as partial:
        try:
            save_file(tensors, partial, metadata=labels)
        except SafetensorError as error:  # wraps what the system said of a write
            raise _as_os_error(error) from error


def _as_os_error(error: SafetensorError) -> OSError:
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found[1]) if found else 0, str(error))


def _as_json(layout: Layout) -> dict[str, Any]:
    return {**asdict(layout), "layer_ids": list(layout.layer_ids)}
