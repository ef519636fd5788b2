"""No drafter at all: every block is empty, and the target decodes plainly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.core.drafts import Draft, DrafterCard, DraftRequest, NeedContext


class NoneDrafter:
    def __init__(self, *, drafter_id: str = "none") -> None:
        self._card = DrafterCard(drafter_id, kind="none", gamma=0)

    @property
    def card(self) -> DrafterCard:
        return self._card

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        return [
            Draft(r.session, r.round, (), np.zeros(0, np.float32), looks_back_only=True)
            for r in requests
        ]

    def close(self, session: str) -> None:
        """Nothing is remembered."""
