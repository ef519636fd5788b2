"""Progress of work that takes hours: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.cli.console import say

# done, all, and a few words more.
Advance = Callable[[int, int, str], None]
# Seconds between two lines where stderr is no terminal.
LINE_EVERY_S = 30.0


@contextmanager
def rate_bar(
    title: str, out: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[Advance]:
    """Told how far it is, as often as one likes; says when it will be done."""
    if not out.is_terminal:
        yield _lines(title, out, clock)
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task(title, total=None, note="")

        def advance(done: int, whole: int, note: str) -> None:
            progress.update(task, completed=done, total=whole, note=note)

        yield advance


def _lines(title: str, out: Console, clock: Callable[[], float]) -> Advance:
    begun = last = clock()
    first: int | None = None

    def advance(done: int, whole: int, note: str) -> None:
        nonlocal last, first
        now = clock()
        first = done if first is None else first
        if now - last < LINE_EVERY_S:
            return
        last = now
        left = ""
        if done > first:
            seconds = (whole - done) * (now - begun) / (done - first)
            left = f", {timedelta(seconds=round(seconds))} left"
        say(f"{title}: {done:,} of {whole:,}{left}{', ' if note else ''}{note}", out)

    return advance
