"""The nouns of scheduling.proto and back, for its servicer and its clients."""

from __future__ import annotations

from dspark.client.wire_client import speculation_from_wire, speculation_to_wire
from dspark.core.drafts import PROTOCOL_VERSION
from dspark.core.errors import ConfigError, InvalidRequest
from dspark.core.leases import Lease, LeaseRequest
from dspark.core.plans import Calibration, Directions, Plan, check_plan
from dspark.core.replicas import Card, DrafterLoad, Member, Pool, VerifierCard
from dspark.core.reports import DrafterUse, Report, TenantReport, VerdictCounts
from dspark.scheduler import StepCost
from dspark.scheduling.cards_client import (
    drafter_from_wire,
    drafter_to_wire,
    mode_from_wire,
    mode_to_wire,
    replica_from_wire,
    replica_to_wire,
    table_from_wire,
    table_to_wire,
    verifier_from_wire,
    verifier_to_wire,
)
from dspark.v1 import scheduling_pb2 as pb

_POOLS = {
    Pool.GATEWAY: pb.POOL_GATEWAY,
    Pool.VERIFIER: pb.POOL_VERIFIER,
    Pool.DRAFTER: pb.POOL_DRAFTER,
}


# --- pools and members


def pool_to_wire(pool: Pool) -> pb.Pool.ValueType:
    return _POOLS[pool]


def pool_from_wire(wire: pb.Pool.ValueType) -> Pool:
    """Raises InvalidRequest."""
    for pool, known in _POOLS.items():
        if known == wire:
            return pool
    raise InvalidRequest("pool", int(wire), "is not one of: gateway, verifier, drafter")


def register_to_wire(member: Member, step_cost: StepCost | None) -> pb.RegisterRequest:
    wire = pb.RegisterRequest(
        protocol_version=PROTOCOL_VERSION,
        pool=pool_to_wire(member.pool),
        replica=replica_to_wire(member.replica),
        calibration=map(table_to_wire, member.calibration),
    )
    _set_card(wire, member.card)
    if step_cost is not None:
        wire.step_cost.CopyFrom(step_cost_to_wire(step_cost))
    return wire


def member_to_wire(member: Member) -> pb.Member:
    wire = pb.Member(
        pool=pool_to_wire(member.pool),
        replica=replica_to_wire(member.replica),
        draining=member.draining,
    )
    _set_card(wire, member.card)
    return wire


def member_from_wire(wire: pb.Member | pb.RegisterRequest) -> Member:
    tables = wire.calibration if isinstance(wire, pb.RegisterRequest) else ()
    return Member(
        pool_from_wire(wire.pool),
        replica_from_wire(wire.replica),
        _card_from_wire(wire),
        wire.draining if isinstance(wire, pb.Member) else False,
        tuple(map(table_from_wire, tables)),
    )


def _set_card(wire: pb.Member | pb.RegisterRequest, card: Card | None) -> None:
    if isinstance(card, VerifierCard):
        wire.verifier.CopyFrom(verifier_to_wire(card))
    elif card is not None:
        wire.drafter.CopyFrom(drafter_to_wire(card))


def _card_from_wire(wire: pb.Member | pb.RegisterRequest) -> Card | None:
    kind = wire.WhichOneof("card")
    if kind == "verifier":
        return verifier_from_wire(wire.verifier)
    return drafter_from_wire(wire.drafter) if kind == "drafter" else None


def step_cost_to_wire(cost: StepCost) -> pb.StepCost:
    return pb.StepCost(
        tokens=cost.tokens,
        table_s=cost.table_s,
        per_sequence_s=cost.per_sequence_s,
        per_context_token_s=cost.per_context_token_s,
        per_verified_sequence_s=cost.per_verified_sequence_s,
    )


def step_cost_from_wire(wire: pb.StepCost) -> StepCost:
    """Raises InvalidRequest naming what no step can cost."""
    try:
        return StepCost(
            tuple(wire.tokens),
            tuple(wire.table_s),
            wire.per_sequence_s,
            wire.per_context_token_s,
            wire.per_verified_sequence_s,
        )
    except ConfigError as error:
        raise InvalidRequest("step_cost", f"{len(wire.tokens)} points", str(error)) from None


def load_to_wire(load: DrafterLoad) -> pb.DrafterLoad:
    return pb.DrafterLoad(
        sessions=load.sessions,
        queue=load.queue,
        tokens_per_s=load.tokens_per_s,
        capacity_tokens_per_s=load.capacity_tokens_per_s,
    )


def load_from_wire(wire: pb.DrafterLoad) -> DrafterLoad:
    return DrafterLoad(wire.sessions, wire.queue, wire.tokens_per_s, wire.capacity_tokens_per_s)


# --- leases


def lease_request_to_wire(request: LeaseRequest) -> pb.AcquireLeaseRequest:
    return pb.AcquireLeaseRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        owner=request.owner,
        owner_epoch=request.owner_epoch,
        model=request.model,
        tenant=request.tenant,
        priority=request.priority,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        choices=request.choices,
        prefix_hashes=request.prefix_hashes,
        speculation=speculation_to_wire(request.speculation),
        floor_tps=request.floor_tps,
        deadline_s=request.deadline_s,
        exclude=request.exclude,
    )


def lease_request_from_wire(wire: pb.AcquireLeaseRequest) -> LeaseRequest:
    return LeaseRequest(
        request_id=wire.request_id,
        attempt=wire.attempt,
        owner=wire.owner,
        owner_epoch=wire.owner_epoch,
        prompt_tokens=wire.prompt_tokens,
        model=wire.model,
        tenant=wire.tenant,
        priority=wire.priority,
        max_tokens=wire.max_tokens if wire.HasField("max_tokens") else None,
        choices=wire.choices or 1,
        prefix_hashes=tuple(wire.prefix_hashes),
        speculation=speculation_from_wire(wire.speculation),
        floor_tps=wire.floor_tps,
        deadline_s=wire.deadline_s if wire.HasField("deadline_s") else None,
        exclude=tuple(wire.exclude),
    )


def lease_to_wire(lease: Lease) -> pb.Lease:
    return pb.Lease(
        lease_id=lease.lease_id,
        request_id=lease.request_id,
        tenant=lease.tenant,
        verifier=replica_to_wire(lease.verifier),
        drafter=None if lease.drafter is None else replica_to_wire(lease.drafter),
        tokens=lease.tokens,
        ttl_ms=lease.ttl_ms,
        choices=lease.choices,
    )


def lease_from_wire(wire: pb.Lease) -> Lease:
    return Lease(
        wire.lease_id,
        wire.request_id,
        wire.tenant,
        replica_from_wire(wire.verifier),
        wire.tokens,
        wire.ttl_ms,
        replica_from_wire(wire.drafter) if wire.HasField("drafter") else None,
        wire.choices or 1,
    )


# --- reports


def report_to_wire(report: Report) -> pb.Report:
    return pb.Report(
        protocol_version=PROTOCOL_VERSION,
        verifier=report.verifier,
        epoch=report.epoch,
        seen_through=report.seen_through,
        interval_s=report.interval_s,
        steps=report.steps,
        requests=report.requests,
        prefill_tokens=report.prefill_tokens,
        context=report.context,
        step_residual_s=report.step_residual_s,
        free_blocks=report.free_blocks,
        queue=report.queue,
        tenants=[
            pb.TenantReport(
                tenant=tenant.tenant,
                active=tenant.active,
                queued=tenant.queued,
                tokens=tenant.tokens,
                floor_tps=tenant.floor_tps,
                survivals=tenant.survivals,
                verdicts=map(_verdicts_to_wire, tenant.verdicts),
            )
            for tenant in report.tenants
        ],
        drafters=[
            pb.DrafterUse(drafter=use.drafter, drafted=use.drafted, exposed_s=use.exposed_s)
            for use in report.drafters
        ],
        verdicts_through=report.verdicts_through,
    )


def report_from_wire(wire: pb.Report) -> Report:
    """Values are checked by the scheduler. Raises InvalidRequest for verdicts that are no table."""
    return Report(
        verifier=wire.verifier,
        epoch=wire.epoch,
        seen_through=wire.seen_through,
        interval_s=wire.interval_s,
        steps=wire.steps,
        requests=wire.requests,
        prefill_tokens=wire.prefill_tokens,
        context=wire.context,
        step_residual_s=wire.step_residual_s,
        free_blocks=wire.free_blocks,
        queue=wire.queue,
        tenants=tuple(
            TenantReport(
                tenant=tenant.tenant,
                active=tenant.active,
                queued=tenant.queued,
                tokens=tenant.tokens,
                floor_tps=tenant.floor_tps,
                survivals=tuple(tenant.survivals),
                verdicts=tuple(map(_verdicts_from_wire, tenant.verdicts)),
            )
            for tenant in wire.tenants
        ),
        drafters=tuple(
            DrafterUse(use.drafter, use.drafted, use.exposed_s) for use in wire.drafters
        ),
        verdicts_through=wire.verdicts_through,
    )


def _verdicts_to_wire(counts: VerdictCounts) -> pb.VerdictCounts:
    return pb.VerdictCounts(
        drafter_id=counts.drafter_id,
        mode=mode_to_wire(counts.mode),
        bins=len(counts.reached[0]) if counts.reached else 0,
        reached=[count for row in counts.reached for count in row],
        accepted=[count for row in counts.accepted for count in row],
    )


def _verdicts_from_wire(wire: pb.VerdictCounts) -> VerdictCounts:
    bins = wire.bins
    if bins < 1 or len(wire.reached) % bins or len(wire.accepted) != len(wire.reached):
        shape = f"{len(wire.reached)} and {len(wire.accepted)} counts in {bins} bins"
        raise InvalidRequest("verdicts", shape, "must be two tables [γ, bins] of one shape")

    def rows(counts: list[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(counts[at : at + bins]) for at in range(0, len(counts), bins))

    return VerdictCounts(
        wire.drafter_id,
        mode_from_wire(wire.mode),
        rows(list(wire.reached)),
        rows(list(wire.accepted)),
    )


# --- plans


def plan_to_wire(plan: Plan) -> pb.Plan:
    directions = plan.directions(None)
    assert directions is not None  # no draft, no barrier
    return pb.Plan(
        version=plan.version,
        verifier=plan.verifier,
        epoch=plan.epoch,
        seen_through=plan.seen_through,
        ttl_ms=max(round(1000 * plan.ttl_s), 1),
        requests=directions.requests,
        capacity=directions.capacity,
        caps=directions.caps,
        weights=directions.weights,
        draft_budgets=plan.draft_budgets,
        shares=plan.shares,
        calibration=None if plan.calibration is None else calibration_to_wire(plan.calibration),
        protocol_version=PROTOCOL_VERSION,
    )


def plan_from_wire(wire: pb.Plan) -> Plan:
    """Raises InvalidRequest for numbers that no planner makes."""
    plan = Plan(
        version=wire.version,
        verifier=wire.verifier,
        epoch=wire.epoch,
        seen_through=wire.seen_through,
        ttl_s=wire.ttl_ms / 1000,
        _directions=Directions(
            requests=wire.requests,
            capacity=wire.capacity if wire.HasField("capacity") else None,
            caps=dict(wire.caps),
            weights=dict(wire.weights),
        ),
        draft_budgets=dict(wire.draft_budgets),
        shares=dict(wire.shares),
        calibration=calibration_from_wire(wire.calibration)
        if wire.HasField("calibration")
        else None,
    )
    check_plan(plan)
    return plan


def calibration_to_wire(calibration: Calibration) -> pb.Calibration:
    return pb.Calibration(
        version=calibration.version,
        tables=map(table_to_wire, calibration.tables),
    )


def calibration_from_wire(wire: pb.Calibration) -> Calibration:
    return Calibration(wire.version, tuple(map(table_from_wire, wire.tables)))
