"""What the scheduler offers: verify lengths, what a step costs, whether to draft at all."""

from dspark.scheduler.planner import (
    Policy,
    PolicyKind,
    capacity,
    plan,
    probe_interval,
    saving,
    scaled,
    worth_drafting,
)
from dspark.scheduler.step_cost import OnlineStepCost, StepCost, cost_key, hardware

__all__ = [
    "OnlineStepCost",
    "Policy",
    "PolicyKind",
    "StepCost",
    "capacity",
    "cost_key",
    "hardware",
    "plan",
    "probe_interval",
    "saving",
    "scaled",
    "worth_drafting",
]
