"""A watch hears what a run in another process tells: all of it, once, in order, as it happens."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dspark.training.distant_watch import following, telling
from dspark.training.errors import DataError
from dspark.training.trainer import StepReport
from dspark.training.training_run import Watch

OFTEN = 0.001


class Heard:
    def __init__(self) -> None:
        self.all: list[Any] = []
        self._some = Event()

    def watch(self) -> Watch:
        return Watch(
            line=self._hear,
            step=self._hear,
            held_out=lambda step, figures: self._hear((step, figures)),
        )

    def _hear(self, what: Any) -> None:
        self.all.append(what)
        self._some.set()

    def wait(self) -> None:
        assert self._some.wait(30)
        self._some.clear()


def report(step: int) -> StepReport:
    return StepReport(step, {"loss": 0.1 + step, "ce": 2.5}, 6e-4, 1.5, 96, 1e9, 0.25)


def test_all_is_heard_in_order(tmp_path: Path) -> None:
    heard, figures = Heard(), {"loss": 1.25, "tau": 2.5, "accepted": [0.5, 0.25]}
    file = tmp_path / "run" / "told.jsonl"
    with following(file, heard.watch()):
        told = telling(file)
        told.line("14 answers to train on …")
        told.step(report(1))
        told.held_out(1, figures)
        told.step(report(2))
    assert heard.all == ["14 answers to train on …", report(1), (1, figures), report(2)]


def test_it_is_heard_while_the_run_goes_on(tmp_path: Path) -> None:
    heard, file = Heard(), tmp_path / "told.jsonl"
    with following(file, heard.watch(), every_s=OFTEN):
        for step in (1, 2, 3):
            telling(file).step(report(step))
            heard.wait()
            assert heard.all[-1] == report(step)
    assert len(heard.all) == 3


def test_a_run_before_is_not_heard_again(tmp_path: Path) -> None:
    heard, file = Heard(), tmp_path / "told.jsonl"
    telling(file).step(report(7))
    with following(file, heard.watch()):
        telling(file).step(report(5))
    assert heard.all == [report(5)]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    """And the run's own error is what is raised."""
    heard, file = Heard(), tmp_path / "told.jsonl"

    def killed() -> None:
        with following(file, heard.watch()):
            telling(file).line("the last")
            with file.open("a") as opened:
                opened.write('{"line": "a ha')
            raise DataError("gone")

    with pytest.raises(DataError, match="gone"):
        killed()
    assert heard.all == ["the last"]


def test_what_a_watch_raises_is_not_lost(tmp_path: Path) -> None:
    def broken(_: str) -> None:
        raise ValueError("no terminal")

    file = tmp_path / "told.jsonl"
    with pytest.raises(ValueError, match="no terminal"), following(file, Watch(line=broken)):
        telling(file).line("a")
