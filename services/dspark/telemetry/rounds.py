"""Where a round's time goes, read from the spans of traced requests.

A round is what lies between two commits of one request. With its draft made elsewhere:

    commit ── asked ───────── drafter has it ── answered ── step ── commit
              │← wire →│← drafter: queue, pass →│← wire →│← wait →│← verify →│

and `rest` is what is left of it: from the commit to the asking, mostly the rest of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from dspark.telemetry.tracing import Attributes, Span

# In this order wherever they are shown.
PARTS = ("draft", "wire", "wait", "verify", "rest")


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Milliseconds. draft: in the drafter, its queue counted. wire: from asking to the answer, less
    that; 0 where drafter and verifier are one process. wait: from the answer to the step. drafted:
    whether there was a draft at all; linked: of another process."""

    total: float
    draft: float
    wire: float
    wait: float
    verify: float
    drafted: bool
    linked: bool

    @property
    def rest(self) -> float:
        return max(self.total - self.draft - self.wire - self.wait - self.verify, 0.0)


def round_times(spans: Iterable[Span]) -> Iterator[RoundTime]:
    """Of every round that its decode span tells of. A draft that was made elsewhere and whose span
    is not there counts as wire as a whole."""
    drafts: dict[tuple[str, object], float] = {}
    decodes = []
    for span in spans:
        if span.name == "dspark.draft":
            spent = (span.end - span.start) / 1e6
            drafts[span.parent, span.attributes["dspark.round"]] = spent
        elif span.name == "dspark.decode":
            decodes.append(span)
    for span in decodes:
        for event in span.events:
            if event.name == "dspark.round":
                told = event.attributes
                drafter = drafts.get((span.context.span_id, told["dspark.round"]))
                yield _round_time(told, drafter)


def _round_time(told: Attributes, drafter_ms: float | None) -> RoundTime:
    answer_ms = _number(told, "dspark.draft_ms")
    linked = bool(told.get("dspark.linked", False))
    drafter = min(drafter_ms or 0.0, answer_ms) if linked else answer_ms
    return RoundTime(
        total=_number(told, "dspark.total_ms"),
        draft=drafter,
        wire=answer_ms - drafter,
        wait=_number(told, "dspark.wait_ms"),
        verify=_number(told, "dspark.verify_ms"),
        drafted="dspark.draft_ms" in told,
        linked=linked,
    )


def means(rounds: Iterable[RoundTime]) -> Mapping[str, float]:
    """Milliseconds of each part, and `total`, of the mean round. Empty for no rounds."""
    rounds = list(rounds)
    if not rounds:
        return {}
    return {part: fmean(getattr(r, part) for r in rounds) for part in (*PARTS, "total")}


def _number(told: Attributes, name: str) -> float:
    value = told.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
