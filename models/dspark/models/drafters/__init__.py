"""Drafters: what proposes blocks. This door needs no torch; kinds with weights are their own."""

from dspark.models.drafters.ngram import NgramDrafter
from dspark.models.drafters.none import NoneDrafter

__all__ = ["NgramDrafter", "NoneDrafter"]
