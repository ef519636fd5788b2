"""The plan of the whole cluster, each interval: reports in, directions and budgets out. Pure."""

from dspark.scheduler.joint.outlook import Cluster, Outlook, VerifierView, observed
from dspark.scheduler.joint.planning import (
    SMALLEST_GAIN,
    JointPlan,
    Objective,
    VerifierPlan,
    local_objective,
    objective,
    plan_jointly,
)

__all__ = [
    "SMALLEST_GAIN",
    "Cluster",
    "JointPlan",
    "Objective",
    "Outlook",
    "VerifierPlan",
    "VerifierView",
    "local_objective",
    "objective",
    "observed",
    "plan_jointly",
]
