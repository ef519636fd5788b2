"""A row is bit-equal whatever shares its step, however its text is cut, by any threads, from
weights of the process's own or mapped ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from dspark.models.targets.backend import RaggedBatch
from dspark.models.targets.native import NativeBackend, NativeOptions, Shelf

from ..tiny import VOCABULARY, Ids, text, tiny_model
from .walks import Lane, one_by_one, projection, step

TEXTS = 12
LENGTH = 290  # three partitions of 128 keys


@dataclass(frozen=True)
class Kind:
    """A model and what its kernels compute in."""

    family: str
    precision: str
    kv: str
    kernels: str | None = None

    def backend(
        self, threads: int, block_size: int = 16, shelf: Shelf | None = None
    ) -> NativeBackend:
        options = NativeOptions(self.precision, self.kv, threads, self.kernels, shelf=shelf)
        backend = NativeBackend(tiny_model(self.family), block_size, options)
        backend.load_projection(projection(backend.shape.width))
        return backend


class Alone:
    """What a kind says of each text when it is decoded alone on one thread, its weights packed for
    itself; those of the tests are mapped from `shelf`."""

    def __init__(self, kind: Kind, shelf: Shelf) -> None:
        self.kind = kind
        self.shelf = shelf
        self.texts = [text(LENGTH, seed) for seed in range(TEXTS)]

    @cached_property
    def said(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        backend = self.kind.backend(threads=1)
        return [one_by_one(backend, ids) for ids in self.texts]


KINDS = [
    Kind("llama", "float32", "float32"),
    Kind("qwen2", "int8", "float16"),  # biases, windows
    Kind("qwen3", "float32", "float16", "portable"),  # norms of queries and keys, tied head
    Kind("mistral", "int8", "float32", "portable"),
]


@pytest.fixture(
    scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, vars(kind).values()))
)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(request.param, Shelf(tmp_path_factory.mktemp("shelf")))


def check(alone: Alone, threads: int, block_size: int, lanes: list[list[int]], seed: int) -> None:
    """lanes: each its cuts. A lane takes its next run in a step or stands back; behind the run come
    a few wrong tokens, as of a draft, whose rows nobody looks at."""
    draw = random.Random(seed)
    backend = alone.kind.backend(threads, block_size, alone.shelf)
    assert backend.shares_weights
    blocks = len(lanes) * -(-(LENGTH + 4) // block_size)
    backend.allocate(blocks)
    free = draw.sample(range(blocks), blocks)
    left = [
        (Lane(alone.texts[i % TEXTS]), i % TEXTS, list(pairwise([0, *cuts])))
        for i, cuts in enumerate(lanes)
    ]
    while left:
        turn = [one for one in left if draw.random() < 0.7] or left[:1]
        runs: list[tuple[Lane, Ids]] = []
        for lane, _, cuts in turn:
            begin, end = cuts[0]
            drafted = tuple((id + 1) % VOCABULARY for id in lane.ids[: draw.choice([0, 0, 4])])
            runs.append((lane, (*lane.ids[begin:end], *drafted)))
        for (lane, number, cuts), (logits, features) in zip(
            turn, step(backend, runs, free), strict=True
        ):
            begin, end = cuts.pop(0)
            want_logits, want_features = alone.said[number]
            assert torch.equal(logits[: end - begin], want_logits[begin:end])
            assert torch.equal(features[: end - begin], want_features[begin:end])
            lane.done = end
        left = [one for one in left if one[2]]


cuts = st.sets(st.integers(1, LENGTH), min_size=1, max_size=5).map(sorted)


@given(
    threads=st.integers(1, 2),
    block_size=st.sampled_from([4, 16, 32]),
    lanes=st.lists(cuts, min_size=1, max_size=8),
    seed=st.integers(0, 999),
)
@settings(max_examples=5, deadline=None)
def test_any_company(
    alone: Alone, threads: int, block_size: int, lanes: list[list[int]], seed: int
) -> None:
    check(alone, threads, block_size, lanes, seed)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sixty_four_sequences(alone: Alone, threads: int) -> None:
    draw = random.Random(threads)
    lanes = [sorted(draw.sample(range(1, 200), 3)) for _ in range(64)]
    check(alone, threads, 16, lanes, threads)


def test_a_long_prompt_whole_and_in_pieces(alone: Alone) -> None:
    check(alone, 2, 16, [[LENGTH], [1, LENGTH], [128, 129, LENGTH], [127, 256, LENGTH]], 0)


def test_every_number_of_rows(alone: Alone) -> None:
    """Rows are cut into tiles by their number; each cut has code of its own."""
    backend = alone.kind.backend(threads=2, shelf=alone.shelf)
    backend.allocate(40)
    free, lanes = list(range(40)), [Lane(alone.texts[i % TEXTS]) for i in range(40)]
    step(backend, [(lane, lane.ids[:9]) for lane in lanes], free)
    for lane in lanes:
        lane.done = 9
    for rows in range(1, 41):
        said = step(backend, [(lane, lane.ids[9:10]) for lane in lanes[:rows]], free)
        for i, (logits, features) in enumerate(said):
            assert torch.equal(logits[0], alone.said[i % TEXTS][0][9])
            assert torch.equal(features[0], alone.said[i % TEXTS][1][9])


@pytest.mark.parametrize(("precision", "close"), [("float32", 1e-5), ("int8", 0.02)])
def test_features_are_the_projection_of_the_layers_that_it_reads(
    precision: str, close: float
) -> None:
    """What int8 costs them: groups of 32 in 8 bits, here and of the matrix, are each off by up to
    1/254 of their largest."""
    backend = Kind("llama", precision, "float32").backend(threads=2)
    whole = projection(backend.shape.width)
    layers = replace(whole, weight=None, norm_weight=None)
    backend.load_projection(layers)
    backend.allocate(2)
    every = np.arange(12, dtype=np.int32)
    out = backend.forward(
        RaggedBatch(
            token_ids=every + 5,
            positions=every,
            query_start=np.array([0, 12], np.int32),
            context_len=np.zeros(1, np.int32),
            block_table=np.arange(2, dtype=np.int32)[None],
            logit_rows=every[:0],
            feature_rows=every,
        )
    )
    assert whole.weight is not None
    projected = out.features[layers.feature_id] @ whole.weight.T
    want = functional.rms_norm(projected, (24,), whole.norm_weight, whole.eps)
    off = (out.features[whole.feature_id] - want).norm(dim=1) / want.norm(dim=1)
    assert float(off.max()) < close
