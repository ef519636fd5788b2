"""Rounds are told as they happen; what is counted of them; how far confidences are believed."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.plans import CalibrationTable
from dspark.core.sampling import SamplingMode
from dspark.models.drafters import NgramDrafter
from dspark.models.drafters.checkpoint import load_checkpoint
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.targets.transformers import TransformersBackend
from dspark.scheduler.sts import confidence
from dspark.training.calibration import auc, fit, halves, join, judge_calibration, survivals
from dspark.training.evaluation import Asked, figures, report, thresholds
from dspark.training.records import Round, records
from dspark.training.rounds import Answer, Asking, ask
from dspark.training.trace import trace

from ..models.drafters.traces import GOLDEN, NAMES, TOKENS, TOLERANCE, load_target, traces
from ..models.tiny import greedy, text, tiny_model

# --- through the engine --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_target() -> TransformersBackend:
    return TransformersBackend(load_target(), block_size=4)


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_the_reference_implementation_s(
    golden_target: TransformersBackend, name: str
) -> None:
    drafter = ModelDrafter(load_checkpoint(GOLDEN / name), candidates=0)
    golden_target.load_projection(drafter.projection)
    for golden in traces(name):
        found = trace(golden_target, drafter, golden.prompt, TOKENS)
        assert found["output"] == list(golden.output)
        rounds = found["rounds"]
        assert [one["start"] for one in rounds] == [one.start for one in golden.rounds]
        for one, theirs in zip(rounds, golden.rounds, strict=True):
            assert (one["anchor"], one["draft"]) == (theirs.anchor, theirs.draft)
            if theirs.start + theirs.accepted < len(golden.prompt) + TOKENS - 1:
                assert one["accepted"] == theirs.accepted
            if theirs.confidence_logits is not None:
                assert one["confidence_logits"] == pytest.approx(
                    theirs.confidence_logits, abs=TOLERANCE
                )
    golden_target.unload_projection(drafter.projection.feature_id)


def test_answers_are_the_target_s_and_rounds_add_up_to_them() -> None:
    prompts = [text(6 + i, seed=i) for i in range(5)]
    backend = TransformersBackend(tiny_model("llama"), block_size=4)
    answers = ask(backend, NgramDrafter(4), prompts, Asking(max_tokens=24, concurrency=3))
    assert [answer.prompt for answer in answers] == list(range(5))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert tuple(answer.ids) == greedy(tiny_model("llama"), prompt, 24)
        whole = [*prompt, *answer.ids]
        assert len(answer.ids) == 1 + sum(one.accepted + 1 for one in answer.rounds)
        for one, after in itertools.pairwise(answer.rounds):
            assert after.start == one.start + one.accepted + 1
        for one in answer.rounds:
            assert whole[one.start] == one.anchor
            right = [x == y for x, y in zip(one.draft, whole[one.start + 1 :], strict=False)]
            assert one.accepted == [*right, False].index(False)
            assert one.judged == len(one.draft) == len(one.logits)


def test_an_end_inside_a_block_leaves_the_rest_without_a_verdict() -> None:
    """The drafter says what the target says, so all would have stood."""
    prompt = text(6)
    whole = greedy(tiny_model("llama"), prompt, 12)
    backend = TransformersBackend(tiny_model("llama"), block_size=4)
    ends = next(i for i, token in enumerate(whole) if i > 1 and token not in whole[:i])

    class Oracle(NgramDrafter):
        def propose(self, requests):  # type: ignore[no-untyped-def]
            from dspark.core.drafts import Draft

            (request,) = requests
            at = request.anchor_position + 1 - len(prompt)
            ids = whole[at : at + request.gamma]
            logits = np.zeros(len(ids), np.float32)
            return [Draft(request.session, request.round, tuple(ids), logits)]

    (answer,) = ask(backend, Oracle(8), [prompt], Asking(max_tokens=12), eos_ids=(whole[ends],))
    assert answer.ids == list(whole[: ends + 1])
    last = answer.rounds[-1]
    assert last.accepted == last.judged == ends < len(last.draft)
    found = records(answer.rounds, 8)
    assert found.known.sum() == found.stood.sum() == ends


def test_modes_and_enough() -> None:
    backend = TransformersBackend(tiny_model("llama"), block_size=4)
    prompts = [text(6 + i, seed=i) for i in range(6)]
    coupled = Asking(0.8, coupled=True, max_tokens=10, concurrency=2, seed=7)
    assert coupled.mode is SamplingMode.COUPLED
    assert Asking(0.8).mode is SamplingMode.REJECTION
    assert Asking().mode is SamplingMode.GREEDY
    first = ask(backend, NgramDrafter(4), prompts, coupled)
    again = ask(backend, NgramDrafter(2), prompts, coupled)
    assert [a.ids for a in first] == [a.ids for a in again]  # seeds, whatever was drafted
    few = ask(backend, NgramDrafter(4), prompts, coupled, enough=lambda rounds: rounds >= 1)
    assert 2 <= len(few) < 6


def test_a_prompt_that_fills_the_context_is_answered_in_what_is_left() -> None:
    backend = TransformersBackend(tiny_model("llama", max_position_embeddings=24), block_size=4)
    (answer,) = ask(backend, NgramDrafter(4), [text(20)], Asking(max_tokens=12))
    assert len(answer.ids) == 4


# --- counts --------------------------------------------------------------------------------------


def block(*logits: float, accepted: int, judged: int | None = None) -> Round:
    n = len(logits)
    return Round(0, 0, (1,) * n, logits, n if judged is None else judged, accepted)


# A scaling that changes nothing, of three positions.
AS_IT_IS = np.eye(2)[:, [0] * 3]

SOME = [
    block(4.0, 2.0, -1.0, accepted=3),
    block(3.0, -2.0, 5.0, accepted=1),
    block(-3.0, 0.5, 0.0, accepted=0),
    block(1.0, accepted=1),
    block(2.0, 2.0, 2.0, accepted=2, judged=2),
    Round(0, 0, (), (), 0, 0),
]


def asked(*rounds: Round, benchmark: str = "gsm8k", temperature: float = 0.0) -> Asked:
    return Asked(benchmark, temperature, [Answer(0, [1, 2], list(rounds))])


def test_figures_of_rounds_by_hand() -> None:
    found = figures([asked(*SOME)], 3, AS_IT_IS)
    assert found["rounds"] == 6
    assert found["accepted"] == 3 + 1 + 0 + 1 + 2
    assert found["tau"] == pytest.approx(1 + 7 / 6)
    assert found["reached_by_position"] == [5, 3, 1]
    assert found["accepted_by_position"] == [4, 2, 1]
    assert found["acceptance_by_position"] == pytest.approx([4 / 5, 2 / 3, 1.0])
    assert found["survival_by_position"] == pytest.approx([4 / 5, 2 / 4, 1 / 3])


def test_thresholds_cut_a_block_at_the_first_token_below() -> None:
    by_threshold = {row["threshold"]: row for row in thresholds(records(SOME, 3), AS_IT_IS)}
    everything = by_threshold[0.0]
    assert (everything["verified"], everything["accepted"]) == (3 + 3 + 3 + 1 + 2, 7)
    half = by_threshold[0.5]  # logits of at least 0, up to the first that is not
    assert (half["verified"], half["accepted"]) == (2 + 1 + 0 + 1 + 2, 2 + 1 + 0 + 1 + 2)
    assert half["rejected"] == 0
    assert half["acceptance"] == 1.0
    high = by_threshold[0.95]
    assert (high["verified"], high["accepted"]) == (1 + 1, 2)


def test_a_report_groups_benchmarks_by_domain() -> None:
    rows = report(
        [
            asked(SOME[0]),
            asked(SOME[1], benchmark="aime25"),
            asked(SOME[2], benchmark="own"),
            asked(SOME[0], temperature=1.0),
        ],
        3,
        {"greedy": AS_IT_IS, "sampled": AS_IT_IS},
    )
    assert [row["temperature"] for row in rows] == [0.0, 1.0]
    assert list(rows[0]["benchmarks"]) == ["gsm8k", "aime25", "own"]
    assert rows[0]["domains"]["math"]["rounds"] == 2
    assert rows[0]["domains"]["own"]["tau"] == 1.0
    assert rows[0]["all"]["rounds"] == 3
    json.dumps(rows)


# --- calibration ---------------------------------------------------------------------------------


def sampled(n: int, wrong: float, seed: int = 0, gamma: int = 4) -> list[Round]:
    """Blocks of a head whose logits are `wrong` times what they should be."""
    rng = np.random.default_rng(seed)
    made = []
    for true in rng.normal(1.0, 1.5, (n, gamma)):
        stood = rng.random(gamma) < 1 / (1 + np.exp(-true))
        accepted = int([*stood, False].index(False))
        made.append(block(*(wrong * true), accepted=accepted))
    return made


def test_temperatures_are_found_and_errors_fall_to_those_of_chance() -> None:
    found = records(sampled(12_000, 2.0), 4)
    scaling = fit(found)
    assert scaling[0] == pytest.approx([2.0] * 4, rel=0.2)
    assert not scaling[1].any()
    judged = judge_calibration("greedy", records(sampled(12_000, 2.0, seed=1), 4), scaling)
    for row in judged.positions:
        assert row.ece_before > 0.02
        assert row.ece < row.ece_perfect + 0.01
        assert row.brier < row.brier_before
        assert row.auc > 0.7
    assert sum(count for _, _, count in judged.reliability[0]) == 12_000
    json.dumps(judged.to_json())


def test_order_within_a_position_is_kept() -> None:
    found = records(sampled(3000, 2.5), 4)
    scaling = fit(found)
    raw = found.logits
    for k in range(4):
        order = np.argsort(raw[:, k], kind="stable")
        assert (np.diff(confidence(raw[order, k], scaling[:, k])) >= 0).all()
    after = judge_calibration("greedy", found, scaling)
    before = judge_calibration("greedy", found, np.eye(2)[:, [0] * 4])
    for one, other in zip(after.positions, before.positions, strict=True):
        assert one.auc_conditional == pytest.approx(other.auc_conditional)


def test_a_block_that_was_cut_says_nothing_of_what_was_not_judged() -> None:
    """Blocks cut at random: counted as rejections they would pull temperatures up."""
    rng = np.random.default_rng(5)
    cut = [
        block(*one.logits, accepted=min(one.accepted, n), judged=n)
        for one, n in zip(sampled(12_000, 1.0), rng.integers(1, 5, 12_000).tolist(), strict=True)
    ]
    assert fit(records(cut, 4))[0, :3] == pytest.approx([1.0] * 3, rel=0.25)


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    data=st.data(),
)
def test_auc_is_the_share_of_pairs_in_order(scores: list[int], data: st.DataObject) -> None:
    stood = np.array(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    values = np.array(scores, float)
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0 for a in values[stood] for b in values[~stood]
    ]
    found = auc(values, stood)
    if pairs:
        assert found == pytest.approx(np.mean(pairs))
    else:
        assert np.isnan(found)


def test_answers_stay_on_one_side() -> None:
    parts = [records([one] * (i + 1), 3) for i, one in enumerate(SOME[:3])]
    left, right = halves(parts)
    assert [len(part) for part in left] == [1, 3]
    assert [len(part) for part in right] == [2]
    assert len(join(left, 3)) == 4
    assert len(join([], 3)) == 0
    assert survivals(join(left, 3)).shape == (4, 3)


def test_tables_are_those_of_a_drafter() -> None:
    """What `dspark calibrate` saves."""
    table = CalibrationTable("x", SamplingMode.GREEDY, *map(tuple, fit(records(SOME, 3)).tolist()))
    assert table.temperatures == (1.0, 1.0, 1.0)  # too few rounds to say anything
    assert table.offsets == (0.0, 0.0, 0.0)
