"""A run that begins with the weights of a drafter trained before: on more data, or on one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch

from dspark.core.errors import ConfigError
from dspark.models.drafters.checkpoint import load_checkpoint
from dspark.models.drafters.target_tensors import TargetTensors
from dspark.models.drafters.trunk import Trunk
from dspark.training.run_state import trained

# What may differ: a longer block and another draft vocabulary need no other weights.
_FREE = {"gamma", "draft_vocab_size"}
# Tables with a row for each id of the draft vocabulary.
_BEFORE, _AFTER = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@torch.no_grad()
def begin_as(drafter: Trunk, place: Path, target: TargetTensors) -> None:
    """Copy the trained weights of the checkpoint `place` into a new drafter of the same form.

    Ids that its draft vocabulary lacked begin as the one row that stood for them all where they
    come before, and without bias where they come after. Raises ModelError for a checkpoint that
    does not load, ConfigError for another form, with both values.
    """
    held = load_checkpoint(place, target).model
    for field in fields(drafter.config):
        asked, found = (getattr(d.config, field.name) for d in (drafter, held))
        if field.name not in _FREE and asked != found:
            raise ConfigError(
                f"drafter.initial: {place} has {field.name} = {found!r}, this run {asked!r}"
            )
    theirs: Mapping[str, torch.Tensor] = dict(held.named_parameters())
    row = torch.from_numpy(held.vocabulary.index[drafter.vocabulary.ids])
    known = row < len(held.vocabulary)
    for name, ours in trained(drafter).items():
        given = theirs[name]
        if name == _BEFORE:
            ours[: len(row)] = given[row]
            ours[len(row) :] = given[-1]
        elif name == _AFTER:
            ours.zero_()
            ours[known] = given[row[known]]
        else:
            ours.copy_(given)
