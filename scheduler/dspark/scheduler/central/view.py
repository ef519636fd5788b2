"""What a scheduler replica last saw of the cluster, as routing and planning want it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dspark.core.drafts import DrafterCard
from dspark.core.errors import InvalidRequest
from dspark.core.replicas import DrafterLoad, Member, VerifierCard
from dspark.core.reports import Report
from dspark.scheduler.central.codec import Codec
from dspark.scheduler.fleet import DrafterState, Fleet, VerifierState
from dspark.scheduler.intake import check_report
from dspark.scheduler.step_cost import StepCost
from dspark.scheduler.store import Claim, Members, Store, Usage


@dataclass(slots=True)
class View:
    """members: all pools. reports: by verifier, the newest, checked. costs: by verifier, with the
    epoch they are of. refused: reports that could not be read, by why."""

    members: Members = field(default_factory=lambda: Members(-1, ()))
    reports: dict[str, Report] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage({}, {}, {}))
    costs: dict[str, tuple[int, StepCost]] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=lambda: Fleet(()))
    refused: Counter[str] = field(default_factory=Counter)

    async def look(self, store: Store, codec: Codec) -> None:
        """See everything anew. Raises what the store raises, and then keeps what it had."""
        members = await store.members(known=self.members.version)
        self.usage = await store.usage()
        stored = await store.reports()
        self.members = members or self.members
        lacking = [
            member.replica.replica_id
            for member in self._with(VerifierCard)
            if self.costs.get(member.replica.replica_id, (-1,))[0] != member.replica.epoch
        ]
        known = self.costs | (await store.step_costs(lacking) if lacking else {})
        alive = {member.replica.replica_id for member in self._with(VerifierCard)}
        self.costs = {name: cost for name, cost in known.items() if name in alive}
        reports = {}
        for entry in stored:
            try:
                reports[entry.verifier] = check_report(codec.read_report(entry.data))
            except InvalidRequest as error:
                self.refused[error.field] += 1
        self.reports = reports
        self.fleet = Fleet(self.verifiers(), self.drafters())

    def verifiers(self) -> list[VerifierState]:
        states = []
        for member in self._with(VerifierCard):
            name, card = member.replica.replica_id, member.card
            assert isinstance(card, VerifierCard)
            claim = self.usage.claims.get(name, Claim())
            report = self.reports.get(name)
            epoch, cost = self.costs.get(name, (-1, None))
            states.append(
                VerifierState(
                    replica=member.replica,
                    card=card,
                    claimed_tokens=claim.tokens,
                    claimed_runs=claim.runs,
                    draining=member.draining,
                    report=report if report and report.epoch == member.replica.epoch else None,
                    step_cost=cost if epoch == member.replica.epoch else None,
                )
            )
        return states

    def drafters(self) -> list[DrafterState]:
        states = []
        for member in self._with(DrafterCard):
            assert isinstance(member.card, DrafterCard)
            load = self.usage.loads.get(member.replica.replica_id, DrafterLoad())
            states.append(DrafterState(member.replica, member.card, load, member.draining))
        return states

    def _with(self, card: type[VerifierCard] | type[DrafterCard]) -> list[Member]:
        return [member for member in self.members.members if isinstance(member.card, card)]
