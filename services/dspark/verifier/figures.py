"""What an engine has done, as plain numbers flushed once a step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dspark.core.drafts import MAX_GAMMA
from dspark.core.requests import SpeculationFigures
from dspark.telemetry.readings import STEP_BUCKETS
from dspark.verifier.planning import StepPlan

# Weight of the newest step in the mean residual.
RESIDUAL_RATE = 0.05


class Stopwatch:
    """Wall seconds of a step and of named parts of it."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._begin = time.perf_counter()

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.laps[name] = time.perf_counter() - begin

    @property
    def total(self) -> float:
        return time.perf_counter() - self._begin


def _by_length() -> tuple[list[int], list[int], list[int]]:
    return [0] * (MAX_GAMMA + 1), [0] * (MAX_GAMMA + 1), [0] * (MAX_GAMMA + 1)


@dataclass(slots=True)
class Figures:
    """Totals since the engine started. Seconds are wall time of its thread, draft_wait_s those that
    it stood still for drafts from elsewhere, on the engine's clock. by_length: rounds with a draft
    by how many of its tokens were drafted, verified, accepted. step_buckets: steps by the first of
    STEP_BUCKETS that they do not exceed. residual_s: measured minus predicted step time, running
    mean; residual_abs_s: its distance from 0, summed."""

    steps: int = 0
    prefill_tokens: int = 0
    committed_tokens: int = 0
    residual_fallbacks: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    draft_s: float = 0.0
    draft_wait_s: float = 0.0
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)
    by_length: tuple[list[int], list[int], list[int]] = field(default_factory=_by_length)
    step_buckets: list[int] = field(default_factory=lambda: [0] * len(STEP_BUCKETS))
    residual_s: float = 0.0
    residual_abs_s: float = 0.0

    def add_step(self, clock: Stopwatch, step: StepPlan, seconds: float, draft_s: float) -> None:
        """seconds: of the step, drafting aside. draft_s: spent in drafters since the engine
        started."""
        total = clock.total
        self.steps += 1
        self.prefill_tokens += step.P
        self.step_s += total
        self.step_buckets[bisect_left(STEP_BUCKETS, total)] += 1
        self.forward_s += clock.laps["forward"]
        self.draft_s = draft_s
        residual = seconds - step.seconds
        self.residual_s += RESIDUAL_RATE * (residual - self.residual_s)
        self.residual_abs_s += abs(residual)

    def add_commit(self, tokens: int, speculation: SpeculationFigures, fallbacks: int) -> None:
        self.committed_tokens += tokens
        self.residual_fallbacks += fallbacks
        self.speculation += speculation
        if speculation.drafted:
            drafted, verified, accepted = self.by_length
            drafted[speculation.drafted] += 1
            verified[speculation.verified] += 1
            accepted[speculation.accepted] += 1

    @property
    def added_s(self) -> float:
        """Seconds spent on anything but the model's and the drafters' own work."""
        return self.step_s - self.forward_s - self.draft_s
