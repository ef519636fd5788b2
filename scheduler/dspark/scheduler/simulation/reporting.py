"""What a simulated verifier tells the scheduler each interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.core.reports import (
    SURVIVAL_BINS,
    DrafterUse,
    Report,
    TenantReport,
    VerdictCounts,
)
from dspark.core.sampling import SamplingMode
from dspark.scheduler.simulation.drafters import CHECKPOINT
from dspark.scheduler.simulation.planning import Step
from dspark.scheduler.simulation.profiles import FloatArray, IntArray
from dspark.scheduler.simulation.rows import Rows
from dspark.scheduler.sts import tally


class Tally:
    """Sums since the last report. Drafts are in it once their verdict is."""

    def __init__(self, tenants: Sequence[str], gamma: int, mode: SamplingMode) -> None:
        self._tenants = tenants
        self._gamma = gamma
        self._mode = mode
        self._since = 0.0
        self._seen_through = 0
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._requests = self._prefill = self._context = 0
        self._residual_s = 0.0
        self._tokens = np.zeros(len(self._tenants))
        self._drafts: list[tuple[IntArray, FloatArray, FloatArray, IntArray, IntArray]] = []
        self._used: dict[str, int] = {}
        self._exposed_s = 0.0
        self._rounds = 0

    def add(self, rows: Rows, step: Step, accepted: IntArray, residual_s: float) -> None:
        """A step's verdicts, before they are written into the rows."""
        self._steps += 1
        self._requests += step.R
        self._prefill += step.P
        self._context += step.context
        self._residual_s += residual_s
        drafted = rows.block[step.at] > 0
        at = step.at[drafted]
        if not len(at):
            return
        self._seen_through = max(self._seen_through, int(rows.number[at].max()))
        # Judged is what was verified, up to the first that fell.
        judged = np.minimum(step.lengths, accepted + 1)[drafted]
        alive = np.where(
            np.arange(self._gamma) < rows.block[at][:, None], rows.survival[at], np.nan
        )
        self._drafts.append(
            (rows.tenant[at], rows.logits[at], alive, judged, np.minimum(accepted[drafted], judged))
        )

    def add_tokens(self, tenants: IntArray, tokens: IntArray) -> None:
        self._tokens += np.bincount(tenants, tokens, len(self._tokens))

    def add_drafts(self, drafter: str, tokens: int, rounds: int) -> None:
        self._used[drafter] = self._used.get(drafter, 0) + tokens
        self._rounds += rounds

    def add_exposed(self, seconds: float, rounds: int) -> None:
        self._exposed_s += seconds * rounds

    def report(
        self,
        verifier: str,
        epoch: int,
        now: float,
        *,
        active: IntArray,
        queued: IntArray,
        floors: Sequence[float],
        free_tokens: int,
    ) -> Report:
        """The report, and a new interval begins."""
        steps = max(self._steps, 1)
        exposed_s = self._exposed_s / self._rounds if self._rounds else 0.0
        report = Report(
            verifier=verifier,
            epoch=epoch,
            seen_through=self._seen_through,
            interval_s=max(now - self._since, 1e-6),
            steps=self._steps,
            requests=self._requests / steps,
            prefill_tokens=self._prefill / steps,
            context=self._context / steps,
            step_residual_s=self._residual_s / steps,
            free_blocks=max(free_tokens, 0) // 16,
            queue=int(queued.sum()),
            tenants=self._told_of_tenants(active, queued, floors),
            drafters=tuple(
                DrafterUse(name, tokens, exposed_s) for name, tokens in sorted(self._used.items())
            ),
        )
        self._clear()
        self._since = now
        return report

    def _told_of_tenants(
        self, active: IntArray, queued: IntArray, floors: Sequence[float]
    ) -> tuple[TenantReport, ...]:
        tenant = np.concatenate([d[0] for d in self._drafts]) if self._drafts else np.zeros(0)
        told = []
        for t, name in enumerate(self._tenants):
            mine = np.flatnonzero(tenant == t)
            if not (active[t] or queued[t] or self._tokens[t] or len(mine)):
                continue
            told.append(
                TenantReport(
                    tenant=name,
                    active=int(active[t]),
                    queued=int(queued[t]),
                    tokens=int(self._tokens[t]),
                    floor_tps=float(active[t] * floors[t]),
                    survivals=self._histogram(mine),
                    verdicts=self._verdicts(mine),
                )
            )
        return tuple(told)

    def _histogram(self, mine: IntArray) -> tuple[int, ...]:
        if not len(mine):
            return ()
        alive = np.concatenate([d[2] for d in self._drafts])[mine]
        alive = alive[np.isfinite(alive)]
        bins = np.minimum((alive * SURVIVAL_BINS).astype(np.intp), SURVIVAL_BINS - 1)
        return tuple(np.bincount(bins, minlength=SURVIVAL_BINS).tolist())

    def _verdicts(self, mine: IntArray) -> tuple[VerdictCounts, ...]:
        if not len(mine):
            return ()
        logits, judged, accepted = (
            np.concatenate([d[i] for d in self._drafts])[mine] for i in (1, 3, 4)
        )
        reached, stood = tally(logits, judged, accepted)
        used = int(judged.max(initial=0))
        if not used:
            return ()
        rows = [tuple(map(tuple, counts[:used].tolist())) for counts in (reached, stood)]
        return (VerdictCounts(CHECKPOINT, self._mode, rows[0], rows[1]),)
