"""A projection over the wire is the drafter's own, or none at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch

from dspark.core.drafts import DrafterCard
from dspark.core.errors import ModelError, NotFound, Unavailable
from dspark.drafter.projection import projection_from_bytes, projection_to_bytes
from dspark.models.targets.features import FeatureProjection

from ..models.drafters.scene import tiny
from .wire import ToyDrafter, wired

NOISE = torch.Generator().manual_seed(3)
PROJECTION = FeatureProjection(
    (-1, 1, 2), torch.randn(8, 48, generator=NOISE), torch.randn(8, generator=NOISE), eps=3e-6
)


def card(projection: FeatureProjection = PROJECTION, width: int = 8) -> DrafterCard:
    return DrafterCard(
        "toy-1",
        "toy",
        4,
        layer_ids=projection.layer_ids,
        feature_id=projection.feature_id,
        feature_width=width,
    )


async def test_a_trained_drafters_projection_comes_over_the_wire() -> None:
    drafter = tiny("eagle3")
    async with wired(drafter) as caller:
        got = await caller.link.fetch_projection()
    assert got.feature_id == drafter.card.feature_id
    hidden = torch.randn(5, got.weight.shape[1] if got.weight is not None else 0, generator=NOISE)
    torch.testing.assert_close(got.apply(hidden), drafter.projection.apply(hidden), rtol=0, atol=0)


async def test_a_large_projection_comes_in_parts() -> None:
    large = FeatureProjection((0,), torch.randn(512, 1500, generator=NOISE))
    toy = ToyDrafter(card(large, 512), projection=large)
    async with wired(toy) as caller:
        got = await caller.link.fetch_projection()
        assert got.feature_id == large.feature_id
        with pytest.raises(ModelError, match="more than 1000000 bytes"):
            await caller.link.fetch_projection(max_bytes=1_000_000)


async def test_who_reads_no_features_has_none() -> None:
    async with wired(ToyDrafter()) as caller:
        with pytest.raises(NotFound, match="feature_id"):
            await caller.link.fetch_projection()
    with pytest.raises(Unavailable):
        await caller.link.fetch_projection()


async def test_one_that_is_not_its_cards_is_refused_with_both_ids() -> None:
    other = FeatureProjection(PROJECTION.layer_ids, torch.zeros(8, 48), eps=PROJECTION.eps)
    async with wired(ToyDrafter(card(), projection=other)) as caller:
        with pytest.raises(ModelError) as refused:
            await caller.link.fetch_projection()
    assert PROJECTION.feature_id in str(refused.value)
    assert other.feature_id in str(refused.value)


@pytest.mark.parametrize(
    "projection",
    [
        PROJECTION,
        replace(PROJECTION, norm_weight=None),
        replace(PROJECTION, weight=None),
        FeatureProjection((2,)),
        PROJECTION.to(torch.device("cpu"), torch.float32),
    ],
)
def test_there_and_back(projection: FeatureProjection) -> None:
    back = projection_from_bytes(projection_to_bytes(projection), card(projection))
    assert (back.layer_ids, back.eps) == (projection.layer_ids, projection.eps)
    for ours, theirs in (
        (back.weight, projection.weight),
        (back.norm_weight, projection.norm_weight),
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)


def file(tensors: dict[str, Any], **metadata: str) -> bytes:
    facts = {"layer_ids": json.dumps(PROJECTION.layer_ids), "eps": repr(PROJECTION.eps)}
    data: bytes = safetensors.torch.save(tensors, {**facts, **metadata})
    return data


OWN = {"weight": PROJECTION.weight, "norm_weight": PROJECTION.norm_weight}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cannot be read"),
        (b"\xff" * 100, "cannot be read"),
        (file(OWN)[:-1], "cannot be read"),
        (safetensors.torch.save(OWN), "cannot be read"),
        (file(OWN, layer_ids="no"), "cannot be read"),
        (file(OWN, layer_ids="[1]"), "layers [1], its card says [-1, 1, 2]"),
        (file(OWN, eps="x"), "cannot be read"),
        (file(OWN, eps="1e-5"), "feature_id"),
        (file({**OWN, "more": torch.ones(1)}), "'more'"),
        (file({**OWN, "weight": torch.ones(9, 48)}), "weight is torch.float32 [9, 48]"),
        (file({**OWN, "weight": torch.ones(8)}), "weight is torch.float32 [8]"),
        (file({**OWN, "norm_weight": torch.ones(8).half()}), "torch.float16"),
    ],
)
def test_what_is_no_projection_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ModelError) as refused:
        projection_from_bytes(data, card())
    assert told in str(refused.value)
