"""All points of a configuration: each value of its sweep with each arm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dspark.scheduler.simulation.config import SimulationConfig
from dspark.scheduler.simulation.figures import Costs, Figures, costs, figures
from dspark.scheduler.simulation.planning import MakeGuide
from dspark.scheduler.simulation.run import Simulation

# As good as the best: what one more drafter may bring and still be left out.
ENOUGH = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    figures: Figures
    costs: Costs


@dataclass(frozen=True, slots=True)
class Progress:
    """Told between events: which point of how many, and how far it is (0 to 1)."""

    point: int
    points: int
    name: str
    done: float


async def sweep(
    config: SimulationConfig,
    guide: MakeGuide | None = None,
    progress: Callable[[Progress], None] = lambda told: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Point]:
    """Every point, in order; those that were done before `stop` said so, and the one that ran then
    as far as it came."""
    found: list[Point] = []
    every = [(swept, arm) for swept in config.swept() for arm in config.arms]
    for number, ((setting, value, here), arm) in enumerate(every):
        if stop():
            break
        name = arm.label + (f", {setting} {value:g}" if setting else "")

        def tell(now: float, answered: int, number: int = number, name: str = name) -> None:
            part = now / config.duration_s
            if config.requests:
                part = max(part, answered / config.requests)
            progress(Progress(number + 1, len(every), name, part))

        begin = time.perf_counter()
        ran = await Simulation(here, arm, guide if arm.central else None, tell, stop).run()
        if ran.seconds > 0:
            wall_s = time.perf_counter() - begin
            found.append(Point(figures(here, arm, ran, setting, value), costs(ran, wall_s)))
    return found


def by_arm(found: Sequence[Figures]) -> dict[str, list[Figures]]:
    """In the order of the sweep."""
    arms: dict[str, list[Figures]] = {}
    for point in found:
        arms.setdefault(point.arm, []).append(point)
    return arms


def enough_drafters(found: Sequence[Figures]) -> Iterator[tuple[str, int, Figures]]:
    """Of a sweep of drafters: by arm, the fewest whose throughput is within ENOUGH of the best."""
    for arm, points in by_arm([p for p in found if p.setting == "drafters"]).items():
        best = max(point.throughput for point in points)
        good = [point for point in points if point.throughput >= best * (1 - ENOUGH)]
        least = min(good, key=lambda point: point.value)
        yield arm, int(least.value), least
