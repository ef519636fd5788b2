"""A replica of the central scheduler: what it answers, what it sees, and the plan it makes."""

from dspark.scheduler.central.codec import Codec
from dspark.scheduler.central.config import SchedulerConfig
from dspark.scheduler.central.scheduler import Registration, Scheduler

__all__ = ["Codec", "Registration", "Scheduler", "SchedulerConfig"]
