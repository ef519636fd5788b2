"""The gateway's half of verification.proto: runs out, events and cards in."""

from __future__ import annotations

from dspark.client.wire_client import (
    error_from_wire,
    figures_from_wire,
    logprobs_from_wire,
    reason_from_wire,
    sampling_to_wire,
    speculation_to_wire,
    usage_from_wire,
)
from dspark.core.drafts import DrafterCard
from dspark.core.errors import InvalidRequest
from dspark.core.requests import Committed, Finished, FinishReason, Limits, Request
from dspark.v1 import drafting_pb2
from dspark.v1 import verification_pb2 as pb
from dspark.verifier.card import Described, Replica, VerifierCard

# Request id, choice, attempt.
Name = tuple[str, int, int]

# Of a verifier that does not say.
HEARTBEAT_S = 1.0


def name_of(request: Request) -> Name:
    return request.request_id, request.choice, request.attempt


def name_from_wire(key: pb.RunKey) -> Name:
    return key.request_id, key.choice, key.attempt


def key_to_wire(name: Name) -> pb.RunKey:
    request_id, choice, attempt = name
    return pb.RunKey(request_id=request_id, choice=choice, attempt=attempt)


def run_to_wire(request: Request, now: float) -> pb.Run:
    """now: on the clock of the request's deadline. Raises InvalidRequest for a number that its
    field cannot hold."""
    try:
        return pb.Run(
            key=key_to_wire(name_of(request)),
            lease=request.lease,
            epoch=request.epoch,
            prompt_ids=request.prompt_ids,
            committed_ids=request.committed_ids,
            sampling=sampling_to_wire(request.sampling),
            speculation=speculation_to_wire(request.speculation),
            deadline_s=None if request.deadline is None else request.deadline - now,
            tenant=request.tenant,
            priority=request.priority,
            floor_tps=request.floor_tps,
            traceparent=request.traceparent,
        )
    except ValueError as error:
        raise InvalidRequest(
            "request", request.request_id, f"has a value out of range: {error}"
        ) from error


def committed_from_wire(wire: pb.Committed) -> Committed:
    return Committed(
        wire.index,
        tuple(wire.ids),
        logprobs_from_wire(wire.logprobs),
        figures_from_wire(wire.speculation),
        wire.cached_tokens,
    )


def finished_from_wire(wire: pb.Finished) -> Finished:
    reason = reason_from_wire(wire.reason)
    return Finished(
        reason,
        usage_from_wire(wire.usage),
        figures_from_wire(wire.speculation),
        error_from_wire(wire.error) if reason is FinishReason.ERROR else None,
    )


def described_from_wire(wire: pb.DescribeResponse) -> Described:
    replica, card, limits = wire.replica, wire.card, wire.card.limits
    return Described(
        Replica(replica.replica_id, replica.address, replica.epoch),
        VerifierCard(
            model=card.model,
            target_id=card.target_id,
            tokenizer_hash=card.tokenizer_hash,
            backend=card.backend,
            limits=Limits(limits.vocab_size, limits.context_length, limits.kv_tokens),
            block_size=card.block_size,
            max_sequences=card.max_sequences,
            max_waiting=card.max_waiting,
        ),
        tuple(map(_drafter_from_wire, wire.drafters)),
        wire.draining,
        wire.heartbeat_ms / 1000 or HEARTBEAT_S,
    )


def _drafter_from_wire(wire: drafting_pb2.DrafterCard) -> DrafterCard:
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
