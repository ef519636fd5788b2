"""Prometheus' configuration, alert rules and their runbooks."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import yaml

from dspark.deploy.cluster_config import POOLS, read_cluster

from .metric_names import PROCESS, faults, metrics
from .tools import INFRA, ROOT

RUNBOOKS = ROOT / "docs/runbooks"
SERVES = ROOT / "services/dspark"
DURATION = re.compile(r"^\d+[smhd]$")


def rules() -> list[dict[str, Any]]:
    found = []
    for file in (INFRA / "prometheus/rules").glob("*.yaml"):
        document = yaml.safe_load(file.read_text())
        assert set(document) == {"groups"}
        for group in document["groups"]:
            assert set(group) == {"name", "rules"}
            found += group["rules"]
    return found


RULES = {rule["alert"]: rule for rule in rules()}


def test_names_are_unique() -> None:
    assert len(RULES) == len(rules())


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_its_reader_needs(name: str) -> None:
    rule = RULES[name]
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Dspark[A-Z][A-Za-z]+", name)
    assert DURATION.match(rule["for"])
    assert rule["for"] != "0m"
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"


@pytest.mark.parametrize("name", RULES)
def test_a_rule_asks_for_what_replicas_serve(name: str) -> None:
    assert faults(RULES[name]["expr"]) == []


@pytest.mark.parametrize("name", RULES)
def test_labels_that_a_summary_shows_are_in_its_result(name: str) -> None:
    rule = RULES[name]
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    aggregated = re.search(r"\b(?:sum|max|count)\b", rule["expr"])
    kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
    assert shown <= kept if aggregated else True


def test_a_wrong_name_and_a_wrong_label_are_found() -> None:
    assert faults("rate(dspark_stepps_total[5m]) > 0") == [
        "dspark_stepps_total is served by nobody"
    ]
    assert faults('dspark_members{stat="ready"} > 0') == ["dspark_members has no label stat"]
    assert faults("sum by (pol) (dspark_members) > 0") == ["by (pol): no metric here has it"]
    with pytest.raises(ValueError, match=r"unclosed|expected|unexpected"):
        faults("sum(dspark_members")


def test_the_table_of_metrics_is_read() -> None:
    found = metrics()
    assert found["dspark_members"] == {"pool", "state"}
    assert found["dspark_step_duration_seconds_bucket"] == {"le"}
    assert "error_type" not in found["gen_ai_server_time_to_first_token_seconds_count"]
    assert found["dspark_wire_bytes_total"] == {"direction", "drafter"}


def test_the_table_names_what_the_code_serves() -> None:
    """Names are put together of literals: all of one's parts stand in the modules that serve."""
    told: set[str] = set()
    for file in (*SERVES.glob("telemetry/*.py"), SERVES / "gateway/metrics.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        told |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    told |= {"scheduler"}  # roles say so: watch_outage("scheduler")
    for name in set(metrics()) - set(PROCESS):
        base = re.sub("_(total|bucket|sum|count)$", "", name)
        written = (base, base.removeprefix("dspark_"))
        parts = [(w[:i], w[i:]) for w in written for i in range(1, len(w))]
        assert told & set(written) or any(set(pair) <= told for pair in parts), name


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("Dspark*.md")}
    assert pages == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_runbook_says_what_it_means_how_to_see_and_what_to_do(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    severity = RULES[name]["labels"]["severity"].capitalize()
    assert text.startswith(f"# {name}\n\n{severity}. ")
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == ["See", "Do"]
    for other in re.findall(r"\]\(([^)]+)\)", text):
        assert (RUNBOOKS / other).is_file(), other
    for metric in set(re.findall(r"`(?:[a-z_]+\()*(dspark_\w+)", text)):
        served = {re.sub("_(bucket|sum|count)$", "", known) for known in metrics()}
        assert metric in served, metric


def test_the_index_lists_every_alert_as_it_is() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \| (\w+) \|$",
        (RUNBOOKS / "README.md").read_text(),
        flags=re.MULTILINE,
    )
    assert rows == [(n, r["labels"]["severity"], r["for"]) for n, r in RULES.items()]


def test_prometheus_asks_every_pool_where_its_replicas_listen() -> None:
    document = yaml.safe_load((INFRA / "prometheus/prometheus.yaml").read_text())
    assert set(document) == {"global", "rule_files", "scrape_configs"}
    assert document["rule_files"] == ["rules/*.yaml"]
    telemetry = read_cluster(INFRA / "compose/cluster.yaml").telemetry
    assert telemetry.metrics is not None
    found = {}
    for job in document["scrape_configs"]:
        assert set(job) == {"job_name", "dns_sd_configs"}
        (names,) = job["dns_sd_configs"]
        assert (names["type"], names["port"]) == ("A", telemetry.metrics.port)
        found[job["job_name"]] = names["names"]
    assert found == {pool: [pool] for pool in POOLS}
