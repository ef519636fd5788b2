"""What every target backend promises (interfaces.md, Backend), held against transformers itself.

A backend joins by one line in BACKENDS. The truth is the same model, run by transformers over whole
texts at once, without any cache. Tests ask for logits and features of every row that they run, and
`Stepper.check` compares them all.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from dspark.core.config import EngineConfig
from dspark.core.drafts import Draft, DrafterCard, DraftRequest, NeedContext
from dspark.core.errors import ModelError
from dspark.core.requests import Committed, Finished, Request, Speculation, Usage
from dspark.core.sampling import SamplingParams
from dspark.models.targets.attention import PaddedAttention
from dspark.models.targets.backend import Backend, RaggedBatch
from dspark.models.targets.features import FeatureProjection
from dspark.models.targets.kv import PagedKV
from dspark.models.targets.native import NativeBackend
from dspark.models.targets.native.decoder import MODEL_TYPES
from dspark.models.targets.transformers import TransformersBackend
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.verifier.engine import Engine

from .tiny import (
    FAMILIES,
    TOLERANCE,
    VOCABULARY,
    WINDOW,
    Ids,
    greedy,
    text,
    tiny_model,
    truths,
)


@dataclass(frozen=True)
class Contender:
    """build: a model and a block size -> the backend, which may keep and change the model."""

    name: str
    build: Callable[[PreTrainedModel, int], Backend]
    families: Collection[str]


BACKENDS = [
    Contender("transformers", TransformersBackend, FAMILIES.keys()),
    Contender("native", NativeBackend, MODEL_TYPES),
]


@dataclass(frozen=True)
class Target:
    """A backend under test, the model it must agree with, and what two drafter versions read."""

    contender: Contender
    family: str
    model: PreTrainedModel

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @cached_property
    def projections(self) -> tuple[FeatureProjection, FeatureProjection]:
        """A bare concatenation, and a projection with its norm (eq. 2)."""
        noise = torch.Generator().manual_seed(1)
        width = 2 * int(self.model.config.hidden_size)
        weight = torch.randn(24, width, generator=noise) / width**0.5
        norm = 1 + 0.2 * torch.randn(24, generator=noise)
        return (
            FeatureProjection((-1, 0, self.layers - 2)),
            FeatureProjection((self.layers - 2, 1), weight, norm, eps=1e-5),
        )

    def backend(self, block_size: int = 16, blocks: int = 64) -> Backend:
        backend = self.contender.build(copy.deepcopy(self.model), block_size)
        backend.allocate(blocks)
        for projection in self.projections:
            backend.load_projection(projection)
        return backend


@pytest.fixture(
    scope="module",
    params=[(contender, family) for contender in BACKENDS for family in contender.families],
    ids=lambda param: f"{param[0].name}-{param[1]}",
)
def target(request: pytest.FixtureRequest) -> Target:
    contender, family = request.param
    return Target(contender, family, tiny_model(family))


@dataclass
class Lane:
    """One sequence: its text, of which the first `computed` are in the cache, and its blocks."""

    ids: Ids
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def left(self) -> int:
        return len(self.ids) - self.computed


@dataclass(frozen=True)
class Part:
    """A lane's share of a step: `tokens` of its text, then a draft of which `right` stand."""

    lane: Lane
    tokens: int
    draft: Ids = ()
    right: int = 0


@dataclass(frozen=True)
class Said:
    """What a backend said of ids[start:]: logits and, by projection, features."""

    ids: Ids
    start: int
    logits: torch.Tensor
    features: list[torch.Tensor]


class Stepper:
    """As little of an engine as runs ragged steps. Blocks are handed out in a random order, and
    said keeps all that the backend answered."""

    def __init__(
        self, target: Target, block_size: int = 16, blocks: int = 64, scatter: int = 0
    ) -> None:
        self.backend = target.backend(block_size, blocks)
        self.free = random.Random(scatter).sample(range(blocks), blocks)
        self.said: list[Said] = []
        self._target = target

    def step(self, *parts: Part) -> list[torch.Tensor]:
        """Run one step; returns each part's logits."""
        runs = []
        for part in parts:
            lane = part.lane
            runs.append((*lane.ids[lane.computed : lane.computed + part.tokens], *part.draft))
            while len(lane.blocks) * self.backend.block_size < lane.computed + len(runs[-1]):
                lane.blocks.append(self.free.pop())
        batch = ragged([part.lane for part in parts], runs)
        output = self.backend.forward(batch)
        said = []
        for part, run, rows in zip(parts, runs, rows_of(batch), strict=True):
            lane = part.lane
            features = [
                output.features[projection.feature_id][rows].clone()
                for projection in self._target.projections
            ]
            ids = (*lane.ids[: lane.computed], *run)
            said.append(Said(ids, lane.computed, output.logits[rows].clone(), features))
            lane.computed += part.tokens + part.right
        self.said += said
        return [one.logits for one in said]

    def check(self) -> None:
        """All that was said is true."""
        texts = sorted({said.ids for said in self.said})
        whole = [a for a, b in zip(texts, [*texts[1:], ()], strict=True) if b[: len(a)] != a]
        known = list(zip(whole, truths(self._target.model, whole), strict=True))
        for said in self.said:
            truth = next(truth for ids, truth in known if ids[: len(said.ids)] == said.ids)
            rows = slice(said.start, len(said.ids))
            close(said.logits, truth.logits[rows])
            for features, projection in zip(said.features, self._target.projections, strict=True):
                close(features, truth.features(projection)[rows])


def ragged(lanes: Sequence[Lane], runs: Sequence[Ids]) -> RaggedBatch:
    """A step that runs `runs` after what the lanes have computed, and wants every row."""
    ends = np.cumsum([0, *map(len, runs)], dtype=np.int32)
    table = np.zeros((len(lanes), max(len(lane.blocks) for lane in lanes)), np.int32)
    for row, lane in zip(table, lanes, strict=True):
        row[: len(lane.blocks)] = lane.blocks
    positions = [
        np.arange(lane.computed, lane.computed + len(run))
        for lane, run in zip(lanes, runs, strict=True)
    ]
    return RaggedBatch(
        token_ids=np.array([token for run in runs for token in run], np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=ends,
        context_len=np.array([lane.computed for lane in lanes], np.int32),
        block_table=table,
        logit_rows=np.arange(ends[-1], dtype=np.int32),
        feature_rows=np.arange(ends[-1], dtype=np.int32),
    )


def rows_of(batch: RaggedBatch) -> Iterator[slice]:
    starts = batch.query_start.tolist()
    return (slice(a, b) for a, b in itertools.pairwise(starts))


def close(rows: torch.Tensor, truth: torch.Tensor) -> None:
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), truth.double(), rtol=0, atol=TOLERANCE)


def wrong(draft: Sequence[int]) -> Ids:
    return tuple((token + 1) % VOCABULARY for token in draft)


# --- Logits and features of every row, however the text is cut into steps


def test_a_whole_prompt(target: Target) -> None:
    stepper = Stepper(target)
    stepper.step(Part(Lane(text(100)), 100))
    stepper.check()


@given(
    cuts=st.sets(st.integers(1, 79)),
    block_size=st.sampled_from([1, 4, 16, 32]),
    scatter=st.integers(0, 999),
)
@settings(max_examples=10, deadline=None)
def test_any_chunking(target: Target, cuts: set[int], block_size: int, scatter: int) -> None:
    stepper = Stepper(target, block_size, blocks=96, scatter=scatter)
    lane = Lane(text(80))
    for end in (*sorted(cuts), 80):
        stepper.step(Part(lane, end - lane.computed))
    stepper.check()


def test_one_by_one(target: Target) -> None:
    stepper = Stepper(target, block_size=4)
    lane = Lane(text(3 * WINDOW))
    while lane.left:
        stepper.step(Part(lane, 1))
    stepper.check()


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_verify_blocks_leave_no_trace_of_their_wrong_tokens(
    target: Target, block_size: int
) -> None:
    """Rows of rejected tokens are written over by what was committed in their place."""
    stepper = Stepper(target, block_size)
    lane = Lane(text(45))
    stepper.step(Part(lane, 19))
    for right in (2, 0, 4, 0, 3):
        stepper.step(share(lane, 1, right, 4 - right))
    assert lane.computed == 19 + 5 + 9
    stepper.step(Part(lane, lane.left))
    stepper.check()


# What one sequence does in a step: it may run some of its text and a draft behind it. Alone, a
# number above 1 is a prefill chunk, 1 a decode, 1 and a draft a verify block.
moves = st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3))


@given(
    script=st.lists(st.lists(moves, min_size=5, max_size=5), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16, 32]),
    scatter=st.integers(0, 999),
)
@settings(max_examples=12, deadline=None)
def test_any_mixture_of_chunks_decodes_and_verify_blocks(
    target: Target, script: list[list[tuple[int, int, int]]], block_size: int, scatter: int
) -> None:
    stepper = Stepper(target, block_size, blocks=300, scatter=scatter)
    lanes = [Lane(text(50, seed)) for seed in range(5)]
    for step in script:
        parts = [share(lane, *move) for lane, move in zip(lanes, step, strict=True)]
        if parts := [part for part in parts if part.tokens]:
            stepper.step(*parts)
    if stepper.said:
        stepper.check()


def share(lane: Lane, tokens: int, right: int, wrong_tokens: int) -> Part:
    """As much of that as the lane's text allows."""
    tokens = min(tokens, lane.left)
    rest = lane.ids[lane.computed + tokens :]
    right = min(right, len(rest))
    return Part(lane, tokens, (*rest[:right], *wrong(rest[right : right + wrong_tokens])), right)


def test_sixty_four_sequences(target: Target) -> None:
    draw = random.Random(64)
    stepper = Stepper(target, block_size=4, blocks=800)
    lanes = [Lane(text(draw.randint(5, 40), seed)) for seed in range(64)]
    stepper.step(*(Part(lane, draw.randint(1, lane.left)) for lane in lanes))
    for _ in range(3):
        chunk = draw.choice([1, 1, 8])
        parts = [share(lane, chunk, draw.randint(0, 2), draw.randint(0, 4)) for lane in lanes]
        stepper.step(*(part for part in parts if part.tokens))
    stepper.check()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (family, {option: off})
        for family, (_, own) in FAMILIES.items()
        for option, off in {
            "sliding_window": 4096,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }.items()
        if option in own
    ],
)
def test_these_models_tell_whether_a_window_or_a_cap_is_applied(
    family: str, changes: Mapping[str, int | None]
) -> None:
    """The suite would notice: without it nearly every row is off by 1000 tolerances."""
    ids = text(100)
    [truth], [other] = (
        truths(model, [ids]) for model in (tiny_model(family), tiny_model(family, **changes))
    )
    off = (truth.logits - other.logits).abs().amax(-1)
    assert off[2 * WINDOW :].quantile(0.1) > 1000 * TOLERANCE


# --- Greedy answers


@pytest.mark.parametrize("gamma", [0, 4])
def test_greedy_answers_are_those_of_generate(target: Target, gamma: int) -> None:
    """Sequences join one a step; with γ > 0 each brings a draft, mostly wrong somewhere."""
    prompts = [text(length, seed=length) for length in (3, 40, 11, 17)]
    answers = [greedy(target.model, prompt, 16 + gamma) for prompt in prompts]
    lanes = [Lane(prompt) for prompt in prompts]
    stepper = Stepper(target, block_size=4)
    joined = 0
    while joined < len(lanes) or min(map(outputs, lanes, prompts)) < 16:
        joined = min(joined + 1, len(lanes))
        parts = []
        for lane, prompt, truth in list(zip(lanes, prompts, answers, strict=True))[:joined]:
            done = outputs(lane, prompt)
            if done < 16:
                draft = truth[done : done + gamma]
                first_wrong = done % (gamma + 1)
                draft = (*draft[:first_wrong], *wrong(draft[first_wrong:]))
                parts.append(Part(lane, lane.left, draft))
        for part, logits in zip(parts, stepper.step(*parts), strict=True):
            best = logits[part.tokens - 1 :].argmax(-1).tolist()
            right = common_prefix(best, part.draft)
            part.lane.ids += tuple(best[: right + 1])
            part.lane.computed += right
    for lane, prompt, truth in zip(lanes, prompts, answers, strict=True):
        assert lane.ids[len(prompt) :][:16] == truth[:16]


def outputs(lane: Lane, prompt: Ids) -> int:
    return len(lane.ids) - len(prompt)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


# --- What a step is asked for


def test_only_rows_that_were_asked_for_in_the_order_asked(target: Target) -> None:
    lane = Lane(text(20), blocks=[3, 1])
    every = ragged([lane], [lane.ids])
    logit_rows, feature_rows = np.array([19, 4, 4], np.int32), np.array([7, 0], np.int32)
    output = target.backend().forward(
        replace(every, logit_rows=logit_rows, feature_rows=feature_rows)
    )
    [truth] = truths(target.model, [lane.ids])
    close(output.logits, truth.logits[logit_rows])
    for projection in target.projections:
        close(output.features[projection.feature_id], truth.features(projection)[feature_rows])


def test_as_many_rows_as_tokens_are_still_in_the_order_asked(target: Target) -> None:
    lane = Lane(text(20), blocks=[3, 1])
    backwards = np.arange(20, dtype=np.int32)[::-1].copy()
    output = target.backend().forward(replace(ragged([lane], [lane.ids]), logit_rows=backwards))
    [truth] = truths(target.model, [lane.ids])
    close(output.logits, truth.logits.flip(0))


def test_a_step_may_want_nothing(target: Target) -> None:
    """A prefill chunk that does not reach its end, of a request without a drafter."""
    nothing = np.empty(0, np.int32)
    lane = Lane(text(20), blocks=[3, 1])
    batch = ragged([lane], [lane.ids[:12]])
    backend = target.backend()
    output = backend.forward(replace(batch, logit_rows=nothing, feature_rows=nothing))
    assert output.logits.shape == (0, VOCABULARY)
    lane.computed = 12
    output = backend.forward(ragged([lane], [lane.ids[12:]]))
    close(output.logits, truths(target.model, [lane.ids])[0].logits[12:])


def test_what_a_backend_says_of_itself(target: Target) -> None:
    backend = target.backend(block_size=4)
    assert backend.block_size == 4
    assert backend.vocab_size == VOCABULARY
    assert backend.context_length == target.model.config.max_position_embeddings
    assert backend.name.startswith(target.contender.name)


# --- Context features


@pytest.mark.parametrize("offset", [-1, 0, 1], ids=["last", "one past it", "two past it"])
def test_the_last_layer_and_unknown_ones_are_refused(target: Target, offset: int) -> None:
    layer = target.layers + offset
    with pytest.raises(ModelError, match=rf"layer {layer}\b.* -1 .* to {target.layers - 2}\b"):
        target.backend().load_projection(FeatureProjection((0, layer)))


def test_layers_below_the_embeddings_are_refused(target: Target) -> None:
    with pytest.raises(ModelError, match=rf"layer -2\b.* -1 .* to {target.layers - 2}\b"):
        target.backend().load_projection(FeatureProjection((-2, 0)))


def test_an_unloaded_projection_is_computed_no_more(target: Target) -> None:
    gone, kept = target.projections
    backend = target.backend()
    backend.unload_projection(gone.feature_id)
    backend.unload_projection("never loaded")
    lane = Lane(text(5), blocks=[0])
    output = backend.forward(ragged([lane], [lane.ids]))
    assert set(output.features) == {kept.feature_id}
    close(output.features[kept.feature_id], truths(target.model, [lane.ids])[0].features(kept))


def test_a_feature_id_stands_for_layers_and_tensors() -> None:
    weight, norm = torch.randn(8, 32), torch.randn(8)
    projection = FeatureProjection((0, 1), weight, norm, eps=1e-6)
    same = [
        FeatureProjection((0, 1), weight.clone(), norm.clone(), eps=1e-6),
        FeatureProjection((0, 1), weight.T.contiguous().T, norm, eps=1e-6),
    ]
    nudged = weight.clone()
    nudged[7, 31] += 1e-3
    others = [
        FeatureProjection((1, 0), weight, norm, eps=1e-6),
        FeatureProjection((0, 2), weight, norm, eps=1e-6),
        FeatureProjection((0, 1), nudged, norm, eps=1e-6),
        FeatureProjection((0, 1), weight.reshape(16, 16), norm, eps=1e-6),
        FeatureProjection((0, 1), weight, norm.flip(0), eps=1e-6),
        FeatureProjection((0, 1), weight, norm, eps=1e-5),
        FeatureProjection((0, 1), weight, None, eps=1e-6),
        FeatureProjection((0, 1), None, norm, eps=1e-6),
        FeatureProjection((0, 1), None, None, eps=1e-6),
    ]
    assert {p.feature_id for p in same} == {projection.feature_id}
    assert len({p.feature_id for p in (projection, *others)}) == 1 + len(others)


# --- Blocks


def test_a_copied_block_serves_the_tokens_it_shares(target: Target) -> None:
    """A sequence that leaves another's text inside a block shares those before and copies it."""
    stepper = Stepper(target, block_size=8)
    first = Lane(text(30))
    stepper.step(Part(first, 23))
    parting = 21
    copied = stepper.free.pop()
    stepper.backend.copy(first.blocks[2], copied)
    second = Lane(
        (*first.ids[:parting], *wrong(first.ids[parting:])),
        blocks=[*first.blocks[:2], copied],
        computed=parting,
    )
    stepper.step(Part(second, 3))
    stepper.step(Part(first, first.left), Part(second, second.left))
    stepper.check()


def test_blocks_are_used_again_without_being_cleared(target: Target) -> None:
    stepper = Stepper(target, block_size=4, blocks=10)
    for seed in range(4):
        lane = Lane(text(40 - 7 * seed, seed))
        stepper.step(Part(lane, lane.left))
        stepper.free += lane.blocks
    stepper.check()


def test_every_block_that_was_allocated_holds_tokens_of_its_own(target: Target) -> None:
    stepper = Stepper(target, block_size=4, blocks=8)
    lanes = [Lane(text(4 + 1, seed)) for seed in range(8)]
    stepper.step(*(Part(lane, 3) for lane in lanes))
    stepper.step(*(Part(lane, 1) for lane in lanes))
    assert sorted(block for lane in lanes for block in lane.blocks) == list(range(8))
    stepper.check()


def test_allocating_again_starts_afresh(target: Target) -> None:
    """Another size, the same projections, and nothing of the pool before."""
    stepper = Stepper(target, block_size=4, blocks=8)
    stepper.step(Part(Lane(text(32)), 32))
    stepper.backend.allocate(12)
    stepper.free = list(range(12))
    lane = Lane(text(48, seed=1))
    stepper.step(Part(lane, 40))
    stepper.step(Part(lane, 8))
    stepper.check()


def test_numbers_that_are_not_finite_stay_with_their_sequence(target: Target) -> None:
    """Neither batch mates, whose tables are padded with its block, nor the block's next owner."""
    sick_id = VOCABULARY - 1
    model = tiny_model(target.family, tie_word_embeddings=False)
    model.get_input_embeddings().weight.data[sick_id] = float("nan")
    stepper = Stepper(replace(target, model=model), block_size=4)
    stepper.free = list(range(64))[::-1]
    sick = Lane((sick_id,) * 11)
    mate, heir = (Lane(tuple(id % sick_id for id in text(14, seed))) for seed in range(2))
    logits, _ = stepper.step(Part(sick, 11), Part(mate, 3))
    assert sick.blocks[0] == 0
    assert logits.isnan().all()
    stepper.said.pop(0)
    stepper.free += sick.blocks
    stepper.step(Part(heir, 6), Part(mate, 1))
    stepper.step(Part(heir, heir.left), Part(mate, mate.left))
    assert set(heir.blocks) > set(sick.blocks)
    stepper.check()


# --- Features through the engine: what a drafter is sent in the life of a request


@dataclass
class Recorder:
    """A drafter that keeps each row of features it is sent. It drafts the true answer with a wrong
    token somewhere, or nothing, and now and then it has lost what it held."""

    projection: FeatureProjection
    width: int
    answers: Mapping[str, Ids]  # by request id
    calls: int = 0
    held: dict[str, int] = field(default_factory=dict)
    rows: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    gaps: list[DraftRequest] = field(default_factory=list)

    @property
    def card(self) -> DrafterCard:
        return DrafterCard(
            drafter_id=self.projection.feature_id,
            kind="recorder",
            gamma=4,
            layer_ids=self.projection.layer_ids,
            feature_id=self.projection.feature_id,
            feature_width=self.width,
        )

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: DraftRequest) -> Draft | NeedContext:
        self.calls += 1
        name = request.session.partition("/")[0]
        held = self.held.get(name, 0)
        features = request.features
        if request.start > held or features is None or len(features) != len(request.tokens) - 1:
            self.gaps.append(request)
            return NeedContext(request.session, 0)
        self.rows.setdefault(name, []).extend(
            (request.start + i, torch.from_numpy(row)) for i, row in enumerate(features)
        )
        self.held[name] = request.anchor_position
        if self.calls % 4 == 0:
            self.held[name] = held // 2 if self.calls % 8 else 0
            return NeedContext(request.session, self.held[name])
        rest = self.answers[name][request.output_position :][: request.gamma]
        right = self.calls % 5
        ids = () if self.calls % 7 == 0 else (*rest[:right], *wrong(rest[right:]))
        return Draft(request.session, request.round, ids, np.full(len(ids), 3.0, np.float32))

    def close(self, session: str) -> None:
        pass


class Service:
    """An engine with two versions of the recorder, and what its requests were given."""

    def __init__(self, target: Target, prompts: Mapping[str, Ids], config: EngineConfig) -> None:
        self.prompts = prompts
        self.answers = {name: greedy(target.model, ids, 20) for name, ids in prompts.items()}
        self.outputs: dict[str, Ids] = {}
        self.usage: dict[str, Usage] = {}
        concatenated, projected = target.projections
        width = len(concatenated.layer_ids) * int(target.model.config.hidden_size)
        self.drafters = {
            "a": Recorder(concatenated, width, self.answers),
            "b": Recorder(projected, 24, self.answers),
        }
        self.engine = Engine(
            target.backend(config.block_size),
            config,
            OnlineStepCost(StepCost.from_table({1: 1.0, 512: 1.0})),
            drafters=self.drafters,
        )
        self._model = target.model

    def serve(self, **versions: str) -> None:
        """Run these requests together to their end; versions: request -> its drafter's version."""
        for name, version in versions.items():
            self.engine.submit(
                Request(
                    name,
                    self.prompts[name],
                    SamplingParams(temperature=0.0, max_tokens=20),
                    speculation=Speculation(drafter=version),
                )
            )
        for _ in range(1000):  # many times what it takes
            for (name, _), event in self.engine.step():
                if isinstance(event, Committed):
                    self.outputs[name] = (*self.outputs.get(name, ()), *event.ids)
                elif isinstance(event, Finished):
                    assert event.error is None
                    self.usage[name] = event.usage
            self.engine.check_integrity()
            if self.engine.idle:
                return
        raise AssertionError("the engine comes to no end")

    def check(self) -> None:
        """Answers are greedy; every row that a drafter was ever sent is transformers', and from
        the first position to the one before the last anchor none is missing."""
        assert self.outputs == self.answers
        for recorder in self.drafters.values():
            assert not recorder.gaps
            for name, rows in recorder.rows.items():
                [truth] = truths(self._model, [(*self.prompts[name], *self.answers[name])])
                positions = [position for position, _ in rows]
                close(
                    torch.stack([row for _, row in rows]),
                    truth.features(recorder.projection)[positions],
                )
                assert set(positions) == set(range(max(positions) + 1))
                assert max(positions) >= len(self.prompts[name]) + 10
        # Nothing of that came about by an error that an engine forgives.
        assert set(self.engine.desk.faults) == {"need context"}


# Blocks and chunks are small so that a request of 50 tokens has many of both.
SMALL = EngineConfig(
    kv_tokens=1024,
    block_size=4,
    max_sequences=8,
    max_step_tokens=64,
    prefill_chunk=11,
    gamma=4,
    verify="fixed:4",
)


def test_features_of_prompts_of_decoded_and_of_verified_tokens(target: Target) -> None:
    service = Service(target, {"x": text(33, 1), "y": text(5, 2), "z": text(18, 3)}, SMALL)
    service.serve(x="a", y="b", z="a")
    service.check()
    figures = service.engine.figures.speculation
    assert 0 < figures.accepted < figures.verified, "drafts were not partly right"
    # Rounds without a draft and lost sessions came up too.
    assert figures.drafted < 4 * figures.rounds
    assert service.engine.desk.faults["need context"] > 0


def test_features_come_along_with_prefix_hits(target: Target) -> None:
    first = text(33, 1)
    answer = greedy(target.model, first, 20)
    prompts = {
        "first": first,
        "again": first,
        "parting": (*first[:29], *wrong(first[29:])),  # inside a block
        "continued": (*first, *answer[:14], *text(6, 2)),  # after decoded and verified tokens
        "other": first,
        "bare": first,
    }
    service = Service(target, prompts, SMALL)
    service.serve(first="a")
    service.serve(again="a", parting="a", continued="a")
    cached = {name: usage.cached_tokens for name, usage in service.usage.items()}
    assert cached == {"first": 0, "again": 32, "parting": 29, "continued": 47}
    # Features of one version are never given to another, which has them computed instead; who
    # reads none takes any block.
    service.serve(other="b")
    service.serve(bare="none")
    assert service.usage["other"].cached_tokens == 0
    assert service.usage["bare"].cached_tokens == 32
    service.check()


def test_features_recomputed_after_preemption(target: Target) -> None:
    prompts = {name: text(30, seed) for seed, name in enumerate("uvwx", 4)}
    service = Service(target, prompts, replace(SMALL, kv_tokens=120))
    service.serve(u="a", v="b", w="a", x="b")
    service.check()
    assert service.engine.preemptions > 0
    assert service.engine.figures.prefill_tokens > 4 * 30, "nothing had to be computed again"


# --- The transformers backend's own


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(family: str) -> None:
    """The same roundings in another order: the error has the size of that of transformers' own
    bfloat16 pass (measured: 0.93 to 1.01 times). Half as much again would be something else."""
    ids = text(60)
    [exact] = truths(tiny_model(family), [ids])
    half = tiny_model(family, torch.bfloat16)
    [theirs] = truths(half, [ids])
    backend = TransformersBackend(half, 16)
    backend.allocate(8)
    projection = FeatureProjection((-1, 0, 2))
    backend.load_projection(projection)
    lane = Lane(ids, blocks=[6, 1, 4, 3])
    logits, features = [], []
    for end in (40, 41, 60):
        output = backend.forward(ragged([lane], [ids[lane.computed : end]]))
        logits.append(output.logits.clone())
        features.append(output.features[projection.feature_id].clone())
        lane.computed = end
    assert backend.name == "transformers-bfloat16-cpu"
    for ours, other, truth in (
        (torch.cat(logits), theirs.logits, exact.logits),
        (torch.cat(features), theirs.features(projection), exact.features(projection)),
    ):
        assert ours.dtype == torch.float32
        error, allowed = (ours - truth).square().mean(), (other - truth).square().mean()
        assert 0 < error.sqrt() <= 1.5 * allowed.sqrt()


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        ("llama", 4 * 2 * 16),
        ("mistral", 4 * 1 * 16),
        ("gemma4", 2 * (2 * 16 + 2 * 32)),  # the upper two layers read the others' cache
        ("gemma4-experts", 2 * (2 * 16 + 1 * 32)),
    ],
)
def test_the_pool_holds_what_each_layer_stores_and_no_more(family: str, numbers: int) -> None:
    """numbers: of a token's keys, in all layers that store any: KV heads * head size."""
    pool, lane = PagedKV(blocks=10, block_size=4), Lane(text(9), blocks=[7, 0, 9])
    assert pool.nbytes == 0
    batch = ragged([lane], [lane.ids])
    model = tiny_model(family)
    TransformersBackend(model)  # puts our attention into the model
    with torch.inference_mode():
        model.base_model(
            input_ids=torch.tensor([lane.ids]),
            position_ids=torch.arange(9)[None],
            use_cache=False,
            dspark_step=PaddedAttention(batch, pool, model.device),
        )
    assert pool.nbytes == 10 * 4 * 2 * numbers * 4


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "dynamic", "factor": 4.0},
                }
            },
            "dynamic",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "later tokens"),
    ],
)
def test_models_whose_rows_depend_on_more_than_their_past_are_refused(
    family: str, changes: Mapping[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        TransformersBackend(tiny_model(family, **changes))
