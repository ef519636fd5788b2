"""What a verifier step costs: T(P, R, B, context) in seconds (design.md §6; SPS = 1/T in §3.2.2).

A table over the step's token count B (non-decreasing, but as jagged as the machine is), plus a cost
per decoding request and per token of context these attend to. Every `StepCost` that exists is
valid: positive, finite, non-decreasing. `OnlineStepCost` follows the machine while it runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain, combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark.core.errors import ConfigError

FloatArray = NDArray[np.float64]
Sample = tuple[int, int, int, int, float]  # P, R, B, context, seconds

# Sanity bounds of anything called a step: a nanosecond to 11 days, up to 2 billion tokens.
MIN_SECONDS = 1e-9
MAX_SECONDS = 1e6
MAX_TOKENS = 2**31
_FAR = 2.0**40  # where the line beyond the grid ends

# One observation moves the table by at most RATE · SURPRISE = 2 %, however far off it was: a
# hiccup of the machine is forgotten at once, a machine of half the speed is learnt in 35 steps.
RATE = 0.1
SURPRISE = 0.2
# Further than this from its profile a table is wrong, not drifting: profile again.
CORRECTION_LIMIT = 4.0


@dataclass(frozen=True)
class StepCost:
    """T(P, R, B, context) = table(B) + per_sequence_s · R + per_context_token_s · context
    + per_verified_sequence_s · (R − 1) where drafts are verified, B > P + R.

    tokens: the grid of B, increasing. table_s: seconds at those B, positive and non-decreasing;
    linear in between, flat before the first, along the last slope beyond the last. context: tokens
    of KV that the decoding requests attend to, all together. The last term is what it costs that
    queries are no longer one token each; the table, measured with one sequence, holds its share.
    Raises `ConfigError` naming the field.
    """

    tokens: tuple[int, ...]
    table_s: tuple[float, ...]
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    per_verified_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("step cost: tokens is empty: it must have at least 1 grid point")
        if len(self.tokens) != len(self.table_s):
            raise ConfigError(
                f"step cost: table_s has {len(self.table_s)} entries, tokens {len(self.tokens)}"
            )
        for i, (B, s) in enumerate(zip(self.tokens, self.table_s, strict=True)):
            if isinstance(B, bool) or not isinstance(B, int) or not 1 <= B <= MAX_TOKENS:
                raise _bad(f"tokens[{i}]", B, f"must be a whole number in [1, {MAX_TOKENS}]")
            if i and self.tokens[i - 1] >= B:
                raise _bad(f"tokens[{i}]", B, "must be above the entry before it")
            if not _is_seconds(s) or s < MIN_SECONDS:
                limits = f"[{MIN_SECONDS:g}, {MAX_SECONDS:g}]"
                raise _bad(f"table_s[{i}]", s, f"must be a number in {limits}")
            if i and s < self.table_s[i - 1]:
                raise _bad(f"table_s[{i}]", s, "must not be below the entry before it")
        for name in ("per_sequence_s", "per_context_token_s", "per_verified_sequence_s"):
            if not _is_seconds(getattr(self, name)):
                raise _bad(name, getattr(self, name), f"must be a number in [0, {MAX_SECONDS:g}]")

    def seconds(self, P: int, R: int, B: int, context: int) -> float:
        """T of a step of B tokens: P of prefill, R decoding requests and their drafts."""
        verifying = self.per_verified_sequence_s * max(R - 1, 0) if B > P + R else 0.0
        return self.table(B) + self._beside(R, context) + verifying

    def table(self, B: int) -> float:
        """Its part that goes with the tokens alone; as `np.interp`, which takes ten times as long
        for one number in the middle of a step."""
        x, y = self._points
        after = bisect_right(x, B)
        if not after:
            return y[0]
        at = after - 1
        return (y[after] - y[at]) / (x[after] - x[at]) * (B - x[at]) + y[at]

    def curve(self, P: int, R: int, context: int, extra: int) -> FloatArray:
        """float64 [extra + 1]: T at B = P + R, …, P + R + extra, i.e. with 0..extra draft tokens.

        An entry never depends on `extra`: the planner's causality leans on that.
        """
        B = np.arange(P + R, P + R + extra + 1)
        seconds: FloatArray = np.interp(B, *self._line) + self._beside(R, context)
        seconds[1:] += self.per_verified_sequence_s * max(R - 1, 0)
        return seconds

    def decode_seconds(self, P: int, R: int, B: int, context: int, joining: int = 0) -> float:
        """T less what is no price of a token: what a step's decoding is weighed by.

        Prefill is done once whatever is drafted: of a step that is mostly prefill T would make
        every draft look worth verifying. joining: requests that decode once their prompts are
        computed or their drafts are here; a token saved now is one less in the steps with them, so
        decoding is R shares of those (docs/decisions/2026-11-30-prefill-is-no-price.md).
        """
        return self.seconds(P, R, B, context) - self._not_decoding(P, R, joining)

    def decode_curve(
        self, P: int, R: int, context: int, extra: int, joining: int = 0
    ) -> FloatArray:
        """float64 [extra + 1]: `decode_seconds` with 0..extra draft tokens, as `curve`."""
        return self.curve(P, R, context, extra) - self._not_decoding(P, R, joining)

    def _not_decoding(self, P: int, R: int, joining: int) -> float:
        """Seconds of T(P, R, P + R, ·) that decoding is not charged with."""
        decoding = max(R, 1)  # one that ends its prompt decodes from now on
        share = decoding / (decoding + joining)
        return self.table(P + R) - share * self.table(decoding + joining)

    def _beside(self, R: int, context: int) -> float:
        return self.per_sequence_s * R + self.per_context_token_s * context

    @cached_property
    def _line(self) -> tuple[FloatArray, FloatArray]:
        x, y = map(np.array, self._points)
        return x, y

    @cached_property
    def _points(self) -> tuple[list[float], list[float]]:
        """The table with one far point added along its last slope."""
        x, y = list(map(float, self.tokens)), list(self.table_s)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        return [*x, _FAR], [*y, y[-1] + slope * (_FAR - x[-1])]

    @classmethod
    def from_table(cls, table: Mapping[int, float]) -> StepCost:
        """Of {B: seconds} alone, in any order."""
        return cls(tuple(sorted(table)), tuple(float(table[B]) for B in sorted(table)))

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> StepCost:
        """Least squares in relative error on measured (P, R, B, context, seconds), ≥ 1 of them.

        The grid is every B that occurs. What varies while B stands still gives the three slopes
        (nonnegative; partialling the table out first is exact, Frisch–Waugh); the means of what is
        left give the table, pooled where they would fall. Give medians, several R and contexts a B.
        """
        data = np.asarray(samples, np.float64)
        if data.ndim != 2 or data.shape[1] != 5 or not np.isfinite(data).all():
            raise ConfigError("step cost: samples must be one or more (P, R, B, context, seconds)")
        measured: list[FloatArray] = list(data.T)
        P, R, B, context, seconds = measured
        each = np.stack([R, context, np.maximum(R - 1, 0) * (B > P + R)], axis=1)
        if (data < 0).any() or (B < 1).any() or (B % 1).any() or (seconds < MIN_SECONDS).any():
            raise ConfigError(
                "step cost: samples must have whole B >= 1, seconds > 0 and nothing below 0"
            )
        grid, at = np.unique(B, return_inverse=True)
        weight = np.bincount(at, weights=seconds**-2).astype(np.float64)

        def mean(values: FloatArray) -> FloatArray:
            return np.bincount(at, weights=values * seconds**-2) / weight

        def within(values: FloatArray) -> FloatArray:
            return (values - mean(values)[at]) / seconds

        columns = np.stack([within(values) for values in each.T], axis=1)
        size = np.linalg.norm(columns, axis=0)
        moved = size > 1e-9 * np.linalg.norm(each / seconds[:, None], axis=0)  # else: rounding
        scale = np.where(moved, size, np.inf)
        slopes = _nonnegative_least_squares(columns / scale, within(seconds)) / scale
        # What a step took bounds what its requests can have cost; so the table stays positive.
        slopes /= max(1.0, float((each @ slopes / seconds).max()) / 0.99)
        table = _isotonic(np.maximum(mean(seconds - each @ slopes), MIN_SECONDS), weight)
        return cls(tuple(int(b) for b in grid), tuple(table), *map(float, slopes))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, *, strict: bool = True) -> StepCost:
        """A missing, unknown or impossible field raises `ConfigError` naming it. strict: False for
        what another version may have written: unknown fields are left out, and those that have a
        usual value may be missing."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"step cost: not JSON: {error}") from None
        names = [field.name for field in fields(cls)]
        if isinstance(data, dict) and not strict:
            usual = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
            data = usual | {name: data[name] for name in names if name in data}
        if not isinstance(data, dict) or set(data) != set(names):
            got = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ConfigError(f"step cost: must be an object with the fields {names}, not {got}")
        for name in ("tokens", "table_s"):
            if not isinstance(data[name], list):
                raise _bad(name, data[name], "must be a list")
            data[name] = tuple(data[name])
        return cls(**data)

    def save(self, path: Path) -> None:
        """Write whole or not at all: a reader sees the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    @classmethod
    def load(cls, path: Path) -> StepCost:
        """`OSError` if it cannot be read, `ConfigError` naming the path if it is not a cost."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (ConfigError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None


def corrected(
    now: StepCost, profiled: StepCost, P: int, R: int, B: int, context: int, seconds: float
) -> StepCost:
    """`now` moved a little towards one observed step, within CORRECTION_LIMIT of `profiled`.

    Multiplicative and by neighbourhood: a grid point d octaves from B takes 1/(1+d) of the move, as
    a machine that slows down slows everywhere, mostly here. Points that would then break the order
    give way to the one nearest to what was just seen. What is no measurement (NaN, ∞, ≤ 0), or lies
    beyond the grid, where there is no point to move, changes nothing.
    """
    if not (math.isfinite(seconds) and seconds > 0 and 1 <= B <= now.tokens[-1]):
        return now
    table = now.table(B)
    ratio = (table + seconds - now.seconds(P, R, B, context)) / table
    surprise = min(max(math.log(max(ratio, 1e-9)), -SURPRISE), SURPRISE)
    octaves = [abs(math.log2(tokens / B)) for tokens in now.tokens]
    moved = []
    for seconds_then, start, far in zip(now.table_s, profiled.table_s, octaves, strict=True):
        least = max(start / CORRECTION_LIMIT, MIN_SECONDS)
        most = min(start * CORRECTION_LIMIT, MAX_SECONDS)
        new = seconds_then * math.exp(RATE * surprise / (1 + far))
        moved.append(min(max(new, least), most))
    here = octaves.index(min(octaves))
    upward = accumulate(moved[here:], max)
    downward = list(accumulate(reversed(moved[: here + 1]), min))
    return replace(now, table_s=(*reversed(downward[1:]), *upward))


class OnlineStepCost:
    """A step cost that learns from the steps it is told of. Not thread-safe; one caller.

    current: what to plan with now. residual: running mean of |seconds / predicted − 1|, each step
    counted as 1 at most: how far the model is from the machine (goes into the report).
    """

    def __init__(self, profiled: StepCost) -> None:
        self.profiled = profiled
        self.current = profiled
        self.residual = 0.0
        self._seen = 0

    def observe(self, P: int, R: int, B: int, context: int, seconds: float) -> None:
        """Take in one step; what is no measurement is ignored."""
        if not (math.isfinite(seconds) and seconds > 0 and B >= 1):
            return
        miss = min(abs(seconds / self.current.seconds(P, R, B, context) - 1.0), 1.0)
        self._seen += 1
        self.residual += (miss - self.residual) * max(RATE, 1.0 / self._seen)
        self.current = corrected(self.current, self.profiled, P, R, B, context, seconds)


def cost_key(hardware: str, model: str, precision: str, backend: str, threads: int) -> str:
    """File name of the cached cost of (hardware, model, precision, backend, threads).

    The digest tells them apart; the rest is for people.
    """
    whole = json.dumps([hardware, model, precision, backend, threads])
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip("-.")[:40]
    kind = re.sub(r"[^A-Za-z0-9]+", "-", f"{precision}-{backend}-{threads}t")
    return f"{name}-{kind}-{digest}.json"


def hardware_name(cpuinfo: str, cores: int, otherwise: str = "unknown processor") -> str:
    """Name a processor by the text of /proc/cpuinfo, and the cores that may be used.

    Clouds give many processors one model name, so family, model and stepping stand beside it.
    """
    facts = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*)$", cpuinfo, re.MULTILINE))
    parts = [facts.get("model name", otherwise)]
    parts += [
        f"{word} {facts[word]}" for word in ("cpu family", "model", "stepping") if word in facts
    ]
    return f"{', '.join(parts)}, {cores} cores"


def hardware() -> str:
    """`hardware_name` of the machine this runs on."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    return hardware_name(cpuinfo, cores, platform.processor() or platform.machine())


def _nonnegative_least_squares(X: FloatArray, y: FloatArray) -> FloatArray:
    """argmin ‖X·s − y‖ over s ≥ 0, few columns: the best of all sets that may be nonzero."""
    width = X.shape[1]
    best = np.zeros(width)
    sets = chain.from_iterable(combinations(range(width), n) for n in range(1, width + 1))
    for columns in map(list, sets):
        s = np.zeros(width)
        s[columns] = np.linalg.lstsq(X[:, columns], y, rcond=None)[0]
        if (s >= 0).all() and np.sum((X @ s - y) ** 2) < np.sum((X @ best - y) ** 2):
            best = s
    return best


def _isotonic(values: FloatArray, weights: FloatArray) -> list[float]:
    """The non-decreasing sequence nearest to `values`: pool adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, entries
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            m, w, n = pools.pop()
            total = w + pool[1]
            pool = ((m * w + pool[0] * pool[1]) / total, total, n + pool[2])
        pools.append(pool)
    return [mean for mean, _, entries in pools for _ in range(entries)]


def _is_seconds(value: object) -> bool:
    """A number in [0, MAX_SECONDS]; NaN fails every comparison."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value <= MAX_SECONDS  # type: ignore[operator]


def _bad(name: str, value: object, limit: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(f"step cost: {name} = {shown[:40]} {limit}")
