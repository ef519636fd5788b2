"""What a gateway says of its model, as the pools behind it are now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import replace

from dspark.core.drafts import DrafterCard
from dspark.core.errors import DsparkError, Unavailable
from dspark.core.replicas import Described, Member, Pool, VerifierCard
from dspark.core.requests import Limits
from dspark.gateway.gateway import ServedModel
from dspark.scheduling.client import SchedulingClient

log = logging.getLogger(__name__)

# Seconds between two tries to hear of the pools.
AGAIN_S = 0.2


def served_model(model: ServedModel, members: Iterable[Member]) -> ServedModel | None:
    """`model` with the limits that hold on every one of its verifiers and the drafters that they
    may ask; None if there is no verifier. All of `members` fit."""
    cards = [member.card for member in members]
    verifiers = [card for card in cards if isinstance(card, VerifierCard)]
    if not verifiers:
        return None
    limits = [card.limits for card in verifiers]
    drafters = {card.drafter_id: card for card in cards if isinstance(card, DrafterCard)}
    return replace(
        model,
        target_id=verifiers[0].target_id,
        limits=Limits(
            min(limit.vocab_size for limit in limits),
            min(limit.context_length for limit in limits),
            min(limit.kv_tokens for limit in limits),
        ),
        drafters=tuple({**{c.drafter_id: c for c in model.drafters}, **drafters}.values()),
    )


class Served:
    """Follows the pools for as long as `follow` runs.

    model: as it begins: its name, and the drafters that verifiers have in their own process.
    tokenizer_hash: of this gateway's. on_change: told each new model. waits_for: why there is none
    yet, "" once there was one.
    """

    def __init__(
        self, model: ServedModel, tokenizer_hash: str, on_change: Callable[[ServedModel], None]
    ) -> None:
        self.waits_for = "no verifier has registered yet"
        self._first = model
        self._tokenizer_hash = tokenizer_hash
        self._on_change = on_change
        self._told: set[str] = set()

    async def follow(self, scheduler: SchedulingClient) -> None:
        """Until it is cancelled; while no scheduler answers the model stays as it is."""
        while True:
            try:
                async with aclosing(scheduler.watch((Pool.VERIFIER, Pool.DRAFTER))) as lists:
                    async for members in lists:
                        self.take(members)
            except DsparkError as error:
                log.debug("the pools are not told now: %s", error)
                if self.waits_for and not self._told:
                    self.waits_for = f"no scheduler has answered yet: {error}"
            await asyncio.sleep(AGAIN_S)

    def take(self, members: Collection[Member]) -> None:
        """The members of both pools now."""
        fitting = []
        for member in members:
            wrong = self.misfit(member.card) if isinstance(member.card, VerifierCard) else ""
            if not wrong:
                fitting.append(member)
                continue
            told = f"verifier {member.replica.replica_id}: {wrong}"
            if told not in self._told:
                log.error("%s; it is not used", told)
            self._told.add(told)
            self.waits_for = self.waits_for and told
        model = served_model(self._first, fitting)
        if model is not None:
            self.waits_for = ""
            self._on_change(model)

    def misfit(self, card: VerifierCard) -> str:
        """What of a verifier does not fit this gateway, with both values; "" if nothing."""
        for name, theirs, ours in (
            ("model", card.model, self._first.name),
            ("tokenizer_hash", card.tokenizer_hash, self._tokenizer_hash),
        ):
            if theirs != ours:
                return f"its {name} is {theirs!r}, this gateway's {ours!r}"
        return ""

    def expect(self, described: Described) -> None:
        """Raises Unavailable for a verifier that does not fit: there may be others."""
        if wrong := self.misfit(described.card):
            raise Unavailable(f"verifier {described.replica.replica_id}: {wrong}")
