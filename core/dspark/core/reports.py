"""What a verifier saw since its last report (scheduling.proto).

Drafts are in it only once their verdict is: a plan made from reports must not know what a step that
uses it could still admit (design.md §4, L2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.core.sampling import SamplingMode

SURVIVAL_BINS = 64
# Equal bins of the raw confidence logit, the outermost open. Equal bins of σ would be too coarse
# near 1 to fit a temperature.
CONFIDENCE_BINS = 20
CONFIDENCE_LOGITS = (-4.5, 7.5)

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerdictCounts:
    """Verdicts of one drafter in one mode, for calibration, by bins of the raw confidence logit.

    reached: [γ][bins] draft tokens that were verified and had all before them accepted; accepted:
    those of them that stood. Trimmed and rejected-before positions are in neither: what was not
    seen is left out, not guessed.
    """

    drafter_id: str
    mode: SamplingMode
    reached: tuple[Counts, ...]
    accepted: tuple[Counts, ...]


@dataclass(frozen=True, slots=True)
class TenantReport:
    """active, queued: its runs in steps and waiting, now. tokens: committed in the interval.
    floor_tps: sum of its active runs' floors. survivals: [SURVIVAL_BINS] tokens of finished drafts
    by survival a_k in equal bins of [0, 1]; empty for none."""

    tenant: str
    active: int = 0
    queued: int = 0
    tokens: int = 0
    floor_tps: float = 0.0
    survivals: Counts = ()
    verdicts: tuple[VerdictCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterUse:
    """What a verifier had of one drafter replica. drafted: draft tokens received. exposed_s: mean
    seconds a round waited for its draft, the part not hidden behind other work."""

    drafter: str
    drafted: int
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """seen_through: highest sequence number of a draft in this report or an earlier one.
    interval_s, steps: what it covers; without a step the means say nothing. requests (R),
    prefill_tokens (P), context, step_residual_s (measured − predicted): means of a step.
    free_blocks, queue: now. verdicts_through: names the verdicts in it, which several reports may
    tell, by the newest draft among them; 0: seen_through does."""

    verifier: str
    epoch: int
    seen_through: int
    interval_s: float
    steps: int = 0
    requests: float = 0.0
    prefill_tokens: float = 0.0
    context: float = 0.0
    step_residual_s: float = 0.0
    free_blocks: int = 0
    queue: int = 0
    tenants: tuple[TenantReport, ...] = ()
    drafters: tuple[DrafterUse, ...] = field(default=())
    verdicts_through: int = 0
