"""Load on an endpoint, closed or open loop, and when each token came.

The load runs in the process of the command; every endpoint it is put on is another process, so the
one never takes the other's event loop. A token's time is the time of the chunk that brought it, and
what counts is how many tokens a chunk holds, never how many chunks there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dspark.core.errors import Unavailable

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat to answer with exactly `max_tokens` tokens."""

    messages: tuple[Mapping[str, str], ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """So many tokens of an answer came together."""

    count: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What an endpoint says of the whole answer. rounds, accepted: of speculation; rounds is 0
    where it says nothing about that."""

    prompt_tokens: int
    completion_tokens: int
    rounds: int = 0
    accepted: int = 0


class Endpoint(Protocol):
    """Answers a chat: tokens as they come, and the usage once. Raises Unavailable."""

    def answer(self, ask: Ask) -> AsyncGenerator[Tokens | Usage, None]: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. due: when it was asked for, or in an open loop should have been, seconds.
    arrivals: (time, tokens) of each chunk that held any."""

    due: float
    arrivals: tuple[tuple[float, int], ...]
    usage: Usage

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.due

    @property
    def tpot_s(self) -> float:
        """Seconds from the first token to the last, over the tokens after the first."""
        return (self.ended - self.arrivals[0][0]) / max(self.usage.completion_tokens - 1, 1)

    @property
    def ended(self) -> float:
        return self.arrivals[-1][0]

    def share(self, end: float) -> float:
        """Of its time from being due to its last token, what lies before `end`, in [0, 1]."""
        if end >= self.ended:
            return 1.0
        return max(end - self.due, 0.0) / (self.ended - self.due)


@dataclass(frozen=True, slots=True)
class Closed:
    """So many users, each of whom asks again as soon as it is answered."""

    users: int

    def __str__(self) -> str:
        return f"{self.users} at once"


@dataclass(frozen=True, slots=True)
class Open:
    """Requests that arrive at random (Poisson), `rate` a second, whatever the server does."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g}/s"


Load = Closed | Open


@dataclass(frozen=True, slots=True)
class Slice:
    """What one load on one endpoint gave. seconds: from the first request to the last token.
    counted_s: seconds from the first request on in which tokens are counted for the throughput.
    client_s: CPU seconds that making the load took."""

    answers: tuple[Answered, ...]
    seconds: float
    counted_s: float
    client_s: float

    @property
    def tokens(self) -> int:
        return sum(answer.usage.completion_tokens for answer in self.answers)

    @property
    def counted_tokens(self) -> float:
        """Those of answers under way at the end by the share of their time: a prompt is paid for
        first, and an arm whose answers do not end together would have paid for more of them."""
        end = min(answer.due for answer in self.answers) + self.counted_s
        return sum(answer.usage.completion_tokens * answer.share(end) for answer in self.answers)

    @property
    def throughput(self) -> float:
        """Answer tokens a second."""
        return self.counted_tokens / self.counted_s


async def apply(
    load: Load,
    endpoint: Endpoint,
    asks: Sequence[Ask],
    *,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Slice:
    """Every ask answered once. seed: of an open loop's arrivals. Raises what an endpoint raises."""
    burnt = time.process_time()
    if isinstance(load, Closed):
        answers = await closed_loop(endpoint, asks, load.users, clock)
        end = busy_until(answers)
    else:
        answers = await open_loop(endpoint, asks, arrivals(load.rate, len(asks), seed), clock)
        end = max(a.ended for a in answers)
    began = min(a.due for a in answers)
    seconds = max(a.ended for a in answers) - began
    return Slice(tuple(answers), seconds, end - began, time.process_time() - burnt)


def busy_until(answers: Sequence[Answered]) -> float:
    """When a closed loop's first user has nothing more to ask: from there on fewer than all are at
    it, for a while that is longer the more the answers' speeds differ."""
    last_asked = max(answer.due for answer in answers)
    ends = [answer.ended for answer in answers]
    return min((end for end in ends if end > last_asked), default=max(ends))


async def closed_loop(
    endpoint: Endpoint, asks: Sequence[Ask], users: int, clock: Clock
) -> list[Answered]:
    """In the order they ended."""
    waiting, answers = iter(asks), list[Answered]()

    async def user() -> None:
        for ask in waiting:
            answers.append(await timed(endpoint, ask, clock(), clock))

    await _together([user() for _ in range(min(users, len(asks)))])
    return answers


async def open_loop(
    endpoint: Endpoint, asks: Sequence[Ask], at: Sequence[float], clock: Clock
) -> list[Answered]:
    """at: seconds from now. An answer's time counts from when it was due, so a client or a server
    that falls behind shows in the figures and does not thin out the load."""
    began = clock()

    async def one(ask: Ask, due: float) -> Answered:
        await asyncio.sleep(max(due - clock(), 0.0))
        return await timed(endpoint, ask, due, clock)

    return await _together([one(ask, began + t) for ask, t in zip(asks, at, strict=True)])


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds of a Poisson process; the first arrival is at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(t) for t in np.cumsum(gaps) - gaps[0]]


async def timed(endpoint: Endpoint, ask: Ask, due: float, clock: Clock) -> Answered:
    """One answer. Raises Unavailable if it is not of `max_tokens` tokens, each accounted for: arms
    are compared at equal counts or not at all."""
    came: list[tuple[float, int]] = []
    usage: Usage | None = None
    async with aclosing(endpoint.answer(ask)) as parts:
        async for part in parts:
            if isinstance(part, Usage):
                usage = part
            elif part.count:
                came.append((clock(), part.count))
    if usage is None:
        raise Unavailable("a stream ended without its usage")
    counted = sum(tokens for _, tokens in came)
    if counted != usage.completion_tokens:
        raise Unavailable(
            f"a stream's chunks hold {counted} tokens, its usage says {usage.completion_tokens}: "
            "without token ids in its chunks such a server cannot be measured by tokens"
        )
    if counted != ask.max_tokens:
        raise Unavailable(f"an answer ended after {counted} of {ask.max_tokens} tokens")
    return Answered(due, tuple(came), usage)


async def _together(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results in order; the first failure ends the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
