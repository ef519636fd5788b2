"""What a scrape says is what happened, by the names of docs/telemetry.md."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dspark.client import AsyncClient
from dspark.core.errors import ConfigError
from dspark.serving import listen
from dspark.telemetry.config import METRICS_PORTS, MetricsListen, TelemetryConfig
from dspark.telemetry.endpoint import MAX_HEAD_BYTES, MOST_AT_ONCE, serve_metrics
from dspark.telemetry.process import telemetry
from dspark.telemetry.readings import positions

from ..scheduling.cluster import until
from .traced import GAMMA, Traced, traced

DOCS = Path(__file__).resolve().parents[2] / "docs" / "telemetry.md"
STAGES = ("drafted", "verified", "accepted")


@pytest.fixture
async def used() -> AsyncIterator[Traced]:
    """A cluster without traces that has answered three requests and refused one."""
    async with traced(traces=False) as on:
        async with AsyncClient(on.grpc) as client:
            for n in (8, 20, 33):
                await client.generate("Hello", max_tokens=n, temperature=0)
            with pytest.raises(Exception, match="max_tokens"):
                await client.generate("Hello", max_tokens=10**6)
        yield on


async def test_accepted_is_within_verified_is_within_drafted_at_every_position(
    used: Traced,
) -> None:
    seen = used.figures("v1")

    def at(stage: str, position: int) -> float:
        labels = frozenset({("stage", stage), ("position", str(position))})
        return seen["dspark_draft_tokens_by_position_total", labels]

    for position in range(1, GAMMA + 1):
        drafted, verified, accepted = (at(stage, position) for stage in STAGES)
        assert 0 < accepted <= verified <= drafted
    for stage in STAGES:
        by_position = [at(stage, position) for position in range(1, GAMMA + 1)]
        assert by_position == sorted(by_position, reverse=True)
        total = seen["dspark_draft_tokens_total", frozenset({("stage", stage)})]
        assert sum(by_position) == total == getattr(used.engine.figures.speculation, stage)


async def test_a_verifier_says_what_its_engine_did(used: Traced) -> None:
    seen, engine = used.figures("v1"), used.engine

    def at(name: str, **labels: str) -> float:
        return seen[f"dspark_{name}", frozenset(labels.items())]

    steps = engine.figures.steps
    assert at("steps_total") == at("step_duration_seconds_count") == steps > 0
    assert at("step_duration_seconds_sum") == pytest.approx(engine.figures.step_s)
    buckets = [v for (n, _), v in seen.items() if n == "dspark_step_duration_seconds_bucket"]
    assert max(buckets) == steps
    sources = [at("plan_steps_total", source=source) for source in ("guided", "local")]
    assert sum(sources) == steps
    states = [at("kv_blocks", state=state) for state in ("free", "cached", "owned")]
    assert sum(states) == engine.cache.pool.blocks
    assert at("kv_blocks", state="owned") == 0
    assert at("draft_answers_total", outcome="used") > 0
    assert sum(at("drafter_links", state=state) for state in ("up", "down", "draining")) == 1
    for direction in ("sent", "received"):
        assert at("wire_bytes_total", direction=direction, drafter="d1") > 0
        assert at("wire_messages_total", direction=direction, drafter="d1") > 0
    assert at("drafter_reply_seconds", drafter="d1") > 0
    assert at("drafter_connections_total", drafter="d1") >= 1
    assert at("scheduler_outages_total") >= at("scheduler_away")


async def test_every_pool_says_its_part(used: Traced) -> None:
    def at(replica: str, name: str, **labels: str) -> float:
        return used.figures(replica)[f"dspark_{name}", frozenset(labels.items())]

    assert at("d1", "drafter_tokens_total") > 0
    assert at("d1", "drafter_passes_total") > 0
    assert at("s1", "leases_granted_total") == 3
    assert at("g1", "placements_total", by="lease") == 3
    # What is so now may be otherwise for a moment where all of this starves.
    await until(lambda: at("d1", "drafter_streams") == 1)
    await until(lambda: at("s1", "members", pool="verifier", state="ready") == 1)
    await until(lambda: at("s1", "members", pool="drafter", state="ready") == 1)
    await until(lambda: at("s1", "store_away") == 0)
    await until(lambda: at("s1", "scheduler_leader") == 1)
    await until(lambda: at("g1", "verifiers_known") == 1)
    await until(lambda: at("d1", "drafter_sessions") == 0)


async def test_calls_are_counted_by_the_semantic_conventions(used: Traced) -> None:
    seen = used.figures("g1")
    call = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "dspark",
        "gen_ai_request_model": "toy",
    }

    def at(name: str, **labels: str) -> float:
        return seen[f"gen_ai_{name}", frozenset({**call, **labels}.items())]

    assert at("server_request_duration_seconds_count", error_type="") == 3
    assert at("server_request_duration_seconds_count", error_type="InvalidRequest") == 1
    assert at("client_operation_duration_seconds_count", error_type="") == 3
    assert at("server_time_to_first_token_seconds_count") == 3
    assert at("client_token_usage_sum", gen_ai_token_type="output") == 8 + 20 + 33
    assert at("client_token_usage_count", gen_ai_token_type="input") == 3


async def test_no_name_is_told_that_the_page_does_not_have(used: Traced) -> None:
    told = {
        name
        for replica in used.replicas
        for name in re.findall(r"^# TYPE (\S+) ", used.text(replica), re.MULTILINE)
    }
    known = set(re.findall(r"^\| `([a-z_0-9*]+)` \|", DOCS.read_text(), re.MULTILINE))
    told = {name for name in told if not name.endswith("_created")}
    assert told - known == set()
    # Told by a process as a whole, and only where there is a plan.
    elsewhere = {"dspark_spans_total", "dspark_build_info", "process_*"}
    elsewhere |= {"dspark_event_loop_lag_seconds", "dspark_event_loop_tasks"}
    elsewhere.add("dspark_plan_age_seconds")
    assert known - told - elsewhere == set()


# --- the endpoint


async def test_a_process_has_its_own_page() -> None:
    config = TelemetryConfig(metrics=MetricsListen(port=0))
    async with telemetry(config, pool="drafter", replica="d7") as told:
        async with httpx.AsyncClient(base_url=f"http://{told.metrics_address}") as client:
            page = await client.get("/metrics")
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/plain")
            assert 'pool="drafter"' in page.text
            assert 'replica="d7"' in page.text
            assert "dspark_event_loop_lag_seconds" in page.text
            assert re.search(r"^dspark_event_loop_tasks [1-9]", page.text, re.MULTILINE)
            assert "process_resident_memory_bytes" in page.text
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/else")).status_code == 404
            assert (await client.post("/metrics")).status_code == 405
        address = told.metrics_address
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{address}/metrics")


async def test_replicas_of_one_machine_take_the_next_port() -> None:
    with ExitStack() as taken:
        first = taken.enter_context(listen("127.0.0.1", 0)).getsockname()[1]
        if first + METRICS_PORTS > 65_535:
            first -= METRICS_PORTS
        where = MetricsListen.model_construct(port=first)
        async with serve_metrics(where, bytes) as one, serve_metrics(where, bytes) as two:
            ports = {int(address.rpartition(":")[2]) for address in (one, two)}
    assert len(ports) == 2
    assert all(first < port < first + METRICS_PORTS for port in ports)


async def test_no_free_port_is_a_clear_error() -> None:
    with ExitStack() as taken:
        one = taken.enter_context(listen("127.0.0.1", 0)).getsockname()[1]
        where = MetricsListen.model_construct(port=min(one, 65_535 - METRICS_PORTS))
        for port in range(where.port, where.port + METRICS_PORTS):
            if port != one:
                try:
                    taken.enter_context(listen("127.0.0.1", port))
                except ConfigError:
                    continue  # taken by somebody else: as good
        with pytest.raises(ConfigError, match=r"telemetry\.metrics\.port: none of \d+ to \d+"):
            async with serve_metrics(where, bytes):
                pass


async def test_whoever_sends_too_much_or_nothing_is_hung_up_on() -> None:
    async with serve_metrics(MetricsListen(port=0), lambda: b"x 1\n") as address:
        host, _, port = address.rpartition(":")
        for sent in (b"GET /metrics HTTP/1.1\r\n" + b"x" * (2 * MAX_HEAD_BYTES), b""):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            writer.write_eof()
            async with asyncio.timeout(20):
                try:
                    assert await reader.read() == b""
                except ConnectionError:
                    assert sent  # what was not read is thrown away with a reset
            writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{address}/metrics")).text == "x 1\n"


async def test_a_few_are_answered_at_a_time() -> None:
    async with serve_metrics(MetricsListen(port=0), lambda: b"x 1\n") as address:
        host, _, port = address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(MOST_AT_ONCE)]
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            assert await reader.read() == b"", "one more than there is room for"
        for _, of_idle in (*idle, (reader, writer)):
            of_idle.close()

        async def answered() -> bool:
            async with httpx.AsyncClient() as client:
                try:
                    return (await client.get(f"http://{address}/metrics")).text == "x 1\n"
                except httpx.TransportError:
                    return False

        await until(answered)


def test_a_port_of_rays_workers_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="Ray's workers"):
        MetricsListen(port=12_000)


# --- pure


@given(st.lists(st.integers(0, 8), max_size=50))
def test_positions_count_blocks_that_reach_them(lengths: list[int]) -> None:
    by_length = [lengths.count(n) for n in range(9)]
    reached = positions(by_length)
    assert reached == [sum(length >= k for length in lengths) for k in range(1, 9)]
    assert sum(reached) == sum(lengths)


def test_a_config_says_what_it_does_not_know() -> None:
    wrong: dict[str, Any] = {"sampel": 0.5}
    with pytest.raises(ValidationError, match="sampel"):
        TelemetryConfig.model_validate(wrong)
