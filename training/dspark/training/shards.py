"""Answers and what the target thought at each of their tokens, kept as shards of safetensors.

A folder of data is `data.json` (what it was made with) and `shard-NNNNN.safetensors`, each whole or
absent. A shard holds S sequences one after the other, N tokens, A of them answers:

    token_ids i32 [N]      prompt and answer of each sequence
    lengths   i32 [S, 2]   prompt tokens, answer tokens
    features  f16|bf16 [N, m D]  hidden states of m layers side by side; zeros at a sequence's last
                           token, which the target never ran
    top_ids   i32 [A, K]   the target's K likeliest ids where each answer token was chosen
    top_p     f16 [A, K]   their probabilities at temperature 1, falling
    tail      f32 [A]      mass of all other ids

Its `sequences` metadata is a JSON list of `Origin` and `dropped` one of (line, sample, reason).
safetensors alone, no Parquet: rows are fixed-width arrays that are read by range through mmap, and
pyarrow would be 40 MB more to install for a few labels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dspark.training.errors import DataError
from dspark.training.examples import FEATURE_DTYPES, Example, Layout, Origin, Target
from dspark.training.whole_files import read_json

FORMAT = 1
FACTS = "data.json"

# (line, sample, reason): a job that is done and gave no example.
Dropped = tuple[int, int, str]


class ShardSet:
    """The examples of a folder, read when asked for. Raises `DataError` for a damaged one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = read_json(folder / FACTS)
        if self.facts.get("format") != FORMAT:
            raise DataError(
                f"{folder}: has format {self.facts.get('format')!r}, this dspark reads {FORMAT}"
            )
        self.layout = _layout(folder, self.facts)
        self._open: list[Any] = []
        # Of each example: its shard, its first token and first answer token there.
        self._places: list[tuple[int, int, int]] = []
        self.origins: list[Origin] = []
        self.lengths: list[tuple[int, int]] = []
        for path in shard_files(folder):
            self._add(path)

    def _add(self, path: Path) -> None:
        origins, _ = read_labels(path)
        shard: Any = safe_open(path, framework="pt")
        lengths = shard.get_tensor("lengths").tolist()
        if len(lengths) != len(origins):
            raise DataError(f"{path}: has {len(lengths)} sequences and labels of {len(origins)}")
        token = answer = 0
        for prompt, answered in lengths:
            self._places.append((len(self._open), token, answer))
            token += prompt + answered
            answer += answered
        for name, rows in (("token_ids", token), ("features", token), ("top_ids", answer)):
            held = shard.get_slice(name).get_shape()[0]
            if held != rows:
                raise DataError(f"{path}: {name} has {held} rows, its lengths say {rows}")
        self._open.append(shard)
        self.origins += origins
        self.lengths += [(prompt, answered) for prompt, answered in lengths]

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, *, features: bool = True) -> Example:
        """An example by number. features: or none of their columns, which are nearly all bytes."""
        shard, token, answer = self._places[index]
        prompt, answered = self.lengths[index]
        file = self._open[shard]

        def rows(name: str, start: int, count: int) -> torch.Tensor:
            tensor: torch.Tensor = file.get_slice(name)[start : start + count]
            return tensor

        target = Target(
            rows("top_ids", answer, answered),
            rows("top_p", answer, answered),
            rows("tail", answer, answered),
        )
        return Example(
            self.origins[index],
            rows("token_ids", token, prompt + answered),
            prompt,
            rows("features", token, prompt + answered) if features else torch.empty(0),
            target,
        )


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def read_labels(path: Path) -> tuple[list[Origin], list[Dropped]]:
    """Where a shard's sequences come from, and what was dropped. Raises `DataError`."""
    try:
        with safe_open(path, framework="pt") as shard:
            labels = shard.metadata() or {}
            origins = [Origin(**origin) for origin in json.loads(labels["sequences"])]
            dropped = [(int(a), int(b), str(why)) for a, b, why in json.loads(labels["dropped"])]
    except (OSError, SafetensorError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"{path}: is damaged or cut short ({type(error).__name__}); delete it and run the "
            "command that made it again"
        ) from error
    return origins, dropped


def _layout(folder: Path, facts: dict[str, Any]) -> Layout:
    try:
        layout = Layout(**{**facts["layout"], "layer_ids": tuple(facts["layout"]["layer_ids"])})
    except (TypeError, LookupError) as error:
        raise DataError(f"{folder / FACTS}: has no layout that can be read: {error}") from error
    if layout.feature_dtype not in FEATURE_DTYPES:
        raise DataError(f"{folder / FACTS}: feature_dtype {layout.feature_dtype!r} is not known")
    return layout
