"""`dspark profile`, `dspark models`, and what is shown while long work goes on."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from dspark.cli.console import bar, put, say
from dspark.cli.main import app
from dspark.models import SERVABLE, known_models
from dspark.scheduler import StepCost

from .conftest import Ran

Run = Callable[..., Ran]


def test_profile_measures_and_says_on_what(dspark: Run, checkpoint: Path) -> None:
    facts = dspark("profile", "--model", checkpoint, "--json").answer
    assert set(facts) == {
        *("model", "backend", "dtype", "device", "hardware", "threads", "measured_now"),
        *("step_cost", "native"),
    }
    assert facts["measured_now"] is True
    assert (facts["backend"], facts["dtype"], facts["device"]) == (*("native", "float32", "cpu"),)
    assert "cores" in facts["hardware"]
    assert facts["threads"] >= 1
    cost = StepCost.from_json(json.dumps(facts["step_cost"]))
    assert (cost.tokens[0], cost.tokens[-1]) == (1, 512)


def test_profile_says_what_it_measured(dspark: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Not what was asked for, where that does not fit the model."""
    other = tmp_path / "gelu"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    asked = ("profile", "--model", other, "--backend", "native", "--dtype", "int8", "--cached")
    facts = dspark(*asked, "--json").answer
    assert (facts["backend"], facts["dtype"]) == ("transformers", "float32")
    told = " ".join(dspark(*asked).out.split())  # a long path wraps the line
    assert "transformers, float32 on cpu" in told


def test_profile_for_people(dspark: Run, checkpoint: Path) -> None:
    ran = dspark("profile", "--model", checkpoint, "--cached")
    assert ran.status == 0
    for words in ("one sequence, B tokens", "ms a token", "ms a sequence", "µs a token of context"):
        assert words in ran.out


def test_a_damaged_cache_is_measured_again_with_a_line(
    generate: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    asked = ("the cat", "--json", "--max-tokens", 5)
    answer = generate(*asked).answer
    (file,) = (tmp_path / "step-cost").iterdir()
    file.write_text("nonsense")
    ran = generate(*asked)
    assert ran.answer["token_ids"] == answer["token_ids"]
    assert f"again: the kept figures cannot be used: {file}" in ran.err
    StepCost.load(file)


def test_a_cache_that_cannot_be_written_costs_a_line(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    place.write_text("no directory")
    monkeypatch.setenv("DSPARK_CACHE", str(place))
    ran = generate("the cat", "--json", "--max-tokens", 5)
    assert len(ran.answer["token_ids"]) == 5
    assert "the step cost could not be kept" in ran.err


def test_models_as_json(dspark: Run) -> None:
    told = dspark("models", "--json").answer
    assert told["servable_types"] == list(SERVABLE)
    names = [model["name"] for model in told["models"]]
    assert names == [model.name for model in known_models()]
    for model in told["models"]:
        assert {"name", "description", "license", "download_bytes", "disk_bytes", "cached"} <= set(
            model
        )


def test_models_for_people(dspark: Run) -> None:
    ran = dspark("models")
    assert ran.status == 0
    assert "smollm2-135m" in ran.out
    assert "Model types that are served: llama, " in ran.out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(terminal: bool) -> None:
    out = Console(file=io.StringIO(), force_terminal=terminal)
    with bar("counting", out) as advance:
        advance(3, 5)
        out.file.flush()
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert ("counting" in shown) is terminal
    assert terminal or shown == ""


def test_words_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[/red] [bold]:smile:[/bold] \x1b[1m" + "long " * 40
    put(text)
    assert capsys.readouterr() == (text, "")
    text = text.replace("\x1b", "")
    say(text)
    assert capsys.readouterr() == ("", text + "\n")


def commands(of: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, (*path, name))


def test_help_of_every_command_is_there_without_torch(dspark: Run) -> None:
    """Every command there is, so that none can be forgotten here."""
    paths = list(commands(typer.main.get_command(app)))
    assert {("generate",), ("bench", "sweep"), ("data", "generate"), ("eval", "trace")} <= set(
        paths
    )
    for path in paths:
        ran = dspark(*path, "--help")
        assert ran.status == 0, path
        assert "Usage" in ran.out
