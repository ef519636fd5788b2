"""What an engine writes down of its steps for the scheduler, until a report is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark.core.requests import Request
from dspark.verifier.batcher import Item
from dspark.verifier.planning import StepPlan
from dspark.verifier.sequence import Sequence as Running
from dspark.verifier.tally import Crowd, FinishedDraft, Tally


class Ledger:
    """Sums since the last report, and the newest draft whose verdict is in. Nothing is kept before
    somebody asks for the first time, nor between `close` and the next `take`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tally: Tally | None = None
        self._seen_through = 0

    def add_step(self, items: Sequence[Item], step: StepPlan, seconds: float) -> None:
        """seconds: that the step took, drafting aside."""
        if self._tally is None:
            return
        self._tally.last_step = [item.sequence.state.request for item in items]
        self._tally.add_step(step.R, step.P, step.context, seconds - step.seconds)

    def add_round(self, sequence: Running, judged: int, accepted: int, committed: int) -> None:
        """A verdict is in, so its draft may be told of. judged: draft tokens whose verdict was seen
        and stands in the text; accepted: of the verified ones; committed: tokens."""
        if self._tally is None:
            return
        request = sequence.state.request
        self._tally.add_tokens(request.tenant, committed)
        draft = sequence.draft
        if draft is None:
            return
        self._seen_through = max(self._seen_through, draft.number)
        self._tally.drafts.append(
            FinishedDraft(
                number=draft.number,
                tenant=request.tenant,
                drafter_id=draft.drafter_id,
                mode=request.sampling.mode,
                logits=draft.draft.confidence_logits,
                survival=draft.survival,
                judged=judged,
                accepted=min(accepted, judged),
                source=draft.source,
            )
        )

    def take(
        self,
        exposed_s: dict[str, float],
        free_blocks: int,
        *,
        running: Sequence[Request],
        waiting: Sequence[Request],
    ) -> tuple[Tally, Crowd]:
        """A report's two halves: what was seen since the last call, and who is here now. exposed_s:
        `Tally.draft_s`."""
        now = self._clock()
        tally, self._tally = self._tally or Tally(now), Tally(now)
        tally.draft_s = exposed_s
        # Between two steps those that finished have left and the next are not in yet.
        present = tally.last_step or running
        return tally, Crowd.of(
            now, self._seen_through, free_blocks, running=present, waiting=waiting
        )

    def close(self) -> None:
        """Nobody asks any more."""
        self._tally = None
