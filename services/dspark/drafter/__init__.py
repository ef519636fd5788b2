"""Drafting over the wire: a drafter's service, and a verifier's link to it."""

from dspark.drafter.batching import BatchingConfig
from dspark.drafter.client import RemoteDrafter
from dspark.drafter.handshake import DrafterOffer, VerifierFacts
from dspark.drafter.runner import DraftRunner
from dspark.drafter.servicer import DraftingServicer

__all__ = [
    "BatchingConfig",
    "DraftRunner",
    "DrafterOffer",
    "DraftingServicer",
    "RemoteDrafter",
    "VerifierFacts",
]
