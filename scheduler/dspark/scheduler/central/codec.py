"""How reports and plans are written down between scheduler replicas."""

from __future__ import annotations

from typing import Protocol

from dspark.core.plans import Calibration, Plan
from dspark.core.reports import Report


class Codec(Protocol):
    """Bytes that every replica reads alike, also one of another version. Reading raises
    `InvalidRequest` for what is no such thing."""

    def report(self, report: Report) -> bytes: ...

    def read_report(self, data: bytes) -> Report: ...

    def plan(self, plan: Plan) -> bytes: ...

    def read_plan(self, data: bytes) -> Plan: ...

    def calibration(self, calibration: Calibration) -> bytes: ...

    def read_calibration(self, data: bytes) -> Calibration: ...
