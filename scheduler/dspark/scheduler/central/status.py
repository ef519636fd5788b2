"""What a scheduler replica answers to whoever asks how the cluster is (`dspark top`, `status`)."""

from __future__ import annotations

from collections.abc import Iterable

from dspark.core.drafts import DrafterCard
from dspark.core.replicas import DrafterLoad, Member, VerifierCard
from dspark.core.reports import Report
from dspark.core.status import MemberStatus, VerifierLoad
from dspark.scheduler.central.view import View
from dspark.scheduler.fleet import Pace
from dspark.scheduler.store import Claim


def members_of(view: View) -> Iterable[MemberStatus]:
    """Everybody alive, with what leases claim of them and what they last said."""
    for member in view.members.members:
        name = member.replica.replica_id
        claim = view.usage.claims.get(name, Claim())
        yield MemberStatus(member, claim.runs, claim.tokens, _load(view, member))


def _load(view: View, member: Member) -> VerifierLoad | DrafterLoad | None:
    name = member.replica.replica_id
    if isinstance(member.card, DrafterCard):
        return view.usage.loads.get(name)
    report = view.reports.get(name) if name in view.fleet.index else None  # else its card is none
    if isinstance(member.card, VerifierCard) and report and report.epoch == member.replica.epoch:
        return verifier_load(member.card, report)
    return None


def verifier_load(card: VerifierCard, report: Report) -> VerifierLoad:
    drafted = sum(use.drafted for use in report.drafters)
    # A round's wait, weighed by how much each drafter was used.
    waited = sum(use.drafted * use.exposed_s for use in report.drafters)
    decoded = report.steps * report.requests > 0
    return VerifierLoad(
        running=sum(tenant.active for tenant in report.tenants),
        waiting=report.queue,
        free_blocks=report.free_blocks,
        blocks=card.limits.kv_tokens // card.block_size,
        steps_per_s=report.steps / report.interval_s,
        tokens_per_s=sum(tenant.tokens for tenant in report.tenants) / report.interval_s,
        accepted_length=Pace.of(report).tau if decoded else 0.0,
        drafted_per_s=drafted / report.interval_s,
        draft_wait_s=waited / drafted if drafted else 0.0,
        step_residual_s=report.step_residual_s,
    )
