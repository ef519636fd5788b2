"""What an engine has done, as plain numbers flushed once a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dspark.core.requests import SpeculationFigures
from dspark.verifier.planning import StepPlan


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


@dataclass(slots=True)
class Figures:
    """Totals since the engine started. Seconds are wall time of its thread."""

    steps: int = 0
    prefill_tokens: int = 0
    committed_tokens: int = 0
    residual_fallbacks: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    draft_s: float = 0.0
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)

    def add_step(self, clock: Stopwatch, step: StepPlan, draft_s: float) -> None:
        """draft_s: seconds spent in drafters since the engine started."""
        self.steps += 1
        self.prefill_tokens += step.P
        self.step_s += clock.total
        self.forward_s += clock.laps["forward"]
        self.draft_s = draft_s

    def add_commit(self, tokens: int, speculation: SpeculationFigures, fallbacks: int) -> None:
        self.committed_tokens += tokens
        self.residual_fallbacks += fallbacks
        self.speculation += speculation

    @property
    def added_s(self) -> float:
        """Seconds spent on anything but the model's and the drafters' own work."""
        return self.step_s - self.forward_s - self.draft_s
