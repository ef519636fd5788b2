"""L5 of design.md §4: a drafter's reply is an untrusted hint. Whatever it says, the step goes on,
the text is right, its mates notice nothing, and the fault is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dspark.core.drafts import Draft, DrafterCard, DraftRequest, NeedContext
from dspark.core.requests import Speculation
from dspark.core.sampling import SamplingMode, SamplingParams

from .toy import (
    Array,
    HonestBigram,
    Scene,
    ScriptedDrafter,
    ToyBackend,
    bigram_rule,
    greedy,
    nothing,
    request,
    toy_engine,
)

V, M, GAMMA, TOKENS = 200, 4, 5, 20

# A target that mostly counts upwards, and a drafter that knows it.
P = np.full((V, V), 0.3 / (V - 1))
P[np.arange(V), (np.arange(V) + 1) % V] = 0.7
SUPPORT = ((np.arange(V)[:, None] + np.arange(1, M + 1)) % V).astype(np.int32)
WEIGHTS = np.tile(np.array([0.8, 0.1, 0.05, 0.05], np.float32), (V, 1))

GREEDY = greedy(TOKENS)
SEEDED = SamplingParams(seed=5, max_tokens=TOKENS)
UNSEEDED = SamplingParams(max_tokens=TOKENS)
MODES = {"greedy": GREEDY, "coupled": SEEDED, "rejection": UNSEEDED}

# What a drafter makes of the reply that it would honestly give.
Lie = Callable[[DraftRequest, Draft], Any]


class Liar:
    """An honest drafter whose replies pass through a lie on their way out."""

    def __init__(self, lie: Lie, *, drafter_id: str = "liar") -> None:
        self._honest = honest(drafter_id)
        self._lie = lie
        self.asked = 0

    @property
    def card(self) -> DrafterCard:
        return self._honest.card

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        self.asked += len(requests)
        replies = self._honest.propose(requests)
        return [
            self._lie(request, reply) if isinstance(reply, Draft) else reply
            for request, reply in zip(requests, replies, strict=True)
        ]

    def close(self, session: str) -> None:
        self._honest.close(session)


class LiarAboutAll(Liar):
    """Its lie is about the list of replies."""

    def __init__(self, lie: Callable[[list[Any]], Any]) -> None:
        super().__init__(lambda request, draft: draft)
        self._about_all = lie

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        return self._about_all(super().propose(requests))


def honest(drafter_id: str) -> ScriptedDrafter:
    script = HonestBigram(SUPPORT, WEIGHTS, np.full(V, 1.0), np.random.default_rng(4))
    return ScriptedDrafter(script, gamma=GAMMA, drafter_id=drafter_id)


def a_raise(*_: Any) -> Any:
    raise RuntimeError("the drafter is broken")


def half_way(replies: list[Any]) -> Any:
    yield from replies[:1]
    a_raise()


def with_ids(make: Callable[[tuple[int, ...]], Any]) -> Lie:
    return lambda request, draft: replace(draft, ids=make(draft.ids))


def with_logits(make: Callable[[Array], Any]) -> Lie:
    return lambda request, draft: replace(draft, confidence_logits=make(draft.confidence_logits))


class Shouts:
    """Not even a thing one may look at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


NO_DRAFTS: dict[str, tuple[str, Lie]] = {
    # not a reply at all
    "None": ("not a draft", lambda request, draft: None),
    "a number": ("not a draft", lambda request, draft: 42),
    "a tuple": ("not a draft", lambda request, draft: (draft.ids, draft.confidence_logits)),
    # somebody else's, or of another time
    "another session": ("stale", lambda request, draft: replace(draft, session="b/0/0")),
    "the round before": ("stale", lambda request, draft: replace(draft, round=draft.round - 1)),
    "the next round": ("stale", lambda request, draft: replace(draft, round=draft.round + 1)),
    "no round": ("stale", lambda request, draft: replace(draft, round=None)),
    # ids
    "too long": (
        "too long",
        lambda request, draft: replace(
            draft, ids=(1,) * 99, confidence_logits=np.zeros(99, np.float32)
        ),
    ),
    "one too long": (
        "too long",
        lambda request, draft: replace(
            draft,
            ids=(*draft.ids, 1),
            confidence_logits=np.append(draft.confidence_logits, np.float32(1)),
        ),
    ),
    "ids are None": ("malformed", with_ids(lambda ids: None)),
    "ids are a number": ("malformed", with_ids(lambda ids: 7)),
    "an id of V": ("malformed", with_ids(lambda ids: (*ids[:-1], V))),
    "an id below 0": ("malformed", with_ids(lambda ids: (-1, *ids[1:]))),
    "an id of 2^40": ("malformed", with_ids(lambda ids: (2**40, *ids[1:]))),
    "ids that are floats": ("malformed", with_ids(lambda ids: tuple(map(float, ids)))),
    "ids that are halves": ("malformed", with_ids(lambda ids: tuple(i + 0.5 for i in ids))),
    "ids that are texts": ("malformed", with_ids(lambda ids: tuple(map(str, ids)))),
    "an id that is None": ("malformed", with_ids(lambda ids: (*ids[:-1], None))),
    "an id that is NaN": ("malformed", with_ids(lambda ids: (*ids[:-1], float("nan")))),
    "ids that are tuples": ("malformed", with_ids(lambda ids: tuple((i,) for i in ids))),
    # confidences, as a whole
    "no confidences": ("malformed", with_logits(lambda logits: None)),
    "a list of confidences": ("malformed", with_logits(lambda logits: logits.tolist())),
    "too many confidences": ("malformed", with_logits(lambda logits: np.append(logits, logits))),
    "too few confidences": ("malformed", with_logits(lambda logits: logits[:-1])),
    "one confidence": ("malformed", with_logits(lambda logits: np.float32(1.0))),
    "confidences in a column": ("malformed", with_logits(lambda logits: logits[:, None])),
    "whole confidences": ("malformed", with_logits(lambda logits: logits.astype(np.int32))),
    "complex confidences": ("malformed", with_logits(lambda logits: logits.astype(np.complex64))),
    "confidences of anything": ("malformed", with_logits(lambda logits: logits.astype(object))),
    # windows
    "needs context for ever": (
        "need context",
        lambda request, draft: NeedContext(request.session, 0),
    ),
    "needs context from the anchor": (
        "need context",
        lambda request, draft: NeedContext(request.session, request.anchor_position),
    ),
    "needs context from below 0": (
        "need context",
        lambda request, draft: NeedContext(request.session, -1),
    ),
    "needs context from far away": (
        "need context",
        lambda request, draft: NeedContext(request.session, 10**30),
    ),
    "needs context from half a token": (
        "need context",
        lambda request, draft: NeedContext(request.session, 0.5),  # type: ignore[arg-type]
    ),
    "needs context from NaN": (
        "need context",
        lambda request, draft: NeedContext(request.session, float("nan")),  # type: ignore[arg-type]
    ),
    "needs context from a text": (
        "need context",
        lambda request, draft: NeedContext(request.session, "0"),  # type: ignore[arg-type]
    ),
    "needs context from nowhere": (
        "need context",
        lambda request, draft: NeedContext(request.session, None),  # type: ignore[arg-type]
    ),
}


def changed(array: Array, index: Any, value: Any) -> Array:
    copy = array.copy()
    copy[index] = value
    return copy


def with_support(make: Callable[[Array, Array], tuple[Any, Any]]) -> Lie:
    def lie(request: DraftRequest, draft: Draft) -> Draft:
        assert draft.support_ids is not None
        assert draft.support_weights is not None
        ids, weights = make(draft.support_ids, draft.support_weights)
        return replace(draft, support_ids=ids, support_weights=weights)

    return lie


def wide(ids: Array, weights: Array) -> tuple[Array, Array]:
    """A support of 129 ids that is right in all else."""
    more = np.stack([np.setdiff1d(np.arange(V), row)[: 129 - M] for row in ids])
    return (
        np.concatenate((ids, more), axis=1).astype(np.int32),
        np.concatenate((weights, np.full(more.shape, 0.01, np.float32)), axis=1),
    )


# `first` is where x_1 stands in its support: the lies about others leave x_1..x_γ in theirs.
BAD_SUPPORTS: dict[str, Lie] = {
    "a NaN": with_support(lambda ids, w: (ids, changed(w, (0, 0), np.nan))),
    "infinity": with_support(lambda ids, w: (ids, changed(w, (-1, 0), np.inf))),
    "below zero": with_support(lambda ids, w: (ids, changed(w, (0, 1), -0.1))),
    "all zero": with_support(lambda ids, w: (ids, np.zeros_like(w))),
    "zero for x_k": lambda request, draft: replace(
        draft,
        support_weights=np.where(
            draft.support_ids == np.array(draft.ids)[:, None], np.float32(0), draft.support_weights
        ),
    ),
    "an id twice": with_support(lambda ids, w: (changed(ids, (0, 1), ids[0, 0]), w)),
    "an id of V": with_support(lambda ids, w: (changed(ids, (0, 3), V), w)),
    "an id below 0": with_support(lambda ids, w: (changed(ids, (0, 3), -1), w)),
    "without x_k": lambda request, draft: replace(
        draft, support_ids=((np.array(draft.ids)[:, None] + np.arange(9, 9 + M)) % V).astype("i4")
    ),
    "of 129": with_support(wide),
    "of none": with_support(lambda ids, w: (ids[:, :0], w[:, :0])),
    "ids alone": with_support(lambda ids, w: (ids, None)),
    "weights alone": with_support(lambda ids, w: (None, w)),
    "lists": with_support(lambda ids, w: (ids.tolist(), w.tolist())),
    "too few rows": with_support(lambda ids, w: (ids[:-1], w[:-1])),
    "too many rows": with_support(lambda ids, w: (np.tile(ids, (2, 1)), np.tile(w, (2, 1)))),
    "shapes that differ": with_support(lambda ids, w: (ids, w[:, :-1])),
    "flat": with_support(lambda ids, w: (ids.ravel(), w.ravel())),
    "ids that are floats": with_support(lambda ids, w: (ids.astype(np.float32), w)),
    "ids of anything": with_support(lambda ids, w: (ids.astype(object), w)),
    "weights of anything": with_support(lambda ids, w: (ids, w.astype(object))),
    "complex weights": with_support(lambda ids, w: (ids, w.astype(np.complex64))),
    "a sum beyond float64": with_support(lambda ids, w: (ids, np.full(w.shape, 1e308))),
    "texts": with_support(lambda ids, w: (ids.astype(str), w.astype(str))),
}

BAD_LISTS: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
    "too few": ("wrong count", lambda replies: replies[:-1]),
    "none": ("wrong count", lambda replies: []),
    "too many": ("wrong count", lambda replies: [*replies, *replies]),
    "None": ("raised", lambda replies: None),
    "a number": ("raised", lambda replies: 3),
    "raising": ("raised", a_raise),
    "raising half-way": ("raised", half_way),
    "one that shouts": ("malformed", lambda replies: [Shouts() for _ in replies]),
    "of others": ("stale", lambda replies: [replace(r, session="x") for r in replies]),
}  # fmt: skip


def run(drafter: Any, params: SamplingParams, **config: Any) -> tuple[list[list[int]], Any]:
    """Three requests on `drafter`, and between them three that an honest one serves."""
    good = honest("good")
    engine = toy_engine(
        ToyBackend(bigram_rule(P), V), drafter, good, verify="fixed:5", seed=12, **config
    )
    asked = [
        request(str(i), [10 * i], params, speculation=Speculation(("", "good")[i % 2] or None))
        for i in range(6)
    ]
    answers = Scene(engine).ask(*asked)
    assert all(answer.reason.value == "length" for answer in answers)
    return [answer.ids for answer in answers], engine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NO_DRAFTS)
def test_a_bad_reply_is_no_draft(name: str, mode: str) -> None:
    """The same engine with no drafter in the liar's place draws and says the same."""
    fault, lie = NO_DRAFTS[name]
    liar = Liar(lie)
    texts, engine = run(liar, MODES[mode])
    plain, without = run(nothing(), MODES[mode])
    assert texts == plain
    assert set(engine.desk.faults) == {fault}
    assert engine.desk.faults[fault] == liar.asked
    assert engine.figures.speculation.accepted == without.figures.speculation.accepted > 0


@pytest.mark.parametrize("name", BAD_SUPPORTS)
def test_a_bad_support_is_no_draft(name: str) -> None:
    liar = Liar(BAD_SUPPORTS[name])
    texts, engine = run(liar, UNSEEDED)
    plain, _ = run(nothing(), UNSEEDED)
    assert texts == plain
    assert set(engine.desk.faults) == {"bad support"}
    assert engine.desk.faults["bad support"] == liar.asked


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BAD_LISTS)
def test_a_bad_list_of_replies_is_no_draft(name: str, mode: str) -> None:
    fault, lie = BAD_LISTS[name]
    texts, engine = run(LiarAboutAll(lie), MODES[mode])
    plain, _ = run(nothing(), MODES[mode])
    assert texts == plain
    assert set(engine.desk.faults) == {fault}


def test_a_swap_of_two_replies_is_seen() -> None:
    texts, engine = run(LiarAboutAll(lambda replies: replies[::-1]), GREEDY)
    plain, _ = run(nothing(), GREEDY)
    assert texts == plain
    assert set(engine.desk.faults) == {"stale"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", range(1, GAMMA + 1))
def test_a_bad_confidence_cuts_before_itself(k: int, bad: float) -> None:
    """ℓ < k, and what stands before k counts as if nothing had happened."""
    for mode in ("greedy", "coupled"):
        liar = Liar(with_logits(lambda logits: changed(logits, slice(k - 1, k), bad)))
        texts, engine = run(liar, MODES[mode])
        plain, _ = run(nothing(), MODES[mode])
        assert texts == plain
        assert set(engine.desk.faults) == {"bad confidence"}
    engine = toy_engine(ToyBackend(bigram_rule(P), V), liar, verify="fixed:5")
    (answer,) = Scene(engine).ask(request("a", [0], GREEDY))
    # The last block is clipped to the room left, which may spare it its bad confidence.
    assert {c.speculation.verified for c in answer.commits[1:-1]} <= {k - 1, 0}
    assert engine.figures.speculation.accepted == engine.figures.speculation.verified


@pytest.mark.parametrize("sure", [1e30, -1e30, 3.4e38, 0.0, -0.0])
def test_any_finite_confidence_is_a_confidence(sure: float) -> None:
    texts, engine = run(Liar(with_logits(lambda logits: np.full_like(logits, sure))), GREEDY)
    assert texts == run(nothing(), GREEDY)[0]
    assert not engine.desk.faults


@pytest.mark.parametrize("mode", MODES)
def test_honest_ids_of_another_integer_type_are_ids(mode: str) -> None:
    """A drafter in this process may well answer with NumPy's integers; they leave as plain ones."""
    texts, engine = run(Liar(with_ids(lambda ids: tuple(map(np.int64, ids)))), MODES[mode])
    assert not engine.desk.faults
    assert all(type(token) is int for text in texts for token in text)
    if mode != "rejection":
        assert texts == run(nothing(), MODES[mode])[0]


def test_a_drafter_that_needs_context_is_asked_a_bounded_number_of_times() -> None:
    liar = Liar(lambda request, draft: NeedContext(request.session, 0))
    _, engine = run(liar, GREEDY)
    rounds = engine.figures.speculation.rounds
    assert liar.asked <= 2 * rounds + 2 * 3  # twice a round, the round after prefill included


def test_a_late_reply_is_stale() -> None:
    """A drafter one round behind: each reply is right, of the round before."""
    held: dict[str, Draft] = {}

    def late(request: DraftRequest, draft: Draft) -> Any:
        before = held.get(request.session)
        held[request.session] = draft
        return before

    texts, engine = run(Liar(late), GREEDY)
    assert texts == run(nothing(), GREEDY)[0]
    assert engine.desk.faults["stale"] > 10
    assert engine.desk.faults["not a draft"] == 3  # of the first round, when there was none before


def test_a_drafter_that_fails_to_close_costs_nothing() -> None:
    class Sticky(Liar):
        def close(self, session: str) -> None:
            raise RuntimeError("never")

    texts, engine = run(Sticky(lambda request, draft: draft), GREEDY)
    assert texts == run(nothing(), GREEDY)[0]
    assert engine.desk.faults == {"raised": 3}


def test_a_drafter_is_told_to_forget_every_session() -> None:
    good = honest("good")
    engine = toy_engine(ToyBackend(bigram_rule(P), V), good)
    scene = Scene(engine)
    scene.submit(*(request(str(i), [i], GREEDY) for i in range(4)))
    scene.step(3)
    engine.cancel("2")
    scene.drain()
    assert sorted(good.closed) == [f"{i}/0/0" for i in range(4)]
    assert not good.sessions


@pytest.mark.parametrize("mode", MODES)
def test_lies_in_turn_leave_the_text_alone(mode: str) -> None:
    """All of them, one a round, in one request."""
    lies = [lie for _, lie in NO_DRAFTS.values()]
    if MODES[mode].mode is SamplingMode.REJECTION:
        lies += BAD_SUPPORTS.values()
    turn = iter(range(10**6))
    params = replace(MODES[mode], max_tokens=len(lies) + 5)

    def text(drafter: Any) -> list[int]:
        engine = toy_engine(ToyBackend(bigram_rule(P), V), drafter, seed=3)
        (answer,) = Scene(engine).ask(request("a", [0], params))
        return answer.ids

    liar = Liar(lambda request, draft: lies[next(turn) % len(lies)](request, draft))
    assert text(liar) == text(nothing())
