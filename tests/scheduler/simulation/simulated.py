"""Small clusters to simulate, said in a line."""

from __future__ import annotations

import asyncio
from typing import Any

from dspark.scheduler.simulation import Arm, Figures, SimulationConfig, config_of, sweep
from dspark.scheduler.simulation.requests import Job
from dspark.scheduler.simulation.run import Ran, Simulation
from dspark.verifier.guidance import Guidance

FLAT = {"tokens": [1], "table_s": [0.02]}
# 20 ms, and 0.5 ms more a token from 8 on: verifying pays while few are there.
RISING = {"tokens": [1, 8, 4096], "table_s": [0.02, 0.02, 0.02 + 0.0005 * 4088]}


def table(cost: Any = FLAT, acceptance: float = 1.0, **more: Any) -> dict[str, Any]:
    """A file's table: one verifier whose prompts come computed, one domain; `verifier` and
    `domain` add to these, everything else to the whole."""
    verifier, domain = more.pop("verifier", {}), more.pop("domain", {})
    return {
        "duration_s": 20.0,
        "warmup_s": 0.0,
        "verifiers": [{"step_cost": cost, "prefills": False, "kv_tokens": 10**9, **verifier}],
        "domains": [{"name": "all", "acceptance": acceptance, **domain}],
        **more,
    }


def configured(cost: Any = FLAT, acceptance: float = 1.0, **more: Any) -> SimulationConfig:
    return config_of(table(cost, acceptance, **more))


def simulated(config: SimulationConfig) -> list[Figures]:
    return [point.figures for point in asyncio.run(sweep(config, Guidance))]


def one(config: SimulationConfig) -> Figures:
    (figures,) = simulated(config)
    return figures


def ran(config: SimulationConfig, policy: str) -> Ran:
    return asyncio.run(Simulation(config, Arm(policy), Guidance).run())


def jobs(config: SimulationConfig, policy: str) -> list[Job]:
    return ran(config, policy).measures.jobs
