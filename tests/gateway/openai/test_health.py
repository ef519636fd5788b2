"""Readiness and figures: what an operator looks at."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .served import Served, serve, toy


def figures(front: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = httpx.get(front.url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_alive_at_once_and_ready_when_the_door_opens() -> None:
    with serve(opened=False) as front:
        assert httpx.get(front.url + "/healthz").json() == {"status": "alive"}
        response = httpx.get(front.url + "/readyz")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
        assert front.post(prompt="Hi").status_code == 503
        front.call(front.door.open)
        assert httpx.get(front.url + "/readyz").json() == {"status": "ready"}
        assert httpx.head(front.url + "/readyz").status_code == 200
        assert front.post(prompt="Hi").status_code == 200
        front.call(front.door.drain)
        assert httpx.get(front.url + "/readyz").status_code == 503
        assert httpx.get(front.url + "/healthz").status_code == 200


def test_figures_add_up() -> None:
    with serve(toy()) as front:
        usages: list[Any] = [
            front.post(prompt="Hi", max_tokens=40, stream=False).json()["usage"] for _ in range(3)
        ]
        list(front.client.completions.create(model="toy", prompt="Hi", max_tokens=7, stream=True))
        front.post(prompt="Hi", n=0)
        httpx.get(front.url + "/some/where")
        httpx.get(front.url + "/v1/models/x")
        seen = figures(front)

        def at(name: str, **labels: str) -> float:
            return seen[name, frozenset(labels.items())]

        def requests(route: str, status: str) -> float:
            return at("dspark_requests_total", protocol="http", route=route, status=status)

        assert requests("/v1/completions", "200") == 4
        assert requests("/v1/completions", "400") == 1
        assert requests("/v1/models/", "404") == 1
        assert requests("other", "404") == 1
        assert at("dspark_requests_in_flight", protocol="http") == 1  # this one
        assert at("dspark_time_to_first_token_seconds_count", protocol="http") == 4
        assert at("dspark_time_per_output_token_seconds_count", protocol="http") == 4
        assert at("dspark_tokens_total", kind="generated") == 3 * 40 + 7
        for stage in ("drafted", "verified", "accepted"):
            told = sum(usage["speculation"][stage] for usage in usages)
            assert at("dspark_draft_tokens_total", stage=stage) >= told > 0
        assert at("dspark_requests_running") == at("dspark_requests_waiting") == 0
        pool = front.engine.cache.pool
        free, cached = (at("dspark_kv_blocks", state=state) for state in ("free", "cached"))
        assert free + cached == pool.blocks > free
        assert at("dspark_kv_blocks", state="owned") == 0
        assert at("dspark_steps_total") == front.engine.figures.steps
        parts = [at("dspark_step_seconds_total", part=p) for p in ("forward", "draft", "rest")]
        assert sum(parts) == pytest.approx(front.engine.figures.step_s)
        assert at("dspark_event_loop_lag_seconds_count") > 0


def test_what_runs_now_is_seen(front: Served) -> None:
    stream = front.client.completions.create(
        model="toy", prompt="Hi", max_tokens=20_000, n=2, stream=True
    )
    next(iter(stream))
    seen = figures(front)
    running = seen["dspark_requests_running", frozenset()]
    assert running + seen["dspark_requests_waiting", frozenset()] == 2
    assert seen["dspark_kv_blocks", frozenset({("state", "owned")})] >= running >= 1
    stream.close()
    front.wait_freed(2)
