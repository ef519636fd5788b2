"""A packed pass is what the drafter does when it serves, for every kind; and who sees whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core.drafts import DraftRequest
from dspark.models.drafters.backbone import ParallelDrafter
from dspark.training.examples import Example
from dspark.training.losses import Weights
from dspark.training.packing import Pack, choose_anchors, pack
from dspark.training.passes import greedy_blocks, run, stands, supervised

from ..models.drafters.scene import GREEDY, KINDS, SOME_IDS, V, only, tiny, tiny_drafter
from .scene import example, layout

KIND = pytest.mark.parametrize("kind", sorted(KINDS))


def layers_of(kind: str) -> tuple[int, ...]:
    return tiny_drafter(kind).config.target_layer_ids


def examples(kind: str, count: int = 3) -> list[Example]:
    like = layout(layers_of(kind))
    return [example(4 + 3 * i, 9 + 4 * i, seed=i, like=like) for i in range(count)]


def anchors(examples: list[Example], most: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [choose_anchors(e.prompt_tokens, len(e.token_ids), most, rng) for e in examples]


def logits(kind: str, one: Pack) -> torch.Tensor:
    passed = run(tiny_drafter(kind), one)
    return passed.logits(passed.hidden)


@KIND
def test_greedy_blocks_of_a_pack_are_the_drafts_it_would_serve(kind: str) -> None:
    """Training sees the same context, positions and tokens as serving does."""
    made = examples(kind)
    at = anchors(made)
    model = tiny_drafter(kind)
    gamma = model.config.gamma
    found = greedy_blocks(model, pack(made, at, gamma)).tolist()
    served = tiny(kind)
    expected = []
    for number, (one, places) in enumerate(zip(made, at, strict=True)):
        with torch.inference_mode():
            features = model.project(one.features.float()).numpy()
        for place in places.tolist():
            request = DraftRequest(
                session=f"{number}.{place}",
                round=0,
                start=0,
                tokens=tuple(one.token_ids[: place + 1].tolist()),
                features=features[:place],
                output_position=1,
                sampling=GREEDY,
                gamma=gamma,
            )
            expected.append(list(only(served.propose([request])).ids))
    assert found == expected


@KIND
def test_what_is_trained_is_what_proposes(kind: str) -> None:
    """Given its own draft as the text, the likeliest ids of the trained pass are that draft."""
    made = examples(kind)
    model = tiny_drafter(kind)
    gamma = model.config.gamma
    for one in made:
        place = one.prompt_tokens + 1
        (block,) = greedy_blocks(model, pack([one], [np.array([place])], gamma))
        ids = one.token_ids.clone()
        ids[place + 1 :][:gamma] = block.int()
        found = logits(kind, pack([replace(one, token_ids=ids)], [np.array([place])], gamma))
        assert model.vocabulary.ids[found[0].argmax(-1).numpy()].tolist() == block.tolist()


@KIND
def test_a_pack_gives_what_its_sequences_give_alone(kind: str) -> None:
    made = examples(kind)
    at = anchors(made)
    gamma = tiny_drafter(kind).config.gamma
    together = logits(kind, pack(made, at, gamma))
    alone = [logits(kind, pack([e], [a], gamma)) for e, a in zip(made, at, strict=True)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@KIND
def test_a_block_sees_context_before_its_anchor_and_no_other_block(kind: str) -> None:
    """Everything from the anchor's features on may change, and other blocks may come and go; what
    comes before the anchor may not."""
    (made,) = examples(kind, 1)
    gamma, place = tiny_drafter(kind).config.gamma, made.prompt_tokens + 3
    before = logits(kind, pack([made], [np.array([place])], gamma))

    features = made.features.clone()
    features[place:] = 9.0
    other = replace(made, features=features)
    assert torch.equal(logits(kind, pack([other], [np.array([place])], gamma)), before)

    crowd = np.array([place - 2, place, place + 1])
    assert torch.allclose(logits(kind, pack([made], [crowd], gamma))[1:2], before, atol=1e-5)

    features = made.features.clone()
    features[place - 1] = 9.0
    other = replace(made, features=features)
    assert not torch.allclose(logits(kind, pack([other], [np.array([place])], gamma)), before)


@KIND
def test_position_k_sees_the_tokens_before_it_and_none_after(kind: str) -> None:
    """x_k may change without moving what predicts x_1..x_k."""
    (made,) = examples(kind, 1)
    gamma, place = tiny_drafter(kind).config.gamma, made.prompt_tokens + 1
    before = logits(kind, pack([made], [np.array([place])], gamma))
    for k in range(1, gamma):
        ids = made.token_ids.clone()
        ids[place + k] = (ids[place + k] + 1) % V
        after = logits(kind, pack([replace(made, token_ids=ids)], [np.array([place])], gamma))
        assert torch.equal(after[:, :k], before[:, :k])
        if kind in ("markov", "gated", "rnn", "eagle3"):
            assert not torch.allclose(after[:, k], before[:, k])


@pytest.mark.parametrize("kind", ["markov", "dflash"])
def test_the_packed_pass_is_the_dense_one_with_a_mask(kind: str) -> None:
    """torch's own attention with all pairs written out in its mask."""
    (made,) = examples(kind, 1)
    model = tiny_drafter(kind)
    assert isinstance(model, ParallelDrafter)
    gamma, (at,) = model.config.gamma, anchors([made])
    one = pack([made], [at], gamma)
    T, A = len(one.token_ids), len(at)
    mask = torch.zeros(A * gamma, T + A * gamma, dtype=torch.bool)
    for block, place in enumerate(at.tolist()):
        rows = slice(block * gamma, (block + 1) * gamma)
        mask[rows, :place] = True
        mask[rows, T + block * gamma : T + (block + 1) * gamma] = True
    context = model.context_keys_values(model.project(one.features.float()), one.positions)

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = context[layer]
        seen = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            torch.cat((keys, key)).transpose(0, 1),
            torch.cat((values, value)).transpose(0, 1),
            mask,
            enable_gqa=True,
        )
        return seen.transpose(0, 1)

    positions = torch.from_numpy(at)[:, None] + torch.arange(gamma)
    dense = model.block_hidden(
        model.block_ids(one.ids[:, 0]).flatten(), positions.flatten(), attend
    )
    packed = run(model, one).hidden["hidden"]
    assert torch.allclose(packed.flatten(0, 1), dense, atol=1e-5)


def test_labels_and_distributions_belong_to_the_tokens_after_the_anchor() -> None:
    """A reduced vocabulary: places, -1 for what it lacks, and nothing beyond the end of a text."""
    made = example(5, 9)
    model = tiny_drafter("reduced")
    gamma = model.config.gamma
    at = np.array([5, 10])
    one = pack([made], [at], gamma)
    row = supervised(model, one, Weights(position_decay=4.0))
    place = {int(v): i for i, v in enumerate(SOME_IDS)}
    for n, (anchor, k) in enumerate((a, k) for a in at.tolist() for k in range(gamma)):
        token = anchor + 1 + k
        if token >= 14:
            assert row.w[n] == 0
            assert row.labels[n] == -1
            assert row.target.top_p[n].sum() + row.target.tail[n] == 0
            continue
        assert float(row.w[n]) == pytest.approx(np.exp(-k / 4.0))
        assert int(row.labels[n]) == place.get(int(made.token_ids[token]), -1)
        kept = made.target.top_ids[token - 5].tolist()
        assert row.target.top_ids[n].tolist() == [place.get(i, -1) for i in kept]
        assert torch.equal(row.target.top_p[n], made.target.top_p[token - 5].float())


def test_anchors_are_answer_tokens_that_another_follows() -> None:
    rng = np.random.default_rng(0)
    assert choose_anchors(5, 9, 100, rng).tolist() == [5, 6, 7]
    assert len(choose_anchors(5, 6, 100, rng)) == 0
    many = choose_anchors(5, 300, 20, rng)
    assert len(set(many.tolist())) == 20
    assert (np.diff(many) > 0).all()
    assert many.min() >= 5
    assert many.max() <= 298


def test_a_block_stands_up_to_its_first_wrong_token() -> None:
    one = pack([example(5, 9)], [np.array([5, 11])], 5)
    right = one.ids[:, 1:].clone()
    assert stands(right, one).tolist() == [5, 2]  # two tokens are left after the anchor 11
    right[0, 2] += 1
    assert stands(right, one).tolist() == [2, 2]
