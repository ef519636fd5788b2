"""The trace that a call belongs to, where its application traces. Nothing is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def traceparent(options: Mapping[str, Any]) -> str:
    """W3C trace context of a call: what its options say, else that of the active span of
    OpenTelemetry if the application has loaded that, else ""."""
    given = options.get("traceparent")
    if given is not None:
        return str(given)
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
