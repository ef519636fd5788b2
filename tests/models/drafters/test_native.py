"""Drafting on the native kernels: what they take, rows that depend on nothing else, strange input.

That they draft as torch and the reference do is asked in the other files, beside torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.config import EngineConfig
from dspark.core.drafts import Draft, DraftRequest, DraftSampling
from dspark.core.errors import ModelError
from dspark.core.requests import Speculation
from dspark.core.sampling import SamplingMode, SamplingParams
from dspark.models.drafters.checkpoint import DrafterCheckpoint, TargetFacts, save_checkpoint
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.loading import load_drafter
from dspark.models.drafters.native import NativeDraftOptions, NativeKernel
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import Trunk
from dspark.models.targets.native import NativeBackend, NativeOptions, NativeUnavailable
from dspark.models.targets.transformers import TransformersBackend
from dspark.verifier.engine import Engine

from ...verifier.toy import Scene, request, still_cost
from ..tiny import text, tiny_model
from .scene import GAMMA, KINDS, NATIVE, Talk, V, config_of, only, tensors, tiny, tiny_drafter

KINDS_HERE = [name.removeprefix("native-") for name in NATIVE]
WAYS = [NativeDraftOptions("float32", "float32"), NativeDraftOptions("int8", "float16")]
COUPLED = DraftSampling(SamplingMode.COUPLED, 0.8, seed=5)
REJECTION = DraftSampling(SamplingMode.REJECTION, 0.8)
MODELS = {name: tiny_drafter(name) for name in KINDS_HERE}


def native(name: str, options: NativeDraftOptions, candidates: int = 24) -> ModelDrafter:
    return tiny(name, model=MODELS[name], native=options, candidates=candidates)


def replies(drafter: ModelDrafter, asked: Sequence[DraftRequest]) -> list[Draft]:
    said = drafter.propose(asked)
    assert all(isinstance(one, Draft) for one in said)
    return [one for one in said if isinstance(one, Draft)]


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS_HERE)
@pytest.mark.parametrize("options", WAYS, ids=lambda one: one.precision)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_draft_depends_on_nothing_else_in_its_batch(
    name: str, options: NativeDraftOptions, data: st.DataObject
) -> None:
    """Bit for bit: mates, their modes, how the context came in, and the number of threads."""
    count = data.draw(st.integers(2, 6), "sessions")
    talks = [Talk(str(i), 330, seed=i) for i in range(count)]
    anchors = data.draw(st.lists(st.integers(0, 320), min_size=count, max_size=count), "anchors")
    sampled = st.sampled_from([COUPLED, DraftSampling(SamplingMode.GREEDY)])
    modes = data.draw(st.lists(sampled, min_size=count, max_size=count), "modes")
    together = native(name, replace(options, threads=data.draw(st.integers(1, 3), "threads")))
    cuts = [data.draw(st.integers(0, anchor), "cut") for anchor in anchors]
    replies(together, [talk.ask(0, cut) for talk, cut in zip(talks, cuts, strict=True)])
    asked = [
        talk.ask(cut, anchor, 1, sampling=mode)
        for talk, cut, anchor, mode in zip(talks, cuts, anchors, modes, strict=True)
    ]
    alone = native(name, replace(options, threads=1))
    for talk, reply, mode in zip(talks, replies(together, asked), modes, strict=True):
        anchor = anchors[int(talk.session)]
        single = only(alone.propose([talk.ask(0, anchor, 1, sampling=mode)]))
        assert reply.ids == single.ids
        np.testing.assert_array_equal(reply.confidence_logits, single.confidence_logits)


@pytest.mark.parametrize("options", WAYS, ids=lambda one: one.precision)
def test_a_support_depends_on_nothing_else_in_its_batch(options: NativeDraftOptions) -> None:
    """Of position 1: what follows depends on what is drawn there."""
    talks = [Talk(str(i), 200, seed=i) for i in range(5)]
    asked = [talk.ask(0, 30 + 40 * i, sampling=REJECTION) for i, talk in enumerate(talks)]
    alone = native("gated", options)
    for one, reply in zip(asked, replies(native("gated", options), asked), strict=True):
        single = only(alone.propose([one]))
        assert reply.support_weights is not None
        assert single.support_weights is not None
        np.testing.assert_array_equal(reply.support_weights[0], single.support_weights[0])


def test_all_of_a_batch_greedy_or_not_is_drawn_alike() -> None:
    """A greedy row is drawn in the library in a greedy batch, by the `Chooser` beside others."""
    for name in KINDS_HERE:
        greedy = Talk("a", 60).ask(0, 50)
        beside = Talk("b", 60).ask(0, 50, sampling=COUPLED)
        one = only(native(name, WAYS[0]).propose([greedy]))
        other = replies(native(name, WAYS[0]), [greedy, beside])[0]
        assert one.ids == other.ids
        np.testing.assert_allclose(one.confidence_logits, other.confidence_logits, rtol=1e-5)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 6, 17, 40, V - 1])
def test_candidates_are_the_largest_base_logits(count: int) -> None:
    """The same ids with the same weights as a sort over the whole draft vocabulary gives."""
    for seed in range(6):
        talk = Talk("a", 40, seed=seed)
        asked = talk.ask(0, 30, sampling=REJECTION, support_m=128)
        few = only(native("headless", WAYS[0], count).propose([asked]))
        whole = only(native("headless", WAYS[0], 0).propose([asked]))
        assert few.support_ids is not None
        assert whole.support_ids is not None
        assert few.support_weights is not None
        assert whole.support_weights is not None
        for k in range(GAMMA):
            order = np.argsort(-whole.support_weights[k], kind="stable")[:count]
            said = dict(zip(few.support_ids[k].tolist(), few.support_weights[k], strict=True))
            kept = dict(sorted(said.items(), key=lambda pair: -pair[1])[: min(count, 128)])
            expected = whole.support_ids[k][order].tolist()
            assert set(kept) == set(expected)


def test_int8_drafts_nearly_what_float32_does() -> None:
    """Random weights and features are the worst case; trained ones agree more (docs/results)."""
    same = drafted = 0
    for name in KINDS_HERE:
        talks = [Talk(str(i), 60, seed=i) for i in range(12)]
        asked = [talk.ask(0, 40 + i) for i, talk in enumerate(talks)]
        pairs = zip(*(replies(native(name, way), asked) for way in WAYS), strict=True)
        for whole, rounded in pairs:
            same += sum(a == b for a, b in zip(whole.ids, rounded.ids, strict=True))
            drafted += len(whole.ids)
    assert drafted > 300
    assert same / drafted > 0.85


def test_a_window_goes_round_in_half_precision() -> None:
    """A ring that has gone round several times holds what a new session computes."""
    options = NativeDraftOptions("int8", "float16", threads=2)
    old = tiny("markov", model=MODELS["markov"], native=options, window=37)
    talk, start = Talk("a", 300), 0
    for n, anchor in enumerate([30, 36, 38, 90, 91, 150, 290]):
        said = only(old.propose([talk.ask(start, anchor, n)]))
        start = anchor
        fresh = tiny("markov", model=MODELS["markov"], native=options, window=37)
        new = only(fresh.propose([talk.ask(max(0, anchor - 37), anchor, n)]))
        # The same keys in other slots: sums in another order.
        np.testing.assert_allclose(said.confidence_logits, new.confidence_logits, atol=0.05)


def test_positions_far_beyond_any_table() -> None:
    """A verifier may name any position: it costs no memory, and turns as torch turns it."""
    talk = Talk("a", 60)
    far = replace(talk.ask(0, 16), start=3_000_000)
    mine, theirs = (
        only(tiny("markov", model=tiny_drafter(), native=way, window=16).propose([far]))
        for way in (WAYS[0], None)
    )
    assert mine.ids == theirs.ids
    np.testing.assert_allclose(mine.confidence_logits, theirs.confidence_logits, atol=1e-3)


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("options", WAYS, ids=lambda one: one.precision)
@pytest.mark.parametrize("mode", [DraftSampling(SamplingMode.GREEDY), COUPLED, REJECTION])
def test_features_that_are_not_finite_stay_in_their_session(
    mode: DraftSampling, options: NativeDraftOptions, sick: float
) -> None:
    """They give some ids of the vocabulary, and change nothing for others, nor for another text of
    the same session."""
    ill, well = Talk("a", 60), Talk("b", 60, seed=1)
    ill.features[7] = sick
    mine = native("gated", options)
    said = replies(mine, [ill.ask(0, 40, sampling=mode), well.ask(0, 40)])
    assert set(said[0].ids) <= set(range(V))
    assert said[1].ids == only(native("gated", options).propose([well.ask(0, 40)])).ids
    cured = ill.changed(at=6)
    again = only(mine.propose([cured.ask(0, 41, 1)]))
    assert again.ids == only(native("gated", options).propose([cured.ask(0, 41, 1)])).ids


# --- what fits, and what does not ----------------------------------------------------------------


def test_where_native_does_not_fit_torch_drafts_and_a_line_says_why(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    target = tensors()
    facts = TargetFacts("tiny", "t", "", target.embedding_hash, target.head_hash)
    for name, changes, told in (
        ("eagle3", {}, "a drafter of kind 'eagle3' drafts token by token"),
        ("mtp", {}, "a drafter of kind 'mtp' drafts token by token"),
        ("markov", {"head_dim": 24}, "head_dim 24 is no multiple of 16 up to 512"),
        ("markov", {}, None),
    ):
        place = tmp_path_factory.mktemp("drafter") / name
        save_checkpoint(place, tiny_drafter(name, target, **changes), facts)
        lines: list[str] = []
        options = NativeDraftOptions("int8", threads=1)
        drafter = load_drafter(place, target, native=options, progress=lines.append)
        if told is None:
            assert drafter.kernel.name.startswith("native-int8-")
            assert not [line for line in lines if "does not" in line]
        else:
            assert drafter.kernel.name == "torch-float32"
            assert lines[-1] == f"the drafter does not draft natively here, torch does: {told}"
        only(drafter.propose([Talk("a", 30).ask(0, 20)]))


def test_a_kernel_set_that_is_not_there() -> None:
    with pytest.raises(NativeUnavailable, match="this processor runs none"):
        native("markov", NativeDraftOptions(kernels="abacus"))


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("layers.1.mlp.down_proj.weight", "layer 1, down"),
        ("markov_head.joint_proj.bias", "prepare_bias"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(where: str, named: str) -> None:
    model: Trunk = tiny_drafter("rnn")
    weight = model.get_parameter(where)
    model.get_submodule(where.rpartition(".")[0])._parameters[where.rpartition(".")[2]] = (
        torch.nn.Parameter(weight.clone().index_fill_(0, torch.tensor([3]), float("nan")))
    )
    with pytest.raises(ModelError, match=f"{named}: the weights hold a number that is not finite"):
        ModelDrafter(DrafterCheckpoint(model, "sick"), native=NativeDraftOptions(threads=1))


def test_shapes_of_all_sizes() -> None:
    """Widths that fill no panel or group, many query heads to a key head, one layer, γ of 1."""
    for changes in (
        {"hidden_size": 64, "intermediate_size": 37, "num_layers": 1, "gamma": 1},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 32, "gamma": 16},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 48, "num_layers": 3},
        {"rank": 13, "head": "rnn", "attention_bias": True},
        {"embed_scale": 8.0, "logit_softcap": 2.5},
    ):
        target = tensors()
        target = replace(
            target,
            embed_scale=changes.get("embed_scale", 1.0),
            logit_softcap=changes.get("logit_softcap"),
        )
        rest = {k: v for k, v in changes.items() if k not in ("embed_scale", "logit_softcap")}
        model, again = (tiny_drafter("markov", target, **rest) for _ in range(2))
        mine = tiny("markov", model=model, native=NativeDraftOptions(threads=2), candidates=40)
        theirs = tiny("markov", model=again, candidates=40)
        asked = [Talk(str(i), 150, seed=i).ask(0, 20 * i, gamma=16) for i in range(6)]
        for one, other in zip(replies(mine, asked), replies(theirs, asked), strict=True):
            assert one.ids == other.ids
            np.testing.assert_allclose(
                one.confidence_logits, other.confidence_logits, atol=1e-4, rtol=1e-4
            )


# --- beside its target ---------------------------------------------------------------------------


def test_beside_a_native_target_it_drafts_in_its_precision_by_its_threads() -> None:
    model = tiny_model("llama")
    assert NativeDraftOptions.beside_target(TransformersBackend(tiny_model("llama"))) is None
    for precision in ("float32", "int8"):
        backend = NativeBackend(model, 16, NativeOptions(precision, threads=2))
        options = NativeDraftOptions.beside_target(backend)
        assert options is not None
        drafter = tiny("markov", model=MODELS["markov"], native=options)
        assert drafter.kernel.name.startswith(f"native-{precision}-{backend.kernels}")
        asked = [Talk(str(i), 60, seed=i).ask(0, 20 + i) for i in range(4)]
        own = tiny("markov", model=MODELS["markov"], native=replace(options, beside=None))
        for one, other in zip(replies(drafter, asked), replies(own, asked), strict=True):
            assert one.ids == other.ids
            np.testing.assert_array_equal(one.confidence_logits, other.confidence_logits)


def test_beside_its_target_it_reads_the_targets_embedding() -> None:
    """One copy of it in memory; another target's is not taken for it."""
    model = tiny_model("llama")
    backend = NativeBackend(model, 16, NativeOptions(threads=1))
    options = NativeDraftOptions.beside_target(backend)
    assert options is not None
    target = TargetTensors.of(model)
    other = replace(target, embedding=target.embedding + 1e-3)
    asked = Talk("a", 60, width=target.hidden_size).ask(0, 40)
    for tensors_of, shared in ((target, True), (other, False)):
        mine, alone = (
            tiny("markov", model=tiny_drafter("markov", tensors_of), native=way)
            for way in (options, NativeDraftOptions(threads=1))
        )
        assert isinstance(mine.kernel, NativeKernel)
        assert isinstance(alone.kernel, NativeKernel)
        assert mine.kernel.shares_embedding is shared
        assert not alone.kernel.shares_embedding
        one, two = only(mine.propose([asked])), only(alone.propose([asked]))
        assert one.ids == two.ids
        np.testing.assert_array_equal(one.confidence_logits, two.confidence_logits)


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.9, seed=7, max_tokens=24),
    ],
    ids=["greedy", "seeded"],
)
def test_native_drafts_change_no_token(precision: str, sampling: SamplingParams) -> None:
    """L1 and L3, target and drafters native, all kinds side by side."""
    model = tiny_model("llama")
    backend = NativeBackend(model, 16, NativeOptions(precision, threads=2))
    options = NativeDraftOptions.beside_target(backend)
    target = TargetTensors.of(model)
    drafters = {
        name: ModelDrafter(DrafterCheckpoint(tiny_drafter(name, target), name), native=options)
        for name in KINDS_HERE
    }
    for drafter in drafters.values():
        backend.load_projection(drafter.projection)
    engine = Engine(
        backend,
        EngineConfig(kv_tokens=4096, verify="fixed:5", prefill_chunk=7),
        still_cost(),
        drafters=drafters,
    )
    prompts = [text(length, seed=length) for length in (3, 21)]
    answers = Scene(engine).ask(
        *(
            request(f"{name}/{i}", prompt, sampling, speculation=Speculation(drafter=name))
            for name in ("none", *drafters)
            for i, prompt in enumerate(prompts)
        )
    )
    texts = [answer.ids for answer in answers]
    assert texts == texts[:2] * (1 + len(drafters))
    assert not engine.desk.faults
    assert engine.figures.speculation.verified > 50


def test_products_alone_change_no_draft() -> None:
    """They are for measurements, between rounds of a drafter that serves."""
    mine, talk = native("markov", WAYS[0]), Talk("a", 60)
    before = only(mine.propose([talk.ask(0, 40)]))
    assert isinstance(mine.kernel, NativeKernel)
    mine.kernel.products(4, 12)
    assert only(mine.propose([talk.ask(40, 40, 1)])).ids == before.ids


def test_these_are_all_parallel_kinds() -> None:
    assert KINDS_HERE == [name for name in KINDS if config_of(name).parallel]
