"""The public implementation's own numbers: checkpoints load, hidden states, drafts and confidences
are the same, through the modules as training uses them, through the drafter, through the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dspark.core.config import EngineConfig
from dspark.core.drafts import Draft, DrafterCard, DraftRequest, NeedContext
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.checkpoint import load_checkpoint
from dspark.models.drafters.drafting import ModelDrafter
from dspark.models.drafters.native import NativeDraftOptions
from dspark.models.targets.transformers import TransformersBackend
from dspark.verifier.engine import Engine

from ...verifier.toy import Scene, greedy, request, still_cost
from .plain import packed_hidden, plain_draft, plain_logits
from .scene import GREEDY, only
from .traces import (
    GAMMA,
    GOLDEN,
    NAMES,
    TOKENS,
    TOLERANCE,
    Round,
    Trace,
    block_hidden,
    load_target,
    traces,
)

PARALLEL = [name for name in NAMES if name != "eagle3"]


NATIVE = {"best": NativeDraftOptions(threads=2), "portable": NativeDraftOptions(kernels="portable")}
# What drafts: torch, or native kernels of a set, which take no eagle3.
DRAWN_BY = [(name, kernels) for name in NAMES for kernels in ("torch", *NATIVE)]
DRAWN_BY = [pair for pair in DRAWN_BY if pair[0] in PARALLEL or pair[1] == "torch"]


def drafter(name: str, **options: Any) -> ModelDrafter:
    return ModelDrafter(load_checkpoint(GOLDEN / name), **{"candidates": 0, **options})


@pytest.mark.parametrize("name", PARALLEL)
def test_hidden_states_of_packed_blocks(name: str) -> None:
    """Three blocks of one text in one pass, as training packs them."""
    model = load_checkpoint(GOLDEN / name).model
    assert isinstance(model, ParallelDrafter)
    golden = block_hidden(name)
    for p, trace in enumerate(traces(name)[:2]):
        anchors = torch.tensor([r.start for r in trace.rounds[:3]])
        blocks = model.block_ids(torch.tensor([r.anchor for r in trace.rounds[:3]]))
        at = anchors[:, None] + torch.arange(GAMMA)
        context = trace.raw(model.config.target_layer_ids)
        before = torch.arange(len(context)) < anchors.repeat_interleave(GAMMA)[:, None]
        own = torch.block_diag(*[torch.ones(GAMMA, GAMMA)] * 3).bool()
        mask = torch.cat((before, own), 1)
        hidden = packed_hidden(model, context, blocks.flatten(), at.flatten(), mask)
        for r, found in enumerate(hidden.view(3, GAMMA, -1)):
            torch.testing.assert_close(found, golden[p, r], atol=TOLERANCE, rtol=0)
            _check_block(model, found, trace.rounds[r])


def _check_block(model: ParallelDrafter, hidden: torch.Tensor, golden: Round) -> None:
    """Teacher forcing on the golden draft: each of its ids is the largest logit there."""
    before = [golden.anchor, *golden.draft[:-1]]
    base = model.base_logits(hidden)
    drawn = [
        int(plain_logits(model, hidden, base, k, before[: k + 1]).argmax()) for k in range(GAMMA)
    ]
    assert drawn == golden.draft
    if model.confidence_head is not None and model.markov_head is not None:
        rows = torch.from_numpy(model.vocabulary.index[before])
        said = model.confidence_head(hidden, model.markov_head.previous(rows))
        np.testing.assert_allclose(said, golden.confidence_logits, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_modules_draft_as_the_reference(name: str) -> None:
    model = load_checkpoint(GOLDEN / name).model
    for trace in traces(name):
        features = trace.features(model.projection())
        for golden in trace.rounds:
            ids, confidence = plain_draft(model, features, trace.text[: golden.start + 1])
            assert ids == golden.draft
            if golden.confidence_logits is not None:
                np.testing.assert_allclose(confidence, golden.confidence_logits, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "kernels"), DRAWN_BY)
def test_sessions_draft_as_the_reference(name: str, kernels: str) -> None:
    """All six prompts side by side, each round bringing only what is new."""
    model = drafter(name, native=NATIVE.get(kernels))
    assert kernels == "torch" or model.kernel.name.startswith("native-float32-")
    texts = traces(name)
    features = [trace.features(model.projection) for trace in texts]
    sent = [0] * len(texts)
    for n in range(max(len(trace.rounds) for trace in texts)):
        there = [i for i, trace in enumerate(texts) if n < len(trace.rounds)]
        asked = [
            DraftRequest(
                session=str(i),
                round=n,
                start=sent[i],
                tokens=texts[i].text[sent[i] : texts[i].rounds[n].start + 1],
                features=features[i][sent[i] : texts[i].rounds[n].start],
                output_position=1,
                sampling=GREEDY,
                gamma=GAMMA,
            )
            for i in there
        ]
        for i, reply in zip(there, model.propose(asked), strict=True):
            assert isinstance(reply, Draft)
            golden = texts[i].rounds[n]
            sent[i] = golden.start
            assert list(reply.ids) == golden.draft
            if golden.confidence_logits is not None:
                np.testing.assert_allclose(
                    reply.confidence_logits, golden.confidence_logits, atol=TOLERANCE
                )


class Recorder:
    """A drafter that another one speaks through."""

    def __init__(self, inner: ModelDrafter) -> None:
        self.said: dict[str, list[tuple[DraftRequest, Draft]]] = defaultdict(list)
        self._inner = inner

    @property
    def card(self) -> DrafterCard:
        return self._inner.card

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        replies = self._inner.propose(requests)
        for asked, reply in zip(requests, replies, strict=True):
            assert isinstance(reply, Draft)
            self.said[asked.session.split("/")[0]].append((asked, reply))
        return replies

    def close(self, session: str) -> None:
        self._inner.close(session)


@pytest.mark.parametrize(("name", "kernels"), [pair for pair in DRAWN_BY if pair[1] != "portable"])
def test_the_engine_runs_the_reference_rounds(name: str, kernels: str) -> None:
    """Greedy text is the target's alone; anchors, drafts and accepted counts are the trace's."""
    spoken = Recorder(drafter(name, native=NATIVE.get(kernels)))
    backend = TransformersBackend(load_target())
    backend.load_projection(spoken._inner.projection)
    engine = Engine(
        backend,
        EngineConfig(kv_tokens=4096, gamma=GAMMA, verify=f"fixed:{GAMMA}"),
        still_cost(),
        drafters={name: spoken},
    )
    texts = traces(name)
    answers = Scene(engine).ask(
        *(request(str(i), trace.prompt, greedy(TOKENS)) for i, trace in enumerate(texts))
    )
    assert not engine.desk.faults
    for i, (trace, answer) in enumerate(zip(texts, answers, strict=True)):
        assert (*trace.prompt, *answer.ids) == trace.output
        _check_rounds(trace, spoken.said[str(i)])
        accepted = [commit.speculation.accepted for commit in answer.commits[1:]]
        judged = [r.accepted for r in trace.judged]
        assert accepted[: len(judged)] == judged


def _check_rounds(trace: Trace, said: list[tuple[DraftRequest, Draft]]) -> None:
    # No draft is asked for where one token is left.
    assert len(trace.judged) - 1 <= len(said) <= len(trace.rounds)
    for golden, (asked, draft) in zip(trace.rounds, said, strict=False):
        assert (asked.anchor_position, asked.tokens[-1]) == (golden.start, golden.anchor)
        assert list(draft.ids) == golden.draft[: asked.gamma]  # clipped to the room that is left


def test_some_golden_drafts_stand_and_some_do_not() -> None:
    """Or the tests above would mean little."""
    for name in NAMES:
        accepted = [r.accepted for trace in traces(name) for r in trace.judged]
        assert min(accepted) == 0
        assert max(accepted) == GAMMA


def test_a_window_that_is_too_short_shows() -> None:
    """Power: the same rounds over a context that is cut short do not give the golden numbers."""
    short = drafter("dspark_markov", window=4)
    trace = traces("dspark_markov")[5]
    last = trace.rounds[-1]
    features = trace.features(short.projection)
    reply = only(
        short.propose(
            [
                DraftRequest(
                    "0", 0, 0, trace.text[: last.start + 1], features[: last.start], 1, GREEDY, 7
                )
            ]
        )
    )
    assert last.confidence_logits is not None
    assert np.abs(reply.confidence_logits - last.confidence_logits).max() > 10 * TOLERANCE
