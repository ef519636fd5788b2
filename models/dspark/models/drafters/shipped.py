"""Drafters that come with dspark, and which one `auto` is."""

from __future__ import annotations

from pathlib import Path

AUTO = "auto"
_PLACE = Path(__file__).parent / "weights"


def shipped() -> dict[str, Path]:
    """Checkpoints in this package, by the catalogue name of the target each was trained for."""
    return {place.name: place for place in sorted(_PLACE.glob("*")) if place.is_dir()}


def chosen_drafter(drafter: str, model: str) -> str:
    """What a configuration's drafter stands for: `auto` is the checkpoint that comes with dspark
    for a model called so, and ngram where there is none."""
    if drafter != AUTO:
        return drafter
    return str(shipped().get(model, "ngram"))
