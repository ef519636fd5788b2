"""What a scheduler replica last saw of the cluster, as routing and planning want it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from dspark.core.drafts import DrafterCard
from dspark.core.errors import InvalidRequest
from dspark.core.replicas import DrafterLoad, Member, VerifierCard
from dspark.core.reports import Report
from dspark.scheduler.central.codec import Codec
from dspark.scheduler.fleet import DrafterState, Fleet, VerifierState
from dspark.scheduler.intake import check_member, check_report
from dspark.scheduler.step_cost import StepCost
from dspark.scheduler.store import Claim, Members, Store, StoredReport, Usage

_Read = tuple[StoredReport, Report]


@dataclass(slots=True)
class View:
    """members: all pools. reports: by verifier, the newest, checked. costs: by verifier, with the
    epoch they are of. refused: reports and members that could not be read, by why. sound: members
    that requests can be routed to; another scheduler's replica may have let in others."""

    members: Members = field(default_factory=lambda: Members(-1, ()))
    reports: dict[str, Report] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage({}, {}, {}))
    costs: dict[str, tuple[int, StepCost]] = field(default_factory=dict)
    sound: tuple[Member, ...] = ()
    fleet: Fleet = field(default_factory=lambda: Fleet(()))
    refused: Counter[str] = field(default_factory=Counter)
    _read: dict[str, _Read] = field(default_factory=dict)
    _taken: dict[str, _Read] = field(default_factory=dict)

    def took(self, stored: StoredReport, report: Report) -> None:
        """A report that this replica has put into the store need not be read from there."""
        self._taken[stored.verifier] = stored, report

    async def look(self, store: Store, codec: Codec) -> None:
        """See everything anew. Raises what the store raises, and then keeps what it had."""
        members = await store.members(known=self.members.version) or self.members
        usage = await store.usage()
        stored = await store.reports()
        sound = self.sound if members is self.members else self._checked(members)
        verifiers = [m.replica for m in sound if isinstance(m.card, VerifierCard)]
        lacking = [
            replica.replica_id
            for replica in verifiers
            if self.costs.get(replica.replica_id, (-1,))[0] != replica.epoch
        ]
        known = self.costs | (await store.step_costs(lacking) if lacking else {})
        alive = {replica.replica_id for replica in verifiers}
        self.members, self.sound, self.usage = members, sound, usage
        self.costs = {name: cost for name, cost in known.items() if name in alive}
        taken, self._taken = self._taken, {}
        # In threads: of many it takes a while, and requests wait for their leases meanwhile.
        self._read = await asyncio.to_thread(self._reading, stored, codec, taken)
        self.reports = {name: report for name, (_, report) in self._read.items()}
        self.fleet = await asyncio.to_thread(Fleet, self.verifiers(), self.drafters())

    def _checked(self, members: Members) -> tuple[Member, ...]:
        sound = []
        for member in members.members:
            try:
                sound.append(check_member(member))
            except InvalidRequest as error:
                self.refused[error.field] += 1
        return tuple(sound)

    def _reading(
        self, stored: list[StoredReport], codec: Codec, taken: dict[str, _Read]
    ) -> dict[str, _Read]:
        """What is still as it was is not read again."""
        read: dict[str, _Read] = {}
        for entry in stored:
            name = entry.verifier
            for known in (self._read.get(name), taken.get(name)):
                if known is not None and known[0] == entry:
                    read[name] = known
                    break
            else:
                try:
                    read[name] = entry, check_report(codec.read_report(entry.data))
                except InvalidRequest as error:
                    self.refused[error.field] += 1
        return read

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
        return [member for member in self.sound if isinstance(member.card, card)]
