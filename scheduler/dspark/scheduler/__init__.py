"""What the scheduler offers: verify lengths, what a step costs, whether to draft at all."""

from dspark.scheduler.asking import (
    WAITING,
    Beside,
    DraftCost,
    UsualSavings,
    afforded,
    askers,
    block,
    probe_rounds,
    reach,
    supposed,
)
from dspark.scheduler.planner import (
    Policy,
    PolicyKind,
    capacity,
    plan,
    saving,
    scaled,
)
from dspark.scheduler.step_cost import OnlineStepCost, StepCost, cost_key, hardware

__all__ = [
    "WAITING",
    "Beside",
    "DraftCost",
    "OnlineStepCost",
    "Policy",
    "PolicyKind",
    "StepCost",
    "UsualSavings",
    "afforded",
    "askers",
    "block",
    "capacity",
    "cost_key",
    "hardware",
    "plan",
    "probe_rounds",
    "reach",
    "saving",
    "scaled",
    "supposed",
]
