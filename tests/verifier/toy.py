"""A target whose answers can be worked out by hand, drafters that follow a script, and an engine
around them. Scripted, not mocked: every part keeps the promise of its protocol, and the backend
fails loudly where the engine breaks its side (a stale row, a wrong block, a wrong position).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dspark.core.config import EngineConfig
from dspark.core.drafts import Draft, DrafterCard, DraftRequest, NeedContext
from dspark.core.noise import gumbel
from dspark.core.requests import Committed, Event, Finished, FinishReason, Request
from dspark.core.sampling import SamplingMode, SamplingParams
from dspark.models.drafters import NgramDrafter, NoneDrafter
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.models.targets.features import FeatureProjection
from dspark.models.verification import sample_from_support
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.verifier.engine import Engine, EngineEvent, Key

Array = np.ndarray[Any, Any]

# --- targets -------------------------------------------------------------------------------------

# rule(history [n], first) -> float32 [n - first, V]: the logits after history[: first + 1], ...,
# after history[:n].
Rule = Callable[[Array, int], Array]

NEVER_WRITTEN = -1
FEATURE_WIDTH = 3


def bigram_rule(p: Array) -> Rule:
    """The next token is drawn from p[last token], float64 [V, V]."""
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(np.float32)
    return lambda history, first: logits[history[first:]]


def history_rule(vocab_size: int, seed: int = 0, spread: float = 3.0, loop: int = 0) -> Rule:
    """Logits that depend on every token before and on its place: one wrong id changes everything.

    loop: after so many tokens the text repeats itself from the start (for prompt lookup), unless
    the odds are against it: the token `loop` back gets most, not all, of the weight.
    """
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((1021, vocab_size)) * spread).astype(np.float32)
    powers = rng.integers(1, 2**63, 2**15, np.uint64) | np.uint64(1)  # up to 32,768 tokens

    def rule(history: Array, first: int) -> Array:
        mixed = np.cumsum((history + 1).astype(np.uint64) * powers[: len(history)])
        logits = rows[(mixed[first:] >> np.uint64(20)) % np.uint64(len(rows))]
        if loop:
            logits = logits.copy()
            for row, at in zip(logits, range(first, len(history)), strict=True):
                if at + 1 >= loop:
                    row[history[at + 1 - loop]] += 3 * spread
        return logits

    return rule


def toy_features(tokens: Array, positions: Array) -> Array:
    """float32 [n, 3]: a hash of (token, position), so that a drafter can tell whose they are."""
    mixed = (tokens.astype(np.int64) * 7919 + positions.astype(np.int64) * 104729) % 1009
    return np.stack((tokens, positions, mixed), axis=1).astype(np.float32)


class ToyBackend:
    """A `Backend` whose keys and values are the token ids themselves, kept in paged blocks.

    What a row may attend to is read back through the block table. A slot that nobody wrote, or a
    position that is not the place in the sequence, is an AssertionError in the step.
    """

    name = "toy"
    target_id = "toy"

    def __init__(
        self, rule: Rule, vocab_size: int, *, context_length: int = 4096, block_size: int = 16
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.block_size = block_size
        self.forwards = 0
        self._rule = rule
        self._slots = np.empty((0, block_size), np.int32)
        self._projections: set[str] = set()

    def allocate(self, blocks: int) -> None:
        self._slots = np.full((blocks, self.block_size), NEVER_WRITTEN, np.int32)

    def copy(self, src_block: int, dst_block: int) -> None:
        self._slots[dst_block] = self._slots[src_block]

    def load_projection(self, projection: FeatureProjection) -> None:
        self._projections.add(projection.feature_id)

    def unload_projection(self, feature_id: str) -> None:
        self._projections.discard(feature_id)

    def forward(self, batch: RaggedBatch) -> StepOutput:
        self.forwards += 1
        starts, logit_rows = batch.query_start.tolist(), batch.logit_rows
        logits = []
        for r, context in enumerate(batch.context_len.tolist()):
            begin, end = starts[r], starts[r + 1]
            total = context + end - begin
            at = np.arange(context, total)
            assert np.array_equal(batch.positions[begin:end], at), "positions are not the places"
            blocks = batch.block_table[r, : -(-total // self.block_size)]
            self._slots[blocks[at // self.block_size], at % self.block_size] = batch.token_ids[
                begin:end
            ]
            wanted = logit_rows[(logit_rows >= begin) & (logit_rows < end)] - begin
            if len(wanted):
                history = self._slots[blocks].ravel()[:total]
                assert (history != NEVER_WRITTEN).all(), "a row attends to a slot nobody wrote"
                first = int(wanted[0])
                logits.append(self._rule(history, context + first)[wanted - first])
        rows = np.concatenate(logits) if logits else np.empty((0, self.vocab_size), np.float32)
        wanted = batch.feature_rows
        features = toy_features(batch.token_ids[wanted], batch.positions[wanted])
        return StepOutput(
            torch.from_numpy(rows), {name: torch.from_numpy(features) for name in self._projections}
        )


# --- drafters ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposal:
    """A block as a script writes it; the drafter adds session and round."""

    ids: tuple[int, ...] = ()
    logits: Sequence[float] = ()
    support_ids: Array | None = None
    support_weights: Array | None = None
    looks_back_only: bool = False


# What to propose after the committed ids of a session, the anchor last.
Script = Callable[[tuple[int, ...], DraftRequest], Proposal]


class ScriptedDrafter:
    """A `Drafter` that remembers its sessions, checks what it is told, and follows a script.

    It refuses nothing silently: a request that contradicts its session, or features that are not
    those of its tokens, is an AssertionError, which the engine's desk counts as "raised".
    """

    def __init__(
        self, script: Script, *, gamma: int = 7, drafter_id: str = "scripted", feature_id: str = ""
    ) -> None:
        width = FEATURE_WIDTH if feature_id else 0
        self.card = DrafterCard(
            drafter_id, "scripted", gamma, feature_id=feature_id, feature_width=width
        )
        self.asked: list[DraftRequest] = []
        self.closed: list[str] = []
        self._script = script
        self._sessions: dict[str, list[int]] = {}
        self._featured: dict[str, int] = {}

    @property
    def sessions(self) -> set[str]:
        return set(self._sessions)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        self.asked.extend(requests)
        return [self._answer(request) for request in requests]

    def _answer(self, request: DraftRequest) -> Draft | NeedContext:
        history = self._sessions.get(request.session, [])
        if request.start > len(history):
            return NeedContext(request.session, 0)
        known = history[request.start :]
        assert known == list(request.tokens[: len(known)]), "committed ids changed"
        history = history[: request.start] + list(request.tokens)
        self._check_features(request, history)
        self._sessions[request.session] = history
        said = self._script(tuple(history), request)
        return Draft(
            request.session,
            request.round,
            said.ids,
            np.asarray(said.logits, np.float32),
            said.support_ids,
            said.support_weights,
            said.looks_back_only,
        )

    def _check_features(self, request: DraftRequest, history: list[int]) -> None:
        if not self.card.feature_id:
            assert request.features is None
            return
        at = np.arange(request.start, request.anchor_position)
        tokens = np.array(history, np.int32)[request.start : request.anchor_position]
        assert request.features is not None
        assert np.array_equal(request.features, toy_features(tokens, at)), "features of others"
        assert request.start <= self._featured.get(request.session, 0), "features left out"
        self._featured[request.session] = request.anchor_position

    def forget(self, session: str) -> None:
        """As a drafter that restarts, or runs out of room."""
        self._sessions.pop(session, None)
        self._featured.pop(session, None)

    def close(self, session: str) -> None:
        self.closed.append(session)
        self.forget(session)


@dataclass
class HonestBigram:
    """A script: x_k is drawn from q[x_{k-1}] as the request's mode asks, over a truncated support.

    support_ids: int32 [V, M], weights: float32 [V, M] by last token. logits: [V], the confidence in
    x_k by x_{k-1}, so known before x_k is drawn. ships_support: or else a point mass is claimed.
    """

    support_ids: Array
    weights: Array
    logits: Array
    rng: np.random.Generator
    ships_support: bool = True

    def __call__(self, history: tuple[int, ...], request: DraftRequest) -> Proposal:
        last, came, ids = history[-1], [], []
        for k in range(request.gamma):
            came.append(last)
            last = self._draw(last, request, request.output_position + k)
            ids.append(last)
        if request.sampling.mode is not SamplingMode.REJECTION or not self.ships_support:
            return Proposal(tuple(ids), self.logits[came])
        return Proposal(tuple(ids), self.logits[came], self.support_ids[came], self.weights[came])

    def _draw(self, last: int, request: DraftRequest, position: int) -> int:
        sampling, ids, weights = request.sampling, self.support_ids[last], self.weights[last]
        if sampling.mode is SamplingMode.GREEDY:
            index = int(weights.argmax())
        elif sampling.mode is SamplingMode.REJECTION:
            index = sample_from_support(weights, self.rng)
        else:
            vocab_size = len(self.support_ids)
            noise = gumbel(sampling.seed, sampling.choice, position, ids, vocab_size)
            with np.errstate(divide="ignore"):
                index = int((np.log(weights.astype(np.float64)) + noise).argmax())
        return int(ids[index])


def oracle(rule: Rule, *, wrong_every: int = 0, logit: float = 2.0, blur: float = 0.0) -> Script:
    """A script that knows the target: proposes what it would say, by the request's mode (of its
    parameters the temperature and the seed alone), with a mistake now and then.

    wrong_every: of n positions of the whole sequence one is proposed wrong, 0 = none. blur: weight
    of a fixed row of numbers mixed into the logits, 0 = the target's own. Unseeded sampling is
    served by the likeliest token, a point mass.
    """

    def script(history: tuple[int, ...], request: DraftRequest) -> Proposal:
        ids, sampling = list(history), request.sampling
        for k in range(request.gamma):
            row = rule(np.array(ids, np.int32), len(ids) - 1)[0].astype(np.float64)
            row += blur * np.sin(7.0 * np.arange(len(row)) + ids[-1])
            if sampling.mode is SamplingMode.COUPLED:
                position = request.output_position + k
                row = row / sampling.temperature
                row = row + gumbel(sampling.seed, sampling.choice, position, None, len(row))
            token = int(row.argmax())
            if wrong_every and len(ids) % wrong_every == 0:
                token = (token + 1) % len(row)
            ids.append(token)
        drafted = tuple(ids[len(history) :])
        return Proposal(drafted, [logit] * len(drafted))

    return script


def fixed_block(ids: Iterable[int], logit: float = 2.0) -> Script:
    """A script that always says the same, at most as long as asked."""
    block = tuple(ids)
    return lambda history, request: Proposal(
        block[: request.gamma], [logit] * len(block[: request.gamma])
    )


# --- the engine around them ----------------------------------------------------------------------


class StillCost(OnlineStepCost):
    """A step cost that what steps really take does not move: a test's plans do not depend on the
    machine. Give seconds far above a real step's, so that draft time counts as nothing."""

    def observe(self, P: int, R: int, B: int, context: int, seconds: float) -> None:
        pass


# Drafts cost nothing beside a step (flat T), so every policy verifies what it may.
FLAT = {1: 100.0, 1024: 100.0}


class WatchedCost(StillCost):
    """Remembers the steps that it is told of: P, R, B, seconds."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__(cost)
        self.steps: list[tuple[int, int, int, float]] = []

    def observe(self, P: int, R: int, B: int, context: int, seconds: float) -> None:
        self.steps.append((P, R, B, seconds))


class SlowDrafter(ScriptedDrafter):
    """passes: called first each time, to let some time pass."""

    def __init__(self, script: Script, passes: Callable[[], object], **rest: Any) -> None:
        super().__init__(script, **rest)
        self._passes = passes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        self._passes()
        return super().propose(requests)


def still_cost(table: dict[int, float] | None = None) -> StillCost:
    return StillCost(StepCost.from_table(FLAT if table is None else table))


@dataclass
class HandClock:
    """A clock that a test moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """All that one choice was told."""

    ids: list[int] = field(default_factory=list)
    commits: list[Committed] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def reason(self) -> FinishReason:
        assert self.finished is not None, "no finish reason"
        return self.finished.reason

    def take(self, event: Event) -> None:
        assert self.finished is None, "an event after the last one"
        if isinstance(event, Finished):
            self.finished = event
        else:
            self.commits.append(event)
            self.ids.extend(event.ids)


class Scene:
    """An engine and everything that it told. Every step is followed by `check_integrity`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[Key, Answer] = {}

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)
            self.answers.setdefault((request.request_id, request.choice), Answer())

    def step(self, steps: int = 1) -> list[EngineEvent]:
        told: list[EngineEvent] = []
        for _ in range(steps):
            told += self.engine.step()
            self.engine.check_integrity()
        self.take(told)
        return told

    def take(self, events: list[EngineEvent]) -> None:
        for key, event in events:
            self.answers[key].take(event)

    def drain(self, most: int = 10_000) -> dict[Key, Answer]:
        """Step until nothing is left to do. most: steps after which it counts as stuck."""
        for _ in range(most):
            if self.engine.idle:
                return self.answers
            self.step()
        raise AssertionError(f"not idle after {most} steps")

    def ask(self, *requests: Request) -> list[Answer]:
        """Run requests to their ends, together; their answers in order."""
        self.submit(*requests)
        self.drain()
        return [self.answers[request.request_id, request.choice] for request in requests]


def toy_engine(
    backend: ToyBackend,
    *drafters: Any,
    table: dict[int, float] | None = None,
    eos_ids: Iterable[int] = (),
    clock: Callable[[], float] | None = None,
    seed: int = 0,
    **config: Any,
) -> Engine:
    """An engine on a toy, its default drafter first. seed: of the engine's own randomness."""
    return Engine(
        backend,
        # A small pool: `check_integrity` after every step looks at each block.
        EngineConfig(**{"block_size": backend.block_size, "kv_tokens": 4096, **config}),
        still_cost(table),
        drafters={drafter.card.drafter_id: drafter for drafter in drafters},
        eos_ids=tuple(eos_ids),
        clock=clock or HandClock(),
        rng=np.random.default_rng(seed),
    )


def greedy(max_tokens: int | None = 16, **rest: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **rest)


def request(name: str, prompt: Iterable[int], sampling: SamplingParams, **rest: Any) -> Request:
    return Request(name, tuple(prompt), sampling, **rest)


def choices(asked: Request, n: int) -> list[Request]:
    return [replace(asked, choice=choice) for choice in range(n)]


def target_only(
    rule: Rule,
    prompt: Iterable[int],
    tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    choice: int = 0,
) -> list[int]:
    """Decoding as anyone would write it, greedy or with the noise of a seed: no engine, no blocks,
    no drafts."""
    ids = list(prompt)
    for position in range(tokens):
        row = rule(np.array(ids, np.int32), len(ids) - 1)[0].astype(np.float64)
        if temperature:
            row = row / temperature + gumbel(seed, choice, position, None, len(row))
        ids.append(int(row.argmax()))
    return ids[-tokens:]


def lookup(gamma: int = 7) -> NgramDrafter:
    return NgramDrafter(gamma)


def nothing() -> NoneDrafter:
    return NoneDrafter()
