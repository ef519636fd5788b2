"""Where examples come from, which are held out, and in which order they are seen."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from dspark.training.errors import DataError
from dspark.training.examples import Example, Layout, Origin, Target
from dspark.training.prompts import Prompt
from dspark.training.reading import Reader, Text
from dspark.training.shards import ShardSet

# Lines in so many parts, of which the first few are held out.
_PARTS = 1000


class Source(Protocol):
    """Examples by number. lengths: prompt and answer tokens of each."""

    layout: Layout
    origins: list[Origin]
    lengths: list[tuple[int, int]]

    def examples(self, indices: Sequence[int], *, features: bool = True) -> list[Example]:
        """features: or none of their columns; nor, where the target would have to read for it, its
        distributions (K = 0)."""
        ...


class ShardSource:
    """Folders of shards, one after another; all of one target and layout. Raises DataError.

    layer_ids: of the kept layers those that are read, all unless given.
    """

    def __init__(self, folders: Sequence[Path], layer_ids: Sequence[int] | None = None) -> None:
        self._sets = [ShardSet(folder) for folder in folders]
        first = self._sets[0]
        for other in self._sets[1:]:
            for name in ("target_id", "layout", "vocab_size"):
                ours, theirs = first.facts.get(name), other.facts.get(name)
                if ours != theirs:
                    raise DataError(
                        f"{other.folder}: has {name} = {theirs!r}, {first.folder} has {ours!r}: "
                        "they cannot be trained on together"
                    )
        self.facts = first.facts
        kept = first.layout.layer_ids
        wanted = tuple(kept if layer_ids is None else layer_ids)
        if missing := [layer for layer in wanted if layer not in kept]:
            raise DataError(
                f"{first.folder}: has no features of layer {missing[0]}, only of {list(kept)}"
            )
        width = first.layout.width
        self.layout = replace(first.layout, layer_ids=wanted)
        self._columns = None
        if wanted != kept:
            self._columns = torch.cat(
                [torch.arange(width) + kept.index(layer) * width for layer in wanted]
            )
        self.origins = [origin for held in self._sets for origin in held.origins]
        self.lengths = [lengths for held in self._sets for lengths in held.lengths]
        self._places = [(held, i) for held in self._sets for i in range(len(held))]
        if not self._places:
            names = ", ".join(str(folder) for folder in folders)
            raise DataError(f"{names}: no answers yet; `dspark data generate` makes them")

    def examples(self, indices: Sequence[int], *, features: bool = True) -> list[Example]:
        found = []
        for held, i in (self._places[index] for index in indices):
            example = held.read(i, features=features)
            if features and self._columns is not None:
                example = replace(example, features=example.features[:, self._columns])
            found.append(example)
        return found


class TextSource:
    """Answers that are given as ids; the target reads them when they are asked for, so nothing is
    kept on disk and each epoch costs a pass of the target."""

    def __init__(self, prompts: Sequence[Prompt], reader: Reader) -> None:
        self._texts: list[Text] = []
        self.origins = []
        self.lengths = []
        self.layout = reader.layout
        self._reader = reader
        for prompt in prompts:
            if prompt.answer_ids is None:
                raise DataError(f"line {prompt.line}: has no answer_ids to train on")
            self._texts.append(([*prompt.ids, *prompt.answer_ids], len(prompt.ids)))
            self.origins.append(Origin(prompt.line, 0, prompt.domain, prompt.source))
            self.lengths.append((len(prompt.ids), len(prompt.answer_ids)))

    def examples(self, indices: Sequence[int], *, features: bool = True) -> list[Example]:
        texts = [self._texts[i] for i in indices]
        read = self._reader.read(texts) if features else map(_unread, texts)
        return [
            Example(self.origins[i], torch.tensor(ids, dtype=torch.int32), prompt, rows, target)
            for i, (ids, prompt), (rows, target) in zip(indices, texts, read, strict=True)
        ]


def _unread(text: Text) -> tuple[torch.Tensor, Target]:
    """What is known of a text without the target: no features, and all mass on ids not kept."""
    ids, prompt = text
    n = len(ids) - prompt
    nothing = torch.empty(n, 0)
    return torch.empty(0), Target(nothing.int(), nothing, torch.ones(n))


def split(source: Source, held_out: float) -> tuple[list[int], list[int]]:
    """Indices to train on, and those held out: the same lines whatever else there is, all samples
    of a line together. An answer below two tokens has no block and is in neither part."""
    train: list[int] = []
    held: list[int] = []
    for i, (origin, (_, tokens)) in enumerate(zip(source.origins, source.lengths, strict=True)):
        if tokens < 2:
            continue
        part = zlib.crc32(f"{origin.source} {origin.line}".encode()) % _PARTS
        (held if part < held_out * _PARTS else train).append(i)
    return train, held


def order(
    indices: Sequence[int], domains: Sequence[str], epoch: int, seed: int, *, balance: bool
) -> list[int]:
    """One epoch: every index once, shuffled. balance: each domain as often as the largest, whose
    smaller neighbours are begun again. A function of its arguments alone."""
    rng = np.random.default_rng([seed, epoch])
    groups: dict[str, list[int]] = {}
    for i in indices:
        groups.setdefault(domains[i] if balance else "", []).append(i)
    largest = max(map(len, groups.values()))
    taken: list[int] = []
    for _, group in sorted(groups.items()):
        rounds = -(-largest // len(group))
        walk = np.concatenate([rng.permutation(group) for _ in range(rounds)])
        taken += walk[:largest].tolist()
    return [taken[i] for i in rng.permutation(len(taken))]


def steps(
    indices: Sequence[int],
    domains: Sequence[str],
    batch: int,
    seed: int,
    *,
    balance: bool,
    first: int = 0,
) -> Iterator[list[int]]:
    """Indices of each training step from step `first` on, without end: epoch after epoch, cut into
    batches that may span two."""
    length = len(order(indices, domains, 0, seed, balance=balance))
    at = first * batch
    epoch = at // length
    walk = order(indices, domains, epoch, seed, balance=balance)
    place = at % length
    while True:
        taken: list[int] = []
        while len(taken) < batch:
            part = walk[place : place + batch - len(taken)]
            taken += part
            place += len(part)
            if place == length:
                epoch, place = epoch + 1, 0
                walk = order(indices, domains, epoch, seed, balance=balance)
        yield taken


def read_ahead(
    source: Source, batches: Iterator[list[int]], own: slice
) -> Iterator[tuple[list[int], list[Example]]]:
    """Each batch of indices with the examples that `own` picks of it, read from disk while the last
    one is worked on: shards may be larger than memory. A source that computes its examples does so
    in turn."""
    if not isinstance(source, ShardSource):
        for batch in batches:
            yield batch, source.examples(batch[own])
        return
    with ThreadPoolExecutor(1, "reading") as pool:
        batch = next(batches)
        reading = pool.submit(_read, source, batch[own])
        for following in batches:
            ready = batch, reading.result()
            batch, reading = following, pool.submit(_read, source, following[own])
            yield ready


def _read(source: Source, indices: Sequence[int]) -> list[Example]:
    """In memory, not mapped to be read when it is first looked at."""
    return [
        replace(
            example,
            token_ids=example.token_ids.clone(),
            features=example.features.clone(),
            target=Target(*(getattr(example.target, f.name).clone() for f in fields(Target))),
        )
        for example in source.examples(indices)
    ]
