"""The metrics that replicas serve, from the table in docs/telemetry.md, and what an expression of
PromQL asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import promql_parser as promql

from .tools import ROOT

# What Prometheus' client library says of a process, and Prometheus of a target.
PROCESS = {
    "process_resident_memory_bytes": frozenset[str](),
    "process_cpu_seconds_total": frozenset[str](),
    "process_open_fds": frozenset[str](),
    "process_max_fds": frozenset[str](),
    "up": frozenset[str](),
}
OF_TARGETS = {"job", "instance"}


@cache
def metrics() -> dict[str, frozenset[str]]:
    """Labels by the name of each series; a histogram's are its _bucket, _sum and _count."""
    found: dict[str, frozenset[str]] = dict(PROCESS)
    rows = re.findall(
        r"^\| `(\w+)` \| ([CGH]) \|([^|]*)\|",
        (ROOT / "docs/telemetry.md").read_text(),
        flags=re.MULTILINE,
    )
    last: set[str] = set()
    for name, kind, told in rows:
        # "the same without error_type", "the same, gen_ai_token_type: input, output"
        without = re.search(r"the same without (\w+)", told)
        labels = set(last) if "the same" in told else set()
        if without:
            labels.discard(without.group(1))
        for part in told.replace("the same", "").split(";"):
            names = part.partition(":")[0]  # behind it stand values
            labels.update(re.findall(r"\w+", re.sub(r"without \w+", "", names)))
        last = labels
        suffixes = {"H": ("_bucket", "_sum", "_count")}.get(kind, ("",))
        for suffix in suffixes:
            found[name + suffix] = frozenset(labels | ({"le"} if suffix == "_bucket" else set()))
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """One selector of an expression. labels: that it matches."""

    name: str
    labels: frozenset[str]


def asked(expression: str) -> list[Asked]:
    """Raises ValueError for what is no PromQL."""
    found: list[Asked] = []

    def visit(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector):
            matchers = node.matchers.matchers
            found.append(Asked(node.name or "", frozenset(m.name for m in matchers)))
        return True

    promql.walk(promql.parse(expression), pre_visit=visit)
    return found


def grouped(expression: str) -> set[str]:
    """Labels that the expression keeps by `by (…)`."""
    found: set[str] = set()

    def visit(node: promql.Expr) -> bool:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
        return True

    promql.walk(promql.parse(expression), pre_visit=visit)
    return found


def faults(expression: str) -> list[str]:
    """What of an expression cannot be: names that nobody serves, labels that they do not have."""
    told = []
    seen: set[str] = set(OF_TARGETS)
    for selector in asked(expression):
        if selector.name not in metrics():
            told.append(f"{selector.name} is served by nobody")
            continue
        labels = metrics()[selector.name] | OF_TARGETS
        seen |= labels
        told += [f"{selector.name} has no label {label}" for label in selector.labels - labels]
    told += [f"by ({label}): no metric here has it" for label in grouped(expression) - seen]
    return told
