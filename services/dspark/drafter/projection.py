"""A feature projection as bytes, and back with all that is checked of it."""

from __future__ import annotations

import json

import safetensors.torch
import torch
from safetensors import SafetensorError

from dspark.core.drafts import DrafterCard
from dspark.core.errors import ModelError
from dspark.models.targets.features import FeatureProjection

_NAMES = {"weight", "norm_weight"}


def projection_to_bytes(projection: FeatureProjection) -> bytes:
    """A safetensors file: float32 "weight" and "norm_weight" where there are any, and as metadata
    "layer_ids" and "eps"."""
    tensors = {
        name: tensor.detach().float().cpu().contiguous()
        for name in sorted(_NAMES)
        if (tensor := getattr(projection, name)) is not None
    }
    metadata = {"layer_ids": json.dumps(projection.layer_ids), "eps": repr(projection.eps)}
    data: bytes = safetensors.torch.save(tensors, metadata)
    return data


def projection_from_bytes(data: bytes, card: DrafterCard) -> FeatureProjection:
    """The projection of a card. Raises ModelError for bytes that are none, and for another's with
    both ids."""
    try:
        tensors = safetensors.torch.load(data)
        metadata = _metadata(data)
        projection = FeatureProjection(
            tuple(map(int, json.loads(metadata["layer_ids"]))),
            tensors.pop("weight", None),
            tensors.pop("norm_weight", None),
            float(metadata["eps"]),
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"projection of {card.drafter_id!r}: cannot be read: {error!r}") from error
    _check(projection, sorted(tensors), card)
    return projection


def _metadata(data: bytes) -> dict[str, str]:
    """Of a safetensors file: eight bytes say how long the JSON at its head is."""
    size = int.from_bytes(data[:8], "little")
    found = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    return dict(found)


def _check(projection: FeatureProjection, unknown: list[str], card: DrafterCard) -> None:
    of = f"projection of {card.drafter_id!r}"
    if unknown:
        raise ModelError(f"{of}: {unknown[0]!r} is not a known tensor")
    if projection.layer_ids != card.layer_ids:
        raise ModelError(
            f"{of}: reads the layers {list(projection.layer_ids)}, its card says "
            f"{list(card.layer_ids)}"
        )
    width = card.feature_width
    for name, tensor, shape in (
        ("weight", projection.weight, (width, None)),
        ("norm_weight", projection.norm_weight, (width,)),
    ):
        if tensor is None:
            continue
        fits = tensor.ndim == len(shape) and all(
            want in (None, have) for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits or tensor.dtype != torch.float32:
            raise ModelError(
                f"{of}: {name} is {tensor.dtype} {list(tensor.shape)}, must be float32 with "
                f"{width} rows"
            )
    if projection.feature_id != card.feature_id:
        raise ModelError(
            f"{of}: its tensors make the feature_id {projection.feature_id!r}, its card says "
            f"{card.feature_id!r}"
        )
