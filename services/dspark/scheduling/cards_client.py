"""Replicas, their cards and calibration on the wire and back, for every servicer and client that
names them."""

from __future__ import annotations

from dspark.core.drafts import DrafterCard
from dspark.core.errors import InvalidRequest
from dspark.core.plans import CalibrationTable
from dspark.core.replicas import Replica, VerifierCard
from dspark.core.requests import Limits
from dspark.core.sampling import SamplingMode
from dspark.v1 import drafting_pb2
from dspark.v1 import verification_pb2 as pb

_MODES = {
    SamplingMode.GREEDY: drafting_pb2.SAMPLING_MODE_GREEDY,
    SamplingMode.REJECTION: drafting_pb2.SAMPLING_MODE_REJECTION,
    SamplingMode.COUPLED: drafting_pb2.SAMPLING_MODE_COUPLED,
}


def replica_to_wire(replica: Replica) -> pb.Replica:
    return pb.Replica(replica_id=replica.replica_id, address=replica.address, epoch=replica.epoch)


def replica_from_wire(wire: pb.Replica) -> Replica:
    return Replica(wire.replica_id, wire.address, wire.epoch)


def verifier_to_wire(card: VerifierCard) -> pb.VerifierCard:
    return pb.VerifierCard(
        model=card.model,
        target_id=card.target_id,
        tokenizer_hash=card.tokenizer_hash,
        backend=card.backend,
        limits=pb.Limits(
            vocab_size=card.limits.vocab_size,
            context_length=card.limits.context_length,
            kv_tokens=card.limits.kv_tokens,
        ),
        block_size=card.block_size,
        max_sequences=card.max_sequences,
        max_waiting=card.max_waiting,
    )


def verifier_from_wire(wire: pb.VerifierCard) -> VerifierCard:
    limits = wire.limits
    return VerifierCard(
        model=wire.model,
        target_id=wire.target_id,
        tokenizer_hash=wire.tokenizer_hash,
        backend=wire.backend,
        limits=Limits(limits.vocab_size, limits.context_length, limits.kv_tokens),
        block_size=wire.block_size,
        max_sequences=wire.max_sequences,
        max_waiting=wire.max_waiting,
    )


def drafter_to_wire(card: DrafterCard) -> drafting_pb2.DrafterCard:
    return drafting_pb2.DrafterCard(
        drafter_id=card.drafter_id,
        kind=card.kind,
        gamma=card.gamma,
        vocab_size=card.vocab_size,
        target_id=card.target_id,
        tokenizer_hash=card.tokenizer_hash,
        layer_ids=card.layer_ids,
        feature_id=card.feature_id,
        feature_width=card.feature_width,
        protocol_version=card.protocol_version,
    )


def drafter_from_wire(wire: drafting_pb2.DrafterCard) -> DrafterCard:
    return DrafterCard(
        drafter_id=wire.drafter_id,
        kind=wire.kind,
        gamma=wire.gamma,
        vocab_size=wire.vocab_size,
        target_id=wire.target_id,
        tokenizer_hash=wire.tokenizer_hash,
        layer_ids=tuple(wire.layer_ids),
        feature_id=wire.feature_id,
        feature_width=wire.feature_width,
        protocol_version=wire.protocol_version,
    )


def mode_to_wire(mode: SamplingMode) -> drafting_pb2.SamplingMode.ValueType:
    return _MODES[mode]


def mode_from_wire(wire: drafting_pb2.SamplingMode.ValueType) -> SamplingMode:
    """Raises InvalidRequest."""
    for mode, known in _MODES.items():
        if known == wire:
            return mode
    raise InvalidRequest("mode", int(wire), "is not one of: greedy, rejection, coupled")


def table_to_wire(table: CalibrationTable) -> drafting_pb2.CalibrationTable:
    return drafting_pb2.CalibrationTable(
        drafter_id=table.drafter_id,
        mode=mode_to_wire(table.mode),
        temperatures=table.temperatures,
        offsets=table.offsets,
    )


def table_from_wire(wire: drafting_pb2.CalibrationTable) -> CalibrationTable:
    """Raises InvalidRequest for its mode; the numbers are the reader's to check."""
    return CalibrationTable(
        wire.drafter_id, mode_from_wire(wire.mode), tuple(wire.temperatures), tuple(wire.offsets)
    )
