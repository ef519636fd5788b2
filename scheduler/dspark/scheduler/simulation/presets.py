"""Presets: DeepSeek-V4-Flash and V4-Pro as the DSpark paper's Figures 7 and 8 have them.

A preset's step cost is fitted to the paper's MTP-1 points alone (`MTP1`), by
`benchmarks/fit_presets.py`, and frozen here; DSpark's points are for comparison and nothing was
adjusted to them. Everything is of one GPU. docs/simulation.md says where each number comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.core.errors import ConfigError
from dspark.scheduler.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Curve:
    """T(B) = fixed_s + experts_s · (1 − exp(−B / experts_tokens)) + token_s · B.

    fixed_s: what is read and done once a step. experts_s: reading all experts; a step of B tokens
    reads those that its tokens choose, e-folding at experts_tokens. token_s: computing and reading
    the cache of a token.
    """

    fixed_s: float
    experts_s: float
    experts_tokens: float
    token_s: float

    def seconds(self, B: float) -> float:
        experts = self.experts_s * -math.expm1(-B / self.experts_tokens)
        return self.fixed_s + experts + self.token_s * B

    def step_cost(self, most: int = 4096) -> StepCost:
        """On a grid of 12 points an octave, up to `most` tokens."""
        grid = sorted({round(2 ** (i / 12)) for i in range(math.floor(12 * math.log2(most)) + 1)})
        return StepCost(tuple(grid), tuple(self.seconds(B) for B in grid))


@dataclass(frozen=True, slots=True)
class Paper:
    """Figures 7 and 8, read off the plots by eye (about 3 % of full scale); the gains are the
    paper's own percentages. mtp1_speed: (tokens/s/user, tokens/s/GPU) of the MTP-1 line of Figure
    7; mtp1_load: (concurrency, tokens/s/GPU) of Figure 8. throughput_gains: by tokens/s/user;
    speed_gains: of tokens/s/user, by tokens/s/GPU. budgets: by concurrency, anchor included."""

    mtp1_speed: tuple[tuple[float, float], ...]
    mtp1_load: tuple[tuple[float, float], ...]
    throughput_gains: tuple[tuple[float, float], ...]
    speed_gains: tuple[tuple[float, float], ...]
    budgets: tuple[tuple[float, float], ...]


PAPER: Mapping[str, Paper] = {
    "v4-flash": Paper(
        mtp1_speed=(
            (50, 19500), (60, 16500), (70, 13600), (80, 10600), (90, 7600), (100, 4400),
            (110, 2600), (120, 1500), (135, 650),
        ),
        mtp1_load=(
            (25, 2700), (50, 4950), (75, 6800), (100, 8600), (125, 10200), (150, 11700),
            (175, 12900), (200, 13800),
        ),
        throughput_gains=((80, 0.51), (120, 6.61)),
        speed_gains=((10600, 0.60), (1500, 0.85)),
        budgets=(
            (20, 4.95), (50, 4.6), (75, 4.35), (100, 4.1), (125, 3.9), (150, 3.75), (175, 3.6),
            (200, 3.5),
        ),
    ),
    "v4-pro": Paper(
        mtp1_speed=(
            (25, 6500), (30, 5100), (35, 3750), (40, 2200), (45, 1400), (50, 830), (60, 330),
            (70, 130), (76, 80),
        ),
        mtp1_load=(
            (25, 1400), (50, 2400), (75, 3200), (100, 3800), (125, 4300), (150, 4800),
            (175, 5200), (200, 5600),
        ),
        throughput_gains=((35, 0.52), (50, 4.06)),
        speed_gains=((3750, 0.57), (830, 0.78)),
        budgets=(
            (5, 5.4), (25, 5.05), (50, 4.65), (75, 4.3), (100, 4.0), (125, 3.8), (150, 3.6),
            (175, 3.5), (190, 3.5),
        ),
    ),
}  # fmt: skip

# Fitted by benchmarks/fit_presets.py to `mtp1_speed` and `mtp1_load`, 2026-11-29: root mean square
# of the relative errors 0.7 % (Flash) and 4.8 % (Pro), the largest 1.5 % and 11.1 %.
CURVES: Mapping[str, Curve] = {
    "v4-flash": Curve(0.011874, 0.0041175, 22.627, 2.6114e-05),
    "v4-pro": Curve(0.021160, 0.011034, 7.0861, 8.2878e-05),
}
# Measured with `dspark profile` on two cores (docs/results/2026-11-29-engine.md).
MEASURED: Mapping[str, StepCost] = {
    "smollm2-135m-2-cores": StepCost(
        (1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512),
        (0.0222, 0.0228, 0.0242, 0.0253, 0.0286, 0.0347, 0.0476, 0.0771, 0.133, 0.220, 0.507),
        per_sequence_s=0.18e-3,
        per_context_token_s=6.2e-6,
    ),
}
# The drafter's layers (§5.1: three) over the target's own (public configurations of the models):
# the part of a forward pass that drafting costs. MTP-1's one layer is in the fitted curve already.
DRAFT_SHARE: Mapping[str, float] = {"v4-flash": 3 / 43, "v4-pro": 3 / 61}
# Acceptance by domain: p for which (1 − p⁸)/(1 − p) is the domain's mean τ of Table 1 (DSpark on
# Qwen3-4B). Spread: at which a confidence that knows θ tells apart what stands as well as Figure 6
# has it (area 0.818). Both by benchmarks/fit_presets.py. Confidences are calibrated.
DOMAINS = (("math", 0.8930, 0.1208), ("code", 0.8673, 0.1428), ("chat", 0.7389, 0.2222))
USERS = (2, 4, 6, 8, 12, 16, 25, 50, 75, 100, 125, 150, 175, 200, 250, 300)


def preset_names() -> tuple[str, ...]:
    return tuple(CURVES)


def preset_table(name: str) -> dict[str, Any]:
    """What a file with `preset = name` need not say. Raises `ConfigError`."""
    if name not in CURVES:
        raise ConfigError(f"preset: {name!r:.40} must be one of {', '.join(preset_names())}")
    return {
        "duration_s": 40.0,
        "warmup_s": 5.0,
        "arrivals": {"prompt": 1024, "answer": {"kind": "lognormal", "mean": 600.0}},
        "verifiers": [
            {
                "step_cost": name,
                "prefills": False,
                "max_sequences": 512,
                "max_step_tokens": 4096,
                "kv_tokens": 64_000_000,
            }
        ],
        "domains": [
            {"name": domain, "acceptance": mean, "spread": spread}
            for domain, mean, spread in DOMAINS
        ],
        "drafting": {"gamma": 5},
        "scheduler": {"old_steps": 2},
        "arms": [
            {"name": "mtp-1", "policy": "fixed:1", "draft_share": 0.0},
            {"name": "dspark", "policy": "top-k", "draft_share": DRAFT_SHARE[name]},
        ],
        "sweep": {"users": list(USERS)},
    }


def step_cost_named(name: str) -> StepCost | None:
    if name in CURVES:
        return CURVES[name].step_cost()
    return MEASURED.get(name)
