"""The measurement: for each load all arms side by side, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from dspark.cli.bench.load import Closed, Load, Slice, apply
from dspark.cli.bench.peers import Arm, Server, Trial
from dspark.cli.bench.prompts import Chat, asks

# Of one answer: the first after a pause, and those that warm a server up.
WAKING_TOKENS = 4
WARM_UP_TOKENS = 16
# Of an answer in a sweep, which tries many settings.
TRIAL_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """What one bench does. requests: of a slice (one arm, one load, one round); None takes two for
    each user, and eight at least. max_tokens: of each answer, exactly."""

    chats: Sequence[Chat]
    loads: Sequence[Load]
    rounds: int
    max_tokens: int
    requests: int | None = None

    def count(self, load: Load) -> int:
        users = load.users if isinstance(load, Closed) else 0
        return self.requests or max(8, 2 * users)


@dataclass(slots=True)
class Cell:
    """What one load gave. facts: by arm, its settings. rounds: by arm, its slice; only rounds that
    every arm has ended are here."""

    load: Load
    facts: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Slice]] = field(default_factory=list)


async def measure(
    arms: Sequence[Arm], plan: Plan, cells: list[Cell], say: Callable[[str], None]
) -> None:
    """Fill `cells`, one a load, as far as time allows: whoever cancels keeps the ended rounds.

    The arms of a load are started afresh, warmed up, and then take turns: forwards in one round,
    backwards in the next, so that a slow drift of the machine falls on all alike.
    """
    for number, load in enumerate(plan.loads):
        cell = Cell(load)
        cells.append(cell)
        async with AsyncExitStack() as stack:
            servers = []
            for arm in arms:
                if arm.takes(load):
                    say(f"{load}: starting {arm.name}")
                    trial = _trial(load, plan, f"s{number}")
                    server = await stack.enter_async_context(arm.serve(load, trial))
                    await _warm_up(server, load, plan)
                    cell.facts[server.name] = server.facts
                    servers.append(server)
            for turn in range(plan.rounds):
                cell.rounds.append(await _round(servers, load, plan, f"c{number}r{turn}", turn))
                say(f"{load}, round {turn + 1} of {plan.rounds}: {_speeds(cell.rounds[-1])}")


async def _round(
    servers: Sequence[Server], load: Load, plan: Plan, tag: str, turn: int
) -> dict[str, Slice]:
    count = plan.count(load)
    asked = asks(plan.chats, count, plan.max_tokens, tag, first=turn * count)
    slices = {}
    for server in servers[:: -1 if turn % 2 else 1]:
        async with server.awake(asks(plan.chats, 1, WAKING_TOKENS, f"{tag}w")[0]) as endpoint:
            slices[server.name] = await apply(load, endpoint, asked, seed=turn)
    return slices


async def _warm_up(server: Server, load: Load, plan: Plan) -> None:
    """Every user once, unmeasured."""
    tokens = min(WARM_UP_TOKENS, plan.max_tokens)
    users = load.users if isinstance(load, Closed) else 4
    first, *rest = asks(plan.chats, users + 1, tokens, "warm")
    async with server.awake(first) as endpoint:
        await apply(Closed(users), endpoint, rest)


def _trial(load: Load, plan: Plan, tag: str) -> Trial:
    """How an arm tries a setting of its own: the same load, shorter."""
    tokens = min(TRIAL_TOKENS, plan.max_tokens)
    users = load.users if isinstance(load, Closed) else 0
    first, *rest = asks(plan.chats, 1 + max(4, users), tokens, tag)

    async def trial(server: Server) -> Slice:
        async with server.awake(first) as endpoint:
            return await apply(load, endpoint, rest)

    return trial


def _speeds(slices: dict[str, Slice]) -> str:
    return ", ".join(f"{name} {s.throughput:.1f} tokens/s" for name, s in slices.items())
