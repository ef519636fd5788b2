"""What a drafter is worth: τ, acceptance by position, and what a threshold would keep (§4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.scheduler.sts import confidence
from dspark.training.calibration import auc
from dspark.training.records import Records, records
from dspark.training.rounds import Answer

# The paper's domains (Table 1), by the name of a benchmark's file.
DOMAINS = {
    "gsm8k": "math",
    "math500": "math",
    "aime25": "math",
    "mbpp": "code",
    "humaneval": "code",
    "livecodebench": "code",
    "mt-bench": "chat",
    "alpaca": "chat",
    "arena-hard": "chat",
}
# Of single confidences, as in Figure 5.
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


@dataclass(frozen=True, slots=True)
class Asked:
    """One benchmark's answers at one temperature."""

    benchmark: str
    temperature: float
    answers: Sequence[Answer]

    @property
    def domain(self) -> str:
        return DOMAINS.get(self.benchmark, self.benchmark)


def figures(asked: Sequence[Asked], gamma: int, scaling: NDArray[np.float64]) -> dict[str, Any]:
    """All figures of some answers together. scaling [2, γ]: of the calibration in use."""
    answers = [answer for one in asked for answer in one.answers if answer.error is None]
    failed = sum(len(one.answers) for one in asked) - len(answers)
    found = records((r for answer in answers for r in answer.rounds), gamma)
    rounds = len(found)
    accepted = int(found.accepted.sum())
    reached, stood = found.reached.sum(0), (found.reached & found.stood).sum(0)
    c = confidence(np.where(found.reached, found.logits, 0.0), scaling)
    return {
        "answers": len(answers),
        "failed": failed,
        "tokens": sum(len(answer.ids) for answer in answers),
        "rounds": rounds,
        "drafted": int(found.known.sum()),
        "accepted": accepted,
        "tau": 1.0 + accepted / rounds if rounds else float("nan"),
        "reached_by_position": reached.tolist(),
        "accepted_by_position": stood.tolist(),
        "acceptance_by_position": _ratios(stood, reached),
        "survival_by_position": _ratios((found.known & found.stood).sum(0), found.known.sum(0)),
        "auc_by_position": [
            auc(c[found.reached[:, k], k], found.stood[found.reached[:, k], k])
            for k in range(gamma)
        ],
        "thresholds": thresholds(found, scaling),
    }


def thresholds(found: Records, scaling: NDArray[np.float64]) -> list[dict[str, float]]:
    """For each threshold on c_k: a block is kept up to the first token below it; how many of the
    kept tokens stand and fall, and the tokens a round commits (Figure 5)."""
    known = found.known
    c = np.where(known, confidence(np.where(known, found.logits, 0.0), scaling), -1.0)
    rows = []
    for threshold in THRESHOLDS:
        kept = np.logical_and.accumulate(c >= threshold, axis=1)
        verified = kept.sum(1)
        accepted = np.minimum(verified, found.accepted)
        # What comes after a token that falls is verified for nothing, too.
        rows.append(
            {
                "threshold": threshold,
                "verified": int(verified.sum()),
                "accepted": int(accepted.sum()),
                "rejected": int((verified - accepted).sum()),
                "acceptance": _ratio(accepted.sum(), verified.sum()),
                "tau": 1.0 + _ratio(accepted.sum(), len(found)),
            }
        )
    return rows


def report(
    asked: Sequence[Asked], gamma: int, by_mode: Mapping[str, NDArray[np.float64]]
) -> list[dict[str, Any]]:
    """Figures by temperature: each benchmark, each domain, all. by_mode: scaling of "greedy"
    and of the sampling mode that was used, under "sampled"."""
    found = []
    for temperature in sorted({one.temperature for one in asked}):
        some = [one for one in asked if one.temperature == temperature]
        scaling = by_mode["sampled" if temperature else "greedy"]
        found.append(
            {
                "temperature": temperature,
                "benchmarks": {one.benchmark: figures([one], gamma, scaling) for one in some},
                "domains": {
                    domain: figures([one for one in some if one.domain == domain], gamma, scaling)
                    for domain in dict.fromkeys(one.domain for one in some)
                },
                "all": figures(some, gamma, scaling),
            }
        )
    return found


def _ratios(above: NDArray[np.int64], below: NDArray[np.int64]) -> list[float]:
    return [_ratio(a, b) for a, b in zip(above.tolist(), below.tolist(), strict=True)]


def _ratio(above: float, below: float) -> float:
    return float(above) / float(below) if below else float("nan")
