"""`dspark simulate`: its table, its JSON, its picture, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.cli.main import main

DSPARK = Path(sys.executable).parent / "dspark"
SMALL = """
policies = ["none", "fixed:2", "central"]
duration_s = 2.0
warmup_s = 0.2
[sweep]
users = [1, 4]
[arrivals]
answer = 30
prompt = 20
[[verifiers]]
step_cost = { tokens = [1, 64], table_s = [0.02, 0.05] }
[[tenants]]
name = "first"
share = 2.0
[[tenants]]
name = "second"
[[domains]]
name = "all"
acceptance = 0.8
[objectives]
ttft_s = 0.0001
"""


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`dspark simulate --config FILE …` in this process."""

    def run(text: str, *arguments: object) -> tuple[int, str, str]:
        file = tmp_path / "simulation.toml"
        file.write_text(text)
        status = main(["simulate", "--config", str(file), *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_json_has_every_point(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run(SMALL, "--json")
    told = json.loads(out)
    assert status == 0
    assert [(p["figures"]["arm"], p["figures"]["value"]) for p in told["points"]] == [
        (arm, users) for users in (1, 4) for arm in ("none", "fixed:2", "central")
    ]
    for point in told["points"]:
        figures = point["figures"]
        assert figures["throughput"] > 0
        assert figures["misses"]["ttft"] == 1.0
        assert sum(figures["tenants"].values()) == pytest.approx(1.0)
    central = told["points"][2]
    assert central["costs"]["rounds"] > 30
    assert central["costs"]["plan_s"]["p50"] > 0
    assert told["cut_short"] is False
    assert told["peak_memory_bytes"] > 2**20


def test_a_table_says_it_to_people(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run(SMALL)
    assert status == 0
    for word in ("budget", "fixed:2", "ttft missed", "100.0%", "central plans", "first", "/s/user"):
        assert word in out


def test_seeds(run: Callable[..., tuple[int, str, str]]) -> None:
    def figures(*arguments: object) -> list[object]:
        return [p["figures"] for p in json.loads(run(SMALL, "--json", *arguments)[1])["points"]]

    assert figures("--seed", 5) == figures("--seed", 5) != figures("--seed", 6)


def test_a_picture(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert run(SMALL, "--plot", file)[0] == 0
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("speed = 1", [], "speed: is not a known field"),
        (SMALL, ["--plot", "x.txt"], "must end in .png"),
        (SMALL, ["--plot", "nowhere/x.png"], "nowhere is no directory"),
        (SMALL, ["--preset", "v4-pro"], "one of --config FILE and --preset NAME"),
    ],
)
def test_bad_input_is_one_line(
    run: Callable[..., tuple[int, str, str]], text: str, arguments: list[str], told: str
) -> None:
    status, out, err = run(text, *arguments)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_neither_file_nor_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "--config FILE" in capsys.readouterr().err


def test_ctrl_c_prints_what_is_done(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_text(SMALL.replace("duration_s = 2.0", "duration_s = 1e6"))
    with subprocess.Popen(
        [DSPARK, "simulate", "--config", file, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "6 points" in first
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    told = json.loads(out)
    assert process.returncode == 130
    assert told["cut_short"] is True
    assert len(told["points"]) <= 1
    assert "cut short by Ctrl-C" in err
