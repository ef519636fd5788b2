"""What a run in another process tells its `Watch`, by way of a file that both can reach.

One JSON object a line, with one key: {"line": sentence}, {"step": StepReport} or
{"held_out": [step, figures]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from dspark.training.errors import writing
from dspark.training.trainer import StepReport
from dspark.training.training_run import Watch

# Seconds between two looks at the file.
LOOK_EVERY_S = 0.5


def telling(file: Path) -> Watch:
    """What this watch hears is added to `file`. Raises DataError where that cannot be written."""

    def tell(kind: str, what: Any) -> None:
        with writing(file), file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({kind: what}) + "\n")

    return Watch(
        line=lambda text: tell("line", text),
        step=lambda report: tell("step", asdict(report)),
        held_out=lambda step, figures: tell("held_out", [step, figures]),
    )


@contextmanager
def following(file: Path, watch: Watch, *, every_s: float = LOOK_EVERY_S) -> Iterator[None]:
    """While the block runs, `watch` hears in a thread of its own what `file` is told; what was told
    before the block ends is heard before this does. The file begins empty. Raises what `watch`
    raises, once the block has ended well."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    ended = Event()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(_follow, file, watch, ended, every_s)
        try:
            yield
        finally:
            ended.set()
        work.result()


def _follow(file: Path, watch: Watch, ended: Event, every_s: float) -> None:
    at, last = 0, False
    while not last:
        last = ended.wait(every_s)  # one more look after the end
        with file.open("rb") as opened:  # anew: a shared disk shows what was written before that
            opened.seek(at)
            data = opened.read()
        whole = data[: data.rfind(b"\n") + 1]  # a line that is being written waits for its end
        at += len(whole)
        for line in whole.splitlines():
            _hear(json.loads(line), watch)


def _hear(told: dict[str, Any], watch: Watch) -> None:
    ((kind, what),) = told.items()
    if kind == "line":
        watch.line(what)
    elif kind == "step":
        watch.step(StepReport(**what))
    else:
        watch.held_out(*what)
