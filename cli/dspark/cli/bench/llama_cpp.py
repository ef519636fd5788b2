"""llama.cpp as an arm, at the best settings of a sweep that is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dspark.cli.bench.load import Closed, Load, Slice
from dspark.cli.bench.peers import Server, Trial, started
from dspark.core.errors import Unavailable

# Slots under an open loop, where there is no number of users to take it from.
OPEN_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """One way to run llama.cpp's server. context: tokens a slot. spin: OpenMP's own waiting, or the
    short one our server runs with. ngram: its n-gram speculation at its own defaults."""

    slots: int
    context: int
    threads: int
    batch: int = 2048
    ubatch: int = 512
    flash: bool = True
    spin: bool = True
    ngram: bool = False

    def __str__(self) -> str:
        words = [f"{self.slots} slots", f"{self.threads} threads"]
        words += [f"batch {self.batch}", f"ubatch {self.ubatch}"]
        words += [f"flash attention {'on' if self.flash else 'off'}"]
        words += [f"{'long' if self.spin else 'short'} spin"]
        return ", ".join([*words, "n-gram drafts"] if self.ngram else words)


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting of the sweep and what it gave, or why it gave nothing."""

    settings: Settings
    tokens_per_s: float | None
    mean_latency_s: float | None
    error: str | None = None


# One knob each: the other values to try, the rest as it stands.
KNOBS: tuple[Callable[[Settings], list[Settings]], ...] = (
    lambda at: [replace(at, flash=not at.flash)],
    lambda at: [replace(at, batch=b, ubatch=u) for b, u in ((512, 128), (2048, 2048))],
    lambda at: [replace(at, threads=at.threads - 1)] if at.threads > 1 else [],
    lambda at: [replace(at, slots=n) for n in sorted({at.slots // 2, at.slots // 4} - {0})],
    lambda at: [replace(at, spin=not at.spin)],
    lambda at: [replace(at, ngram=not at.ngram)],
)


async def sweep(first: Settings, merit: Callable[[Settings], Awaitable[float | None]]) -> Settings:
    """The best found by turning one knob after the other and keeping what helped. merit: higher is
    better, None cannot run. Raises Unavailable if nothing runs."""
    best, score = first, await merit(first)
    for others in KNOBS:
        for settings in others(best):
            found = await merit(settings)
            if found is not None and (score is None or found > score):
                best, score = settings, found
    if score is None:
        raise Unavailable("no setting of the sweep runs")
    return best


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp's server on one GGUF file. context: tokens of the longest prompt and its answer.
    threads: at most. say: gets a line for each setting tried."""

    name: str
    file: Path
    context: int
    threads: int
    say: Callable[[str], None]

    def takes(self, load: Load) -> bool:
        return True

    @asynccontextmanager
    async def serve(self, load: Load, trial: Trial) -> AsyncIterator[Server]:
        tried: list[Tried] = []

        async def merit(settings: Settings) -> float | None:
            result = await self._try(load, settings, trial)
            tried.append(result)
            self.say(f"{self.name}, {load}: {settings}: {_in_words(result)}")
            if isinstance(load, Closed) or result.mean_latency_s is None:
                return result.tokens_per_s
            return -result.mean_latency_s  # an open loop says itself how many tokens a second

        slots = load.users if isinstance(load, Closed) else OPEN_SLOTS
        best = await sweep(Settings(slots, self.context, self.threads), merit)
        self.say(f"{self.name}, {load}: taken: {best}")
        sweep_facts = {"settings": asdict(best), "sweep": [asdict(result) for result in tried]}
        async with self.run(best) as server:
            yield replace(server, facts={**server.facts, **sweep_facts})

    async def _try(self, load: Load, settings: Settings, trial: Trial) -> Tried:
        try:
            async with self.run(settings) as server:
                result = await trial(server)
        except Unavailable as error:
            return Tried(settings, None, None, str(error))
        return Tried(settings, result.tokens / result.seconds, _mean_latency(result))

    @asynccontextmanager
    async def run(self, settings: Settings) -> AsyncIterator[Server]:
        """Started with these settings, and paused."""
        from dspark.cli.bench.streams import connected

        module = "dspark.cli.bench.llama_cpp_server"
        command = [sys.executable, "-m", module, str(self.file), json.dumps(asdict(settings))]
        async with started(self.name, command, _ready, _environment(settings.spin)) as (up, ready):
            said = json.loads(ready)
            facts = {"file": self.file.name, "system": said["system"]}
            yield Server(self.name, lambda: connected(said["url"]), facts, up)


def _environment(spin: bool) -> Mapping[str, str]:
    """OpenMP reads how long to spin when it is loaded; `dspark` itself sets the short one."""
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    return environment if spin else {**environment, "GOMP_SPINCOUNT": "1000"}


def _ready(line: str) -> str | None:
    return line if line.startswith('{"url"') else None


def _mean_latency(result: Slice) -> float:
    return sum(a.ended - a.due for a in result.answers) / len(result.answers)


def _in_words(result: Tried) -> str:
    if result.error is not None:
        return f"does not run: {result.error.splitlines()[0]}"
    return f"{result.tokens_per_s:.1f} tokens/s, {result.mean_latency_s:.2f} s an answer"
