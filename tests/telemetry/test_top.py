"""`dspark top`: a live cluster as a script and as a person sees it."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dspark.cli.main import app, main
from dspark.cli.top import live_state, rendered
from dspark.client import AsyncClient
from dspark.core.errors import Unavailable
from dspark.core.replicas import DrafterLoad, Member, Pool, Replica
from dspark.core.sampling import SamplingMode
from dspark.core.status import CalibrationDrift, ClusterStatus, MemberStatus, VerifierLoad
from dspark.scheduling.client import SchedulingClient
from dspark.scheduling.wire_status_client import status_from_wire, status_to_wire

from ..scheduling.cluster import PATIENT_S, until
from .traced import traced

STATUS = ClusterStatus(
    "s1",
    True,
    (
        MemberStatus(Member(Pool.GATEWAY, Replica("g1", "h:1", 3))),
        MemberStatus(
            Member(Pool.VERIFIER, Replica("v1", "h:2", 4), draining=True),
            runs=2,
            claimed_tokens=300,
            load=VerifierLoad(2, 1, 25, 100, 10.0, 123.4, 2.5, 50.0, 0.0021, -0.001),
        ),
        MemberStatus(
            Member(Pool.DRAFTER, Replica("d1", "h:3", 5)), load=DrafterLoad(3, 1, 200.0, 800.0)
        ),
    ),
    seen_s=0.05,
    store_away_s=None,
    plans=17,
    following=1,
    calibration=2,
    drift=(CalibrationDrift("dspark-1", SamplingMode.COUPLED, 0.2, 0.01),),
)


def shown(state: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(rendered(state))
    return out.getvalue()


def test_a_status_travels_whole() -> None:
    for status in (
        STATUS,
        replace(STATUS, seen_s=None, store_away_s=3.5),
        ClusterStatus("s", False),
    ):
        assert status_from_wire(status_to_wire(status)) == status


def test_who_plans_has_the_say() -> None:
    other = ClusterStatus("s2", False, seen_s=0.0)
    gone = Unavailable("nobody is there")
    state = live_state({"a:1": other, "b:2": STATUS, "c:3": gone}, 12.0)
    assert state["scheduler"] == {
        "leader": "s1",
        "answer": ["a:1", "b:2"],
        "silent": {"c:3": "nobody is there"},
        "plans": 17,
        "following": 1,
        "calibration": 2,
    }
    assert [one["id"] for one in state["pools"]["verifier"]] == ["v1"]
    assert state["total"]["tokens_per_s"] == 123.4
    json.dumps(state)


def test_a_person_sees_every_replica_and_what_is_wrong() -> None:
    state = live_state({"b:2": STATUS, "c:3": Unavailable("nobody is there")}, 12.0)
    text = shown(state)
    for told in ("g1", "v1", "d1", "draining", "75%", "2.50", "123", "25%", "-1.0", "2.1"):
        assert told in text, told
    assert "scheduler at c:3 does not answer: nobody is there" in text
    assert "calibration of dspark-1 (coupled) is off by 0.200" in text
    away = live_state({"b:2": replace(STATUS, store_away_s=7.0)}, 12.0)
    assert "the store is away for 7 s" in shown(away)


async def test_once_as_json_against_a_live_cluster() -> None:
    async with traced(traces=False) as on:
        async with AsyncClient(on.grpc) as client:
            await client.generate("Hello", max_tokens=8)
        arguments = ["top", "--once", "--json", "--scheduler", on.scheduler]
        done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert done.exit_code == 0, done.output
        state = json.loads(done.stdout)
        text = await asyncio.to_thread(CliRunner().invoke, app, arguments[:2] + arguments[3:])
    assert state["scheduler"]["answer"] == [on.scheduler]
    assert state["store"] == {"there": True, "away_s": None}
    assert [(one["id"], one["state"]) for one in state["pools"]["verifier"]] == [("v1", "ready")]
    (drafter,) = state["pools"]["drafter"]
    assert drafter["version"] == "scripted scripted"
    assert drafter["load"].keys() >= {"sessions", "queue", "tokens_per_s"}
    assert "v1" in text.stdout
    assert "d1" in text.stdout


async def test_what_a_verifier_does_is_in_its_load() -> None:
    async with traced(traces=False) as on, AsyncClient(on.grpc) as client:
        async with (
            client.stream("Hello", max_tokens=4000, temperature=0) as stream,
            SchedulingClient([on.scheduler], call_s=PATIENT_S) as scheduler,
        ):
            await anext(stream)
            reading = asyncio.create_task(_read(stream))
            seen: list[VerifierLoad] = []

            async def busy() -> bool:
                status = await scheduler.status()
                loads = [m.load for m in status.members if m.member.pool is Pool.VERIFIER]
                seen.extend(load for load in loads if isinstance(load, VerifierLoad))
                return any(
                    load.tokens_per_s > 0 and load.running and load.accepted_length > 1
                    for load in seen
                )

            await until(busy)
            reading.cancel()
        assert all(0 <= load.free_blocks <= load.blocks for load in seen)


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--scheduler", "127.0.0.1:1"], 1, "no scheduler answers: 127.0.0.1:1"),
        (["--scheduler", "127.0.0.1:1", "--cluster", "x"], 2, "leave out --cluster, --address"),
        (["--scheduler", "127.0.0.1:1", "--interval", "0"], 2, "--interval: 0 must be at least"),
        (["--file", "/nowhere.yaml"], 2, "/nowhere.yaml"),
    ],
)
def test_what_cannot_be_shown_is_one_clear_line(
    arguments: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", *arguments]) == status
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
