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
from dspark.core.errors import InvalidRequest
from dspark.core.replicas import Described
from dspark.core.requests import Committed, Finished, FinishReason, Request
from dspark.scheduling.cards_client import (
    drafter_from_wire,
    replica_from_wire,
    verifier_from_wire,
)
from dspark.v1 import verification_pb2 as pb

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
            drafter=pb.Replica(replica_id=request.drafter) if request.drafter else None,
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
    return Described(
        replica_from_wire(wire.replica),
        verifier_from_wire(wire.card),
        tuple(map(drafter_from_wire, wire.drafters)),
        wire.draining,
        wire.heartbeat_ms / 1000 or HEARTBEAT_S,
    )
