"""Log lines: one JSON object each, with the ids of what they are about and no content."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from dspark.client import AsyncClient, Retry
from dspark.core.errors import Unavailable
from dspark.telemetry.logs import MAX_MESSAGE_CHARS, about, ids, set_up_logging

from .traced import traced

log = logging.getLogger("dspark.somewhere")


@pytest.fixture
def lines() -> Iterator[Any]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()
    set_up_logging("info", "json", pool="gateway", replica="g1", stream=out)
    try:
        yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_a_line_is_one_object(lines: Any) -> None:
    log.info("two\nlines and a %s", "value")
    (line,) = lines()
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "dspark.somewhere",
        "message": "two\nlines and a value",
        "pool": "gateway",
        "replica": "g1",
    }


def test_ids_go_with_the_task_that_they_are_of(lines: Any) -> None:
    async def work(name: str) -> None:
        with about(name, "t" + name):
            await asyncio.sleep(0)
            log.info("working")
            await asyncio.create_task(helper())

    async def helper() -> None:
        log.info("helping")

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(both())
    log.info("after")
    *of_requests, after = lines()
    assert {(line["request_id"], line["trace_id"]) for line in of_requests} == {
        ("a", "ta"),
        ("b", "tb"),
    }
    assert len(of_requests) == 4
    assert "request_id" not in after
    assert ids().request_id == ""


def test_a_line_may_say_whose_it_is_itself(lines: Any) -> None:
    log.warning("a run goes on", extra={"request_id": "r7"})
    assert lines()[0]["request_id"] == "r7"


def test_an_exception_is_in_its_line(lines: Any) -> None:
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("it failed")
    (line,) = lines()
    assert line["error"] == "KeyError"
    assert "Traceback" in line["traceback"]


def test_a_message_is_no_document(lines: Any) -> None:
    log.info("%s", "x" * 100_000)
    assert len(lines()[0]["message"]) < MAX_MESSAGE_CHARS + 50


async def test_a_call_s_lines_have_its_ids_and_nothing_of_its_prompt(lines: Any) -> None:
    """On a target that is broken, which the gateway has something to say of."""
    async with traced() as on:
        async with AsyncClient(on.grpc, retry=Retry(attempts=1)) as client:
            on.backend.broken = True
            with pytest.raises(Unavailable):
                await client.generate(
                    "a prompt that no log may show",
                    request_id="r-1",
                    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                    deadline_s=20.0,
                    max_tokens=8,
                )
        told = [line for line in lines() if line.get("request_id") == "r-1"]
    assert told, "the gateway says nothing of a call that it could not serve"
    assert {line["trace_id"] for line in told if "trace_id" in line} == {
        "4bf92f3577b34da6a3ce929d0e0e4736"
    }
    assert "no log may show" not in str(lines())


def test_text_has_the_ids_too() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()
    set_up_logging("info", "text", stream=out)
    try:
        with about("r1"):
            log.info("hello")
        log.info("nobody's")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    first, second = out.getvalue().splitlines()
    assert first.endswith("dspark.somewhere: hello [request_id=r1]")
    assert second.endswith("nobody's")
