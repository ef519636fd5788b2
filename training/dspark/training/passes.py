"""One pass of a drafter of any kind over a pack: hidden states and heads of every block token.

Positions are teacher-forced: x_{k-1} is the text's own token, as in the public code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dspark.models.drafters.autoregressive import AutoregressiveDrafter
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.models.drafters.trunk import Trunk
from dspark.training.examples import Target
from dspark.training.losses import Rows, Weights
from dspark.training.packed_attention import PackedAttention
from dspark.training.packing import Pack


@dataclass(frozen=True, slots=True)
class Passed:
    """hidden: tensors [A, γ, ·] that `logits` makes [.., Vd] from, row by row. confidence: logits
    [A, γ] of eq. 7, or None."""

    hidden: dict[str, torch.Tensor]
    logits: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    confidence: torch.Tensor | None = None


def run(drafter: Trunk, pack: Pack) -> Passed:
    """The pass of any trained kind. Of an autoregressive one each step reads the state of the step
    before (EAGLE-3's training-time test)."""
    if isinstance(drafter, ParallelDrafter):
        return _parallel(drafter, pack)
    assert isinstance(drafter, AutoregressiveDrafter)
    return _chained(drafter, pack)


def _parallel(drafter: ParallelDrafter, pack: Pack) -> Passed:
    gamma = pack.gamma
    first = pack.positions[pack.anchors]
    kept = drafter.context_keys_values(drafter.project(pack.features.float()), pack.positions)
    positions = first[:, None] + torch.arange(gamma, device=first.device)
    hidden = drafter.block_hidden(
        drafter.block_ids(pack.ids[:, 0])[:, :gamma].flatten(),
        positions.flatten(),
        PackedAttention(pack, kept, first),
    )
    hidden = hidden.view(len(pack.anchors), gamma, -1)
    parts = {"hidden": hidden}
    head, previous = drafter.markov_head, None
    if head is not None:
        rows = _index(drafter, pack)[pack.ids[:, :-1]]
        parts["latent"] = head.latents(rows, hidden)
        previous = head.previous(rows)
    confidence = None
    if drafter.confidence_head is not None:
        reads = previous if drafter.config.confidence_reads_prev else None
        confidence = drafter.confidence_head(hidden, reads)

    def logits(rows: dict[str, torch.Tensor]) -> torch.Tensor:
        base = drafter.base_logits(rows["hidden"])
        return base if head is None else base + head.markov_w2(rows["latent"])

    return Passed(parts, logits, confidence)


def _chained(drafter: AutoregressiveDrafter, pack: Pack) -> Passed:
    """x_1 comes of the pair (state before the anchor, anchor), which is context for all later ones;
    x_k of (own state, x_{k-1}), one rotary position on."""
    features = drafter.project(pack.features.float())
    following = pack.token_ids.roll(-1)  # of a sequence's last token another's first: never seen
    kept = drafter.context_keys_values(features, pack.positions, following)
    before = pack.anchors - 1
    first = pack.positions[before]
    attend = PackedAttention(pack, kept, first, chained=True)
    state, states = features[before], []
    for k in range(pack.gamma):
        state = drafter.step(state, pack.ids[:, k], first + k, attend)
        states.append(state)

    def logits(rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return drafter.step_logits(rows["hidden"])

    return Passed({"hidden": torch.stack(states, 1)}, logits)


def supervised(drafter: Trunk, pack: Pack, weights: Weights) -> Rows:
    """A·γ rows of a pack in places of the drafter's vocabulary."""
    index = _index(drafter, pack)
    places = len(drafter.vocabulary)
    outside = places if not drafter.vocabulary.is_whole else -2

    def placed(ids: torch.Tensor) -> torch.Tensor:
        at = index[ids]
        return at.masked_fill(at == outside, -1)

    k = torch.arange(pack.gamma, device=pack.ids.device)
    w = torch.exp(-k / weights.position_decay) * pack.valid
    labels = placed(pack.ids[:, 1:]).masked_fill(~pack.valid, -1)
    target = pack.target
    return Rows(
        labels.flatten(), Target(placed(target.top_ids), target.top_p, target.tail), w.flatten()
    )


def _index(drafter: Trunk, pack: Pack) -> torch.Tensor:
    return torch.from_numpy(drafter.vocabulary.index).to(pack.ids.device)


@torch.inference_mode()
def greedy_blocks(drafter: Trunk, pack: Pack, *, rows: int = 2048) -> torch.Tensor:
    """What the drafter proposes at each anchor when it goes by its own tokens: ids int64 [A, γ]."""
    ids = torch.from_numpy(drafter.vocabulary.ids).to(pack.ids.device)
    if isinstance(drafter, AutoregressiveDrafter):
        return _greedy_chain(drafter, pack, ids)
    assert isinstance(drafter, ParallelDrafter)
    passed = _parallel(drafter, pack)
    head, index = drafter.markov_head, _index(drafter, pack)
    found = []
    for hidden in torch.split(passed.hidden["hidden"], max(rows // pack.gamma, 1)):
        if head is None:
            found.append(ids[drafter.base_logits(hidden).argmax(-1)])
            continue
        last = pack.ids[sum(map(len, found)) :][: len(hidden), 0]
        prepared, state, block = head.prepare(hidden), head.start(hidden[:, 0]), []
        for k in range(pack.gamma):
            latent, state = head.latent(head.previous(index[last]), prepared[:, k], state)
            z = drafter.base_logits(hidden[:, k]) + head.markov_w2(latent)
            last = ids[z.argmax(-1)]
            block.append(last)
        found.append(torch.stack(block, 1))
    return torch.cat(found)


def _greedy_chain(drafter: AutoregressiveDrafter, pack: Pack, ids: torch.Tensor) -> torch.Tensor:
    features = drafter.project(pack.features.float())
    kept = drafter.context_keys_values(features, pack.positions, pack.token_ids.roll(-1))
    before = pack.anchors - 1
    first = pack.positions[before]
    attend = PackedAttention(pack, kept, first, chained=True)
    state, last, block = features[before], pack.ids[:, 0], []
    for k in range(pack.gamma):
        state = drafter.step(state, last, first + k, attend)
        last = ids[drafter.step_logits(state).argmax(-1)]
        block.append(last)
    return torch.stack(block, 1)


def stands(drafted: torch.Tensor, pack: Pack) -> torch.Tensor:
    """How many drafted tokens equal the text's, up to the first that does not: int64 [A]."""
    right = (drafted == pack.ids[:, 1:]) & pack.valid
    return right.long().cumprod(1).sum(1)
