"""Answers go to stdout, and all that a person is told beside them to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from dspark.deploy.single import Loaded, TargetConfig

Advance = Callable[[int, int], None]


def put(text: str) -> None:
    """A piece of an answer, now and to the letter (`typer.echo` takes escape sequences out)."""
    sys.stdout.write(text)
    sys.stdout.flush()


def console() -> Console:
    """stderr. Words stay as they are: a path or a prompt may look like markup or an emoji."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(text: str, out: Console | None = None, style: str = "dim") -> None:
    """One line, however long."""
    (out or console()).print(text, style=style, soft_wrap=True)


@contextmanager
def bar(title: str, out: Console) -> Iterator[Advance]:
    """A progress bar fed with (done, all); plain silence where stderr is no terminal."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


def load_with_progress(config: TargetConfig, *, profile: bool = False) -> Loaded:
    """`dspark.deploy.single.load`, told to the person who waits for it."""
    from dspark.deploy.single import Progress as Report
    from dspark.deploy.single import load

    out = console()
    with bar(f"loading {config.model}", out) as steps:
        return load(config, Report(lambda text: say(text, out), steps), profile=profile)
