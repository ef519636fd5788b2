"""How draft tokens are drawn (design.md §4, L1 to L3), and what the cheap heads change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.core.drafts import MAX_SUPPORT, Draft, DraftRequest, DraftSampling
from dspark.core.sampling import SamplingMode
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.choosing import Chooser, largest_columns
from dspark.models.verification import (
    check_support,
    coupled_token,
    normalized_weights,
    sample_from_support,
)

from .plain import plain_hidden, plain_logits
from .scene import GAMMA, KINDS, NATIVE, SOME_IDS, Talk, V, only, tiny, tiny_drafter

T = 0.8
REJECTION = DraftSampling(SamplingMode.REJECTION, T)
COUPLED = DraftSampling(SamplingMode.COUPLED, T, seed=2**63 + 5, choice=2)


def request(sampling: DraftSampling, row: int = 0, **changes: Any) -> DraftRequest:
    return replace(Talk(str(row), 9).ask(0, 5, sampling=sampling), **changes)


# --- one position --------------------------------------------------------------------------------


def test_rows_are_drawn_as_sample_from_support_draws() -> None:
    """The batch's draw is the shared rule of L2, number for number, from the weights it ships."""
    rng = np.random.default_rng(3)
    requests = [request(REJECTION, row) for row in range(16)]
    chooser = Chooser(requests, np.random.default_rng(8))
    one_by_one = np.random.default_rng(8)
    for k in range(40):
        logits = rng.normal(0, 3, (16, V)).astype(np.float32)
        chosen = chooser.choose(logits, np.arange(V))
        for row in range(16):
            support = chooser.support(row)
            assert support is not None
            ids, weights = support[0][k], support[1][k]
            assert weights.dtype == np.float32
            assert ids[sample_from_support(weights, one_by_one)] == chosen[row]


@pytest.mark.parametrize("width", [1, 7, MAX_SUPPORT])
def test_a_support_is_the_largest_of_the_softmax(width: int) -> None:
    logits = np.random.default_rng(1).normal(0, 2, (2, V)).astype(np.float32)
    asked = [request(REJECTION, 0, support_m=width), request(REJECTION, 1)]
    chooser = Chooser(asked, np.random.default_rng(0))
    chosen = chooser.choose(logits, np.arange(V))
    for row, m in enumerate((width, MAX_SUPPORT)):
        support = chooser.support(row)
        assert support is not None
        ids, weights = support[0][0], support[1][0]
        assert np.count_nonzero(weights) == m
        assert check_support(ids[None], weights[None], [int(chosen[row])], V)
        expected = np.exp(logits[row].astype(np.float64) / T)
        least = np.sort(expected)[-m]
        expected = np.where(expected >= least, expected, 0)[ids]
        np.testing.assert_allclose(
            normalized_weights(weights), expected / expected.sum(), rtol=1e-5, atol=1e-12
        )


def test_modes_of_one_batch_do_not_mix() -> None:
    rng = np.random.default_rng(2)
    modes = [DraftSampling(SamplingMode.GREEDY), REJECTION, COUPLED, REJECTION]
    requests = [request(sampling, row) for row, sampling in enumerate(modes)]
    chooser = Chooser(requests, np.random.default_rng(9))
    position = requests[2].output_position
    for k in range(5):
        logits = rng.normal(0, 2, (4, V)).astype(np.float32)
        chosen = chooser.choose(logits, np.arange(V))
        assert chosen[0] == logits[0].argmax()
        p = np.exp(logits[2].astype(np.float64) / T)
        assert chosen[2] == coupled_token(p, COUPLED.seed, COUPLED.choice, position + k)
    assert chooser.support(0) is None
    assert chooser.support(2) is None
    supports = chooser.support(1), chooser.support(3)
    assert all(s is not None and s[0].shape == (5, MAX_SUPPORT) for s in supports)


def test_coupled_candidates_carry_their_own_noise() -> None:
    """Noise belongs to an id, wherever it stands among the candidates."""
    logits = np.random.default_rng(4).normal(0, 2, (1, V)).astype(np.float32)
    whole = Chooser([request(COUPLED)], np.random.default_rng(0)).choose(logits, np.arange(V))
    ids = np.random.default_rng(5).permutation(V)
    mixed = Chooser([request(COUPLED)], np.random.default_rng(0)).choose(logits[:, ids], ids[None])
    assert ids[mixed[0]] == whole[0]


def test_confidence_of_a_kind_without_a_head_is_the_largest_probability() -> None:
    """At the request's temperature, whichever id is drawn; finite where one id has all."""
    logits = np.random.default_rng(6).normal(0, 2, (3, V)).astype(np.float32)
    modes = [DraftSampling(SamplingMode.GREEDY), REJECTION, COUPLED]
    requests = [request(sampling, row) for row, sampling in enumerate(modes)]
    said = []
    for seed in (1, 2):  # another draw, the same confidence
        chooser = Chooser(requests, np.random.default_rng(seed))
        chooser.choose(logits, np.arange(V))
        chooser.choose(np.eye(3, V, dtype=np.float32) * 1000, np.arange(V))
        said.append(chooser.top_logits)
    np.testing.assert_array_equal(said[0], said[1])
    p = np.exp(logits.astype(np.float64) / [[1.0], [T], [T]])
    p = (p / p.sum(1, keepdims=True)).max(1)
    np.testing.assert_allclose(said[0][:, 0], np.log(p / (1 - p)), rtol=1e-4)
    assert np.isfinite(said[0]).all()
    assert (said[0][:, 1] > 20).all()


def test_largest_columns() -> None:
    values = np.random.default_rng(0).random((6, 50)).astype(np.float32)
    for count in (1, 8, 49, 50, 80):
        columns = largest_columns(values, count)
        assert columns.shape == (6, min(count, 50))
        for row, found in zip(values, columns, strict=True):
            assert set(found) == set(np.argsort(-row)[:count])


# --- whole blocks --------------------------------------------------------------------------------


def drafted(name: str, sampling: DraftSampling, rounds: int, **options: Any) -> list[Draft]:
    mine = tiny(name, rng=np.random.default_rng(12), **options)
    talk = Talk("a", 30)
    first = talk.ask(0, 20, sampling=sampling, output_position=3)
    return [only(mine.propose([replace(first, round=n)])) for n in range(rounds)]


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        *(("markov", 0), ("rnn", 24), ("reduced", 24), ("dflash", 0), ("eagle3", 0)),
        *(("native-rnn", 24), ("native-dflash", 0)),
    ],
)
def test_drafts_follow_the_support_that_is_shipped(name: str, candidates: int) -> None:
    """χ² of x_1, and of x_2 given the likeliest x_1: q is what the drafter says it is."""
    mine = tiny(name, rng=np.random.default_rng(12), candidates=candidates)
    drafts: list[Draft] = []
    for call in range(8):
        talks = [Talk(f"{call}/{i}", 30) for i in range(250)]  # one text, many sessions
        drafts += mine.propose([t.ask(0, 20, sampling=REJECTION) for t in talks])
    for draft in drafts:
        assert draft.support_ids is not None
        assert draft.support_weights is not None
        assert check_support(draft.support_ids, draft.support_weights, draft.ids, V)
    first = np.bincount([draft.ids[0] for draft in drafts]).argmax()
    for k, group in ((0, drafts), (1, [d for d in drafts if d.ids[0] == first])):
        q = np.zeros(V)
        assert group[0].support_ids is not None
        q[group[0].support_ids[k]] = normalized_weights(group[0].support_weights[k])
        counts = np.bincount([draft.ids[k] for draft in group], minlength=V)
        assert not counts[q == 0].any()
        few = q * len(group) < 5
        observed = np.append(counts[~few], counts[few].sum())
        expected = np.append(q[~few], q[few].sum()) * len(group)
        kept = expected > 0
        assert stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-3


@pytest.mark.parametrize("name", ["gated", "native-gated"])
def test_what_is_said_before_a_draw_does_not_know_it(name: str) -> None:
    """c_1 is the same in every draft of one context, c_2 and the second support depend on x_1
    alone (L2, not anticipating)."""
    drafts = drafted(name, REJECTION, 150)
    assert len({draft.confidence_logits[0] for draft in drafts}) == 1
    seconds: dict[int, set[tuple[bytes, bytes]]] = {}
    for draft in drafts:
        assert draft.support_weights is not None
        said = (draft.confidence_logits[1].tobytes(), draft.support_weights[1].tobytes())
        seconds.setdefault(draft.ids[0], set()).add(said)
    assert all(len(said) == 1 for said in seconds.values())
    assert len(set.union(*seconds.values())) > 1


@pytest.mark.parametrize("name", [*KINDS, *NATIVE])
def test_a_coupled_draft_is_a_function_of_seed_and_place(name: str) -> None:
    """It is what the draft's own distribution gives under the shared noise; no rng is used."""
    one, two = drafted(name, COUPLED, 2, candidates=24)
    assert one.ids == two.ids
    other = drafted(name, replace(COUPLED, seed=1), 1, candidates=24)[0]
    assert name == "mtp" or other.ids != one.ids
    assert one.support_ids is None


@pytest.mark.parametrize("name", ["gated", "native-gated"])
def test_a_coupled_draft_is_the_drafters_sample_under_the_noise(name: str) -> None:
    model = tiny_drafter("gated")
    assert isinstance(model, ParallelDrafter)
    talk = Talk("a", 30)
    draft = drafted(name, COUPLED, 1)[0]
    with torch.inference_mode():
        context = torch.from_numpy(talk.features[:20])
        hidden = plain_hidden(model, context, torch.arange(20), talk.ids[:21])
        base = model.base_logits(hidden)
        before = [talk.ids[20]]
        for k in range(GAMMA):
            logits = plain_logits(model, hidden, base, k, before).double().numpy()
            token = coupled_token(
                np.exp((logits - logits.max()) / T), COUPLED.seed, COUPLED.choice, 3 + k
            )
            assert draft.ids[k] == token
            before.append(token)


@pytest.mark.parametrize("name", [*KINDS, *NATIVE])
def test_all_candidates_are_the_whole_head(name: str) -> None:
    """The restricted head with every id a candidate is the full one, and with few it proposes
    nothing else than candidates."""
    talks = [Talk(str(i), 40, seed=i) for i in range(12)]
    asked = [talk.ask(0, 20 + i) for i, talk in enumerate(talks)]
    kind = name.removeprefix("native-")
    size = len(SOME_IDS) if KINDS[kind].get("draft_vocab_size") else V
    whole, almost, few = (tiny(name, candidates=n) for n in (0, size - 1, 6))
    same = 0
    replies = zip(whole.propose(asked), almost.propose(asked), few.propose(asked), strict=True)
    for full, near, cut in replies:
        assert isinstance(full, Draft)
        assert isinstance(near, Draft)
        assert isinstance(cut, Draft)
        assert near.ids == full.ids
        np.testing.assert_allclose(near.confidence_logits, full.confidence_logits, atol=2e-4)
        same += sum(a == b for a, b in zip(full.ids, cut.ids, strict=True))
    total = sum(len(reply.ids) for reply in whole.propose(asked))
    assert same > total / 2
    assert kind not in ("markov", "rnn") or same < total, "six candidates changed nothing"


@pytest.mark.parametrize("name", ["reduced", "native-reduced", "mtp"])
@pytest.mark.parametrize("sampling", [REJECTION, COUPLED])
def test_a_reduced_vocabulary_proposes_its_own_ids(name: str, sampling: DraftSampling) -> None:
    for draft in drafted(name, sampling, 20):
        assert set(draft.ids) <= set(SOME_IDS.tolist())
        if draft.support_ids is not None:
            assert set(draft.support_ids.ravel().tolist()) <= set(SOME_IDS.tolist())
