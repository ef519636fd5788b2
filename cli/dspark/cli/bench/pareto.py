"""Two arms at the same speed for a user, or at the same throughput: curves over all loads.

An arm's curve has a point a load: tokens a second of all users together, and tokens a second that
one user sees. Where a point is beaten in both by another, its operator would choose the other: such
points are left out (each arm is taken at its best). Between points the curve is a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.cli.bench.stats import Ratio, paired_ratio


@dataclass(frozen=True, slots=True)
class Point:
    """per_user: tokens a second that a user sees. throughput: of all of them."""

    per_user: float
    throughput: float


@dataclass(frozen=True, slots=True)
class Matched:
    """One arm over another at a load of the other's. per_user, throughput: where the other stands
    there. more_throughput: at that speed for a user; more_per_user: at that throughput. None where
    the first arm's curve does not reach so far in every round."""

    per_user: float
    throughput: float
    more_throughput: Ratio | None
    more_per_user: Ratio | None


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both, in order of per_user: throughput falls along it."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.per_user, -p.throughput)):
        if not kept or point.throughput > kept[-1].throughput:
            kept.append(point)
    return kept[::-1]


def throughput_at(curve: Sequence[Point], per_user: float) -> float | None:
    """The most tokens a second with at least so much for each user. curve: a frontier."""
    if per_user > curve[-1].per_user:
        return None
    x, y = zip(*((p.per_user, p.throughput) for p in curve), strict=True)
    return float(np.interp(per_user, x, y))  # below the first point: that point is better in both


def per_user_at(curve: Sequence[Point], throughput: float) -> float | None:
    """The most for each user with at least so many tokens a second. curve: a frontier."""
    return throughput_at([Point(p.throughput, p.per_user) for p in curve[::-1]], throughput)


def matched(
    rounds: Sequence[Sequence[Point]], baseline: Sequence[Sequence[Point]]
) -> list[Matched]:
    """One entry a load. rounds, baseline: by round, each arm's points, loads in the same order;
    the arms of a round are compared with each other. The baseline, too, stands on its frontier."""
    ours = [frontier(points) for points in rounds]
    theirs = [frontier(points) for points in baseline]
    found = []
    for load in range(len(baseline[0])):
        at = [points[load] for points in baseline]
        throughputs = [
            (throughput_at(a, p.per_user), throughput_at(b, p.per_user))
            for a, b, p in zip(ours, theirs, at, strict=True)
        ]
        speeds = [
            (per_user_at(a, p.throughput), per_user_at(b, p.throughput))
            for a, b, p in zip(ours, theirs, at, strict=True)
        ]
        found.append(
            Matched(
                float(np.mean([p.per_user for p in at])),
                float(np.mean([p.throughput for p in at])),
                _ratio(throughputs),
                _ratio(speeds),
            )
        )
    return found


def _ratio(pairs: Sequence[tuple[float | None, float | None]]) -> Ratio | None:
    ours = [a for a, _ in pairs if a is not None]
    theirs = [b for _, b in pairs if b is not None]
    if len(ours) < len(pairs) or len(theirs) < len(pairs):
        return None
    return paired_ratio(ours, theirs)
