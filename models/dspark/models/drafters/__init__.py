"""Drafters: what proposes blocks. This door needs no torch: kinds with weights load it."""

from dspark.models.drafters.loading import load_drafter, make_drafter
from dspark.models.drafters.ngram import NgramDrafter
from dspark.models.drafters.none import NoneDrafter

__all__ = ["NgramDrafter", "NoneDrafter", "load_drafter", "make_drafter"]
