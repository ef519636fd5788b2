"""A cluster's status as a message and back."""

from __future__ import annotations

from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.replicas import DrafterLoad
from dspark.core.status import CalibrationDrift, ClusterStatus, MemberStatus, VerifierLoad
from dspark.scheduling.cards_client import mode_from_wire, mode_to_wire
from dspark.scheduling.wire_client import (
    load_from_wire,
    load_to_wire,
    member_from_wire,
    member_to_wire,
)
from dspark.v1 import scheduling_pb2 as pb


def status_to_wire(status: ClusterStatus) -> pb.StatusResponse:
    return pb.StatusResponse(
        protocol_version=PROTOCOL_VERSION,
        scheduler=status.scheduler,
        leads=status.leads,
        members=map(_member_to_wire, status.members),
        seen_s=status.seen_s,
        store_away_s=status.store_away_s,
        plans=status.plans,
        following=status.following,
        calibration=status.calibration,
        drift=[
            pb.CalibrationDrift(
                drafter_id=drift.drafter_id,
                mode=mode_to_wire(drift.mode),
                error=drift.error,
                noise=drift.noise,
            )
            for drift in status.drift
        ],
    )


def status_from_wire(wire: pb.StatusResponse) -> ClusterStatus:
    return ClusterStatus(
        scheduler=wire.scheduler,
        leads=wire.leads,
        members=tuple(map(_member_from_wire, wire.members)),
        seen_s=wire.seen_s if wire.HasField("seen_s") else None,
        store_away_s=wire.store_away_s if wire.HasField("store_away_s") else None,
        plans=wire.plans,
        following=wire.following,
        calibration=wire.calibration,
        drift=tuple(
            CalibrationDrift(d.drafter_id, mode_from_wire(d.mode), d.error, d.noise)
            for d in wire.drift
        ),
    )


def _member_to_wire(status: MemberStatus) -> pb.MemberStatus:
    wire = pb.MemberStatus(
        member=member_to_wire(status.member),
        runs=status.runs,
        claimed_tokens=status.claimed_tokens,
    )
    if isinstance(status.load, DrafterLoad):
        wire.drafter.CopyFrom(load_to_wire(status.load))
    elif status.load is not None:
        wire.verifier.CopyFrom(_verifier_to_wire(status.load))
    return wire


def _member_from_wire(wire: pb.MemberStatus) -> MemberStatus:
    load: VerifierLoad | DrafterLoad | None = None
    if wire.WhichOneof("load") == "verifier":
        load = _verifier_from_wire(wire.verifier)
    elif wire.WhichOneof("load") == "drafter":
        load = load_from_wire(wire.drafter)
    return MemberStatus(member_from_wire(wire.member), wire.runs, wire.claimed_tokens, load)


def _verifier_to_wire(load: VerifierLoad) -> pb.VerifierLoad:
    return pb.VerifierLoad(
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        blocks=load.blocks,
        steps_per_s=load.steps_per_s,
        tokens_per_s=load.tokens_per_s,
        accepted_length=load.accepted_length,
        drafted_per_s=load.drafted_per_s,
        draft_wait_s=load.draft_wait_s,
        step_residual_s=load.step_residual_s,
    )


def _verifier_from_wire(wire: pb.VerifierLoad) -> VerifierLoad:
    return VerifierLoad(
        wire.running,
        wire.waiting,
        wire.free_blocks,
        wire.blocks,
        wire.steps_per_s,
        wire.tokens_per_s,
        wire.accepted_length,
        wire.drafted_per_s,
        wire.draft_wait_s,
        wire.step_residual_s,
    )
