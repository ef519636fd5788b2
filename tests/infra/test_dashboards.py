"""Grafana's provisioned dashboards and data sources, and the collector's configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.deploy.cluster_config import read_cluster

from .metric_names import faults
from .tools import INFRA, ROOT

GRAFANA = INFRA / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
# Grafana fills these in; any value does for reading.
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*"}


def sources() -> dict[str, dict[str, Any]]:
    document = yaml.safe_load((GRAFANA / "provisioning/datasources/dspark.yaml").read_text())
    return {source["uid"]: source for source in document["datasources"]}


def test_the_three_are_there() -> None:
    assert [file.stem for file in DASHBOARDS] == [
        "dspark-pools",
        "dspark-scheduler",
        "dspark-speculation",
    ]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_is_whole(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    assert dashboard["uid"] == file.stem
    assert dashboard["schemaVersion"] >= 39
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["type"] in {"row", "stat", "timeseries"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_query_asks_for_what_replicas_serve(file: Path) -> None:
    known = sources()
    asked = 0
    for panel in json.loads(file.read_text())["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] in known
            assert known[target["datasource"]["uid"]]["type"] == target["datasource"]["type"]
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression, target["expr"]
            assert faults(expression) == [], panel["title"]
            asked += 1
    assert asked >= 15


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_legends_show_labels_that_the_query_keeps(file: Path) -> None:
    for panel in json.loads(file.read_text())["panels"]:
        for target in panel.get("targets", []):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            if re.search(r"\b(sum|max|count)\b", target["expr"]):
                kept = " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))
                assert shown <= set(re.findall(r"\w+", kept)), panel["title"]


def test_data_sources_are_services_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for uid, source in sources().items():
        host = source["url"].removeprefix("http://").partition(":")[0]
        assert host == uid
        assert host in services


def test_dashboards_lie_where_grafana_looks() -> None:
    document = yaml.safe_load((GRAFANA / "provisioning/dashboards/dspark.yaml").read_text())
    (provider,) = document["providers"]
    mounts = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"][
        "volumes"
    ]
    assert f"./infra/grafana/dashboards:{provider['options']['path']}:ro" in mounts


def test_the_collector_uses_what_it_defines_and_defines_what_it_uses() -> None:
    document = yaml.safe_load((INFRA / "otel/collector.yaml").read_text())
    assert set(document) == {"receivers", "processors", "exporters", "service"}
    used: dict[str, set[str]] = {kind: set() for kind in ("receivers", "processors", "exporters")}
    for pipeline in document["service"]["pipelines"].values():
        assert set(pipeline) == set(used)
        assert pipeline["processors"][0] == "memory_limiter"  # refuses before others take
        for kind, names in pipeline.items():
            used[kind] |= set(names)
    assert used == {kind: set(document[kind]) for kind in used}
    limiter = document["processors"]["memory_limiter"]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    memory = services["collector"]["deploy"]["resources"]["limits"]["memory"]
    assert limiter["limit_mib"] + limiter["spike_limit_mib"] <= int(memory.removesuffix("m"))


def test_replicas_send_where_the_collector_listens() -> None:
    document = yaml.safe_load((INFRA / "otel/collector.yaml").read_text())
    port = document["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    otlp = read_cluster(INFRA / "compose/cluster-observed.yaml").telemetry.otlp
    assert otlp is not None
    assert otlp.endpoint == f"http://collector:{port}"
    # What it has no pipeline for must not be sent.
    assert set(document["service"]["pipelines"]) == {"traces"}
    assert otlp.metrics_interval_s == 0
