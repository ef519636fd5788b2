"""Traced runs of an engine, as they go on and once they are over."""

from __future__ import annotations

from collections.abc import Callable

from dspark.core.requests import FinishReason, Request, SpeculationFigures
from dspark.core.traces import Round, RunTrace
from dspark.verifier.sequence import Sequence


class Traces:
    """Writes down points in time in `sequence.trace`; None is traced unless `wanted`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.wanted = False
        self._clock = clock
        self._over: list[RunTrace] = []

    def begin(self, request: Request) -> RunTrace | None:
        return RunTrace.of(request, self._clock()) if self.wanted else None

    def add_round(
        self,
        sequence: Sequence,
        began: float,
        forward_s: float,
        figures: SpeculationFigures,
        committed: int,
    ) -> None:
        """A step that committed something. began: the step, on the engine's clock."""
        trace, draft = sequence.trace, sequence.draft
        if trace is None:
            return
        trace.cached_tokens = sequence.state.cached or 0
        trace.add(
            Round(
                sequence.round,
                began,
                self._clock(),
                forward_s,
                None if draft is None else draft.asked_at,
                None if draft is None else draft.answered_at,
                "" if draft is None else draft.source,
                draft is not None and draft.linked,
                figures.drafted,
                figures.verified,
                figures.accepted,
                committed,
            )
        )

    def end(self, sequence: Sequence, reason: FinishReason, error: Exception | None) -> None:
        trace = sequence.trace
        if trace is None:
            return
        trace.ended, trace.reason = self._clock(), reason.value
        trace.error = "" if error is None else type(error).__name__
        self._over.append(trace)

    def take(self) -> list[RunTrace]:
        """Runs that are over since the last call."""
        over, self._over = self._over, []
        return over
