"""What a verifier and a drafter say of themselves before the first draft, and whether they fit.

Both sides check, so that a mistake in one of them is told by the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dspark.core.drafts import (
    MAX_GAMMA,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Drafter,
    DrafterCard,
)
from dspark.core.errors import ConfigError, ModelError
from dspark.core.plans import CalibrationTable

if TYPE_CHECKING:  # torch
    from dspark.models.targets.features import FeatureProjection

# What features travel as; "" where the drafter reads none.
FeatureDtype = Literal["", "float32", "bfloat16"]

# Bytes of one number of a feature.
ITEM_BYTES: dict[FeatureDtype, int] = {"": 0, "float32": 4, "bfloat16": 2}

# gRPC's own limit, said aloud: 3,600 bfloat16 features of 576 numbers fit.
MAX_MESSAGE_BYTES = 4 * 2**20
# Bytes of a message that are neither features nor tokens: names, trace context, sampling.
ENVELOPE_BYTES = 2048

# Bytes of a name: a session's, a verifier's, a trace context.
MAX_NAME_BYTES = 512

MAX_FEATURE_WIDTH = 65_536
MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class VerifierFacts:
    """The verifier's hello. verifier: replica id. epoch: fencing, 0 if it never registered.
    target_id, tokenizer_hash: "" if unknown. layers: decoder layers of the target."""

    verifier: str
    epoch: int
    target_id: str
    vocab_size: int
    tokenizer_hash: str
    layers: int
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class DrafterOffer:
    """The drafter's hello, and the projection behind its feature_id.

    feature_dtype: as it wants its features. max_message_bytes: of the largest message it takes.
    context_window: positions before the anchor that it reads, 0 for all.
    """

    card: DrafterCard
    feature_dtype: FeatureDtype = ""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    context_window: int = 0
    calibration: tuple[CalibrationTable, ...] = ()
    projection: FeatureProjection | None = None

    @classmethod
    def of(
        cls,
        drafter: Drafter,
        *,
        feature_dtype: FeatureDtype = "bfloat16",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> DrafterOffer:
        """As a drafter says itself; feature_dtype counts if it reads features. Raises ConfigError
        for a limit below one feature."""
        card = drafter.card
        dtype: FeatureDtype = feature_dtype if card.feature_id else ""
        least = ENVELOPE_BYTES + row_bytes(card, dtype)
        if max_message_bytes < least:
            raise ConfigError(f"max_message_bytes: {max_message_bytes} must be at least {least}")
        return cls(
            card,
            dtype,
            max_message_bytes,
            getattr(drafter, "context_window", 0),
            tuple(getattr(drafter, "calibration", ())),
            getattr(drafter, "projection", None),
        )


def row_bytes(card: DrafterCard, dtype: FeatureDtype) -> int:
    """Of one position of context on the wire, at most: its id and its feature."""
    return 5 + card.feature_width * ITEM_BYTES[dtype]


def check_fit(facts: VerifierFacts, card: DrafterCard) -> None:
    """Raises ModelError naming both sides' values where a drafter cannot serve a verifier."""
    both = (
        ("vocab_size", card.vocab_size, facts.vocab_size),
        ("target_id", card.target_id, facts.target_id),
        ("tokenizer_hash", card.tokenizer_hash, facts.tokenizer_hash),
    )
    if min(card.protocol_version, facts.protocol_version) < OLDEST_PROTOCOL_VERSION:
        raise ModelError(
            f"protocol_version: the drafter {card.drafter_id!r} has {card.protocol_version}, the "
            f"verifier {facts.verifier!r} has {facts.protocol_version}, must be at least "
            f"{OLDEST_PROTOCOL_VERSION}"
        )
    for field, drafter, verifier in both:
        if drafter and verifier and drafter != verifier:  # 0 and "" say "any"
            raise ModelError(
                f"{field}: the drafter {card.drafter_id!r} has {drafter!r}, "
                f"the verifier {facts.verifier!r} has {verifier!r}"
            )
    for layer in card.layer_ids:
        if not -1 <= layer <= facts.layers - 2:
            raise ModelError(
                f"layer_ids: the drafter {card.drafter_id!r} reads {list(card.layer_ids)}, the "
                f"verifier {facts.verifier!r} has {facts.layers} layers: [-1, {facts.layers - 2}]"
            )


def check_offer(offer: DrafterOffer) -> None:
    """Raises ModelError for what no drafter can mean."""
    card = offer.card
    for field, value, least, most in (
        ("gamma", card.gamma, 0, MAX_GAMMA),
        ("feature_width", card.feature_width, 0, MAX_FEATURE_WIDTH),
        ("layer_ids", len(card.layer_ids), 0, MAX_LAYERS),
    ):
        if not least <= value <= most:
            raise ModelError(f"{field}: the drafter says {value}, must be in [{least}, {most}]")
    reads = bool(card.feature_id)
    if reads != bool(card.feature_width) or reads != bool(offer.feature_dtype):
        raise ModelError(
            f"feature_id: the drafter says {card.feature_id!r} with a feature_width of "
            f"{card.feature_width} and features as {offer.feature_dtype or 'none'!r}"
        )
    least = ENVELOPE_BYTES + row_bytes(card, offer.feature_dtype)
    if offer.max_message_bytes < least:
        raise ModelError(
            f"max_message_bytes: the drafter says {offer.max_message_bytes}, one position takes "
            f"{least}"
        )


def sound_tables(offer: DrafterOffer) -> tuple[CalibrationTable, ...]:
    """Those of its calibration tables that are its own and can be applied."""
    return tuple(
        table
        for table in offer.calibration
        if table.drafter_id == offer.card.drafter_id and table.fault() is None
    )
