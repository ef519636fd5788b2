"""The sweep: at each load every policy on an engine of its own, in turns, over shared weights.

What an engine learns (what steps cost, how often drafts stand, what they save) is its policy's at
this load and nobody else's. All engines write to one KV cache, so only one of them has work at a
time, and no prompt begins as another does: none finds there what another left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dspark.cli.bench.engine_load import Ids, Part, closed_loop, requests
from dspark.cli.bench.load import Clock
from dspark.cli.bench.replay import Recording, record
from dspark.core.errors import InvalidRequest
from dspark.core.requests import Request

if TYPE_CHECKING:
    from dspark.scheduler import StepCost
    from dspark.verifier.engine import Engine

# Of an answer that warms up: within so many steps a step cost that is off by half is learnt.
WARM_UP_TOKENS = 32

MakeEngine = Callable[[], "Engine"]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """prompts: token ids. firsts: tokens that prompts may begin with, to be unlike each other.
    per_round: requests of an arm in a round; None takes two for each user, and eight at least."""

    prompts: Sequence[Ids]
    firsts: Sequence[int]
    concurrency: Sequence[int]
    rounds: int
    max_tokens: int
    per_round: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for more requests than can be told apart by their first token."""
        for users in self.concurrency:
            most = self.warm_up(users) + self.rounds * self.count(users)
            if most > len(self.firsts):
                raise InvalidRequest(
                    "rounds",
                    self.rounds,
                    f"is too many: {most} prompts at {users} at once, and {len(self.firsts)} "
                    "tokens to begin them with, each its own",
                )

    def count(self, users: int) -> int:
        return self.per_round or max(8, 2 * users)

    def warm_up(self, users: int) -> int:
        return max(4, users)

    @property
    def warm_up_tokens(self) -> int:
        return min(WARM_UP_TOKENS, self.max_tokens)

    def warming(self, users: int) -> list[Request]:
        return self._requests(0, self.warm_up(users), self.warm_up_tokens, "warm-up")

    def asked(self, users: int, tag: str, turn: int = 0) -> list[Request]:
        """What every arm is asked in a round. A prompt's first token is new to its engine."""
        count = self.count(users)
        return self._requests(self.warm_up(users) + turn * count, count, self.max_tokens, tag)

    def _requests(self, start: int, count: int, max_tokens: int, tag: str) -> list[Request]:
        prompts = [self.prompts[i % len(self.prompts)] for i in range(start, start + count)]
        return requests(prompts, self.firsts[start : start + count], max_tokens, tag)


@dataclass(slots=True)
class SweepCell:
    """What one load gave. rounds: by policy, its part; only rounds that every policy has ended.
    recording: the rounds that regret is counted on."""

    users: int
    recording: Recording | None = None
    rounds: list[dict[str, Part]] = field(default_factory=list)


def expected_s(
    cost: StepCost, prompt_tokens: float, count: int, max_tokens: int, users: int
) -> float:
    """What `count` answers take without drafts."""
    context = int(users * (prompt_tokens + max_tokens / 2))
    prompt = int(prompt_tokens)
    decoding = count * max_tokens / users * cost.seconds(0, users, users, context)
    return decoding + count * cost.seconds(prompt, 0, prompt, 0)


class Pace:
    """How much of a sweep is done, each of its pieces weighed by the seconds it should take.

    advance(done, whole): told of it. deadline: a point on the clock.
    """

    def __init__(
        self,
        plan: SweepPlan,
        arms: int,
        cost: StepCost,
        deadline: float = math.inf,
        *,
        clock: Clock = time.perf_counter,
        advance: Callable[[int, int], None] = lambda _done, _whole: None,
    ) -> None:
        self.clock = clock
        self._cost = cost
        self._prompt_tokens = sum(map(len, plan.prompts)) / len(plan.prompts)
        self._deadline = deadline
        self._advance = advance
        self._began = clock()
        self._done = 0.0
        self._whole = sum(
            (arms + 1) * self._weight(users, plan.warm_up(users), plan.warm_up_tokens)
            + (1 + plan.rounds * arms) * self._weight(users, plan.count(users), plan.max_tokens)
            for users in plan.concurrency
        )

    def _weight(self, users: int, count: int, max_tokens: int) -> float:
        return expected_s(self._cost, self._prompt_tokens, count, max_tokens, users)

    def check(self) -> None:
        """Raises TimeoutError at the deadline."""
        if self.clock() >= self._deadline:
            raise TimeoutError

    def did(self, users: int, count: int, max_tokens: int) -> None:
        self._done += self._weight(users, count, max_tokens)
        self._advance(int(self._done), int(self._whole))

    @property
    def left_s(self) -> float:
        """If all goes on as it went."""
        gone = self.clock() - self._began
        return gone * (self._whole - self._done) / self._done if self._done else self._whole


def sweep(
    arms: Mapping[str, MakeEngine],
    recorder: MakeEngine,
    plan: SweepPlan,
    pace: Pace,
    cells: list[SweepCell],
    say: Callable[[str], None],
) -> None:
    """Fill `cells`, one a load, as far as time allows: whoever interrupts keeps the ended rounds.

    arms: by policy, engines without work. recorder: one that verifies whole blocks. At each load
    the engines are made anew and warmed up; then policies take turns, forwards in one round and
    backwards in the next, so that a slow drift of the machine falls on all alike.
    """
    for users in plan.concurrency:
        say(f"{users} at once: warming up; {duration(pace.left_s)} left")
        cell = SweepCell(users)
        cells.append(cell)
        engines = {name: make() for name, make in arms.items()}
        listener = recorder()
        for engine in (*engines.values(), listener):
            _warm_up(engine, users, plan, pace)
        cell.recording = record(
            listener, plan.asked(users, "recorded"), users, pace.check, pace.clock
        )
        pace.did(users, plan.count(users), plan.max_tokens)
        for turn in range(plan.rounds):
            cell.rounds.append(_round(engines, users, plan, pace, turn))
            said = ", ".join(f"{n} {p.slice.throughput:.1f}" for n, p in cell.rounds[-1].items())
            say(
                f"{users} at once, round {turn + 1} of {plan.rounds}: {said} tokens/s; "
                f"{duration(pace.left_s)} left"
            )


def _warm_up(engine: Engine, users: int, plan: SweepPlan, pace: Pace) -> None:
    """Unmeasured, every user once: it learns what steps cost here."""
    asked = plan.warming(users)
    closed_loop(engine, asked, users, clock=pace.clock, before_step=pace.check)
    pace.did(users, len(asked), plan.warm_up_tokens)


def _round(
    engines: Mapping[str, Engine], users: int, plan: SweepPlan, pace: Pace, turn: int
) -> dict[str, Part]:
    asked = plan.asked(users, f"round {turn}", turn)
    parts = {}
    for name in list(engines)[:: -1 if turn % 2 else 1]:
        parts[name] = closed_loop(
            engines[name], asked, users, clock=pace.clock, before_step=pace.check
        )
        pace.did(users, len(asked), plan.max_tokens)
    return {name: parts[name] for name in engines}


def duration(seconds: float) -> str:
    """m:ss, or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
