"""A closed loop on an engine in this process, with no event loop and no wire between them.

What a server's client sees of an answer (`Answered`, `Slice`) is made here too, so that figures
mean the same as in `dspark bench serve`. Beside it stands what only an engine knows: `Work`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from dspark.cli.bench.load import Answered, Clock, Slice, Usage
from dspark.core.requests import Committed, Finished, Request
from dspark.core.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.verifier.engine import Engine, EngineEvent
    from dspark.verifier.figures import Figures

Ids = tuple[int, ...]

# Ids before these 2 % of a vocabulary are often special ones.
SPECIAL_SHARE = 50


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine did. rounds: of decoding requests, with a draft or without. drafted, verified,
    accepted: draft tokens. forward_s: in the model. draft_s: in drafters."""

    steps: int = 0
    prefill_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    forward_s: float = 0.0
    draft_s: float = 0.0

    @classmethod
    def until_now(cls, figures: Figures) -> Work:
        """Since the engine started."""
        spec = figures.speculation
        return cls(
            figures.steps, figures.prefill_tokens,
            spec.rounds, spec.drafted, spec.verified, spec.accepted,
            figures.forward_s, figures.draft_s,
        )  # fmt: skip

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_verify_length(self) -> float:
        """ℓ: draft tokens verified a round, 0 where nothing was drafted."""
        return self.verified / self.rounds if self.rounds else 0.0

    @property
    def accepted_length(self) -> float:
        """τ: tokens committed a round, the bonus token counted."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """A slice, and the work of the engine in its counted seconds."""

    slice: Slice
    work: Work


def heads(vocab_size: int, reserved: Sequence[int]) -> list[int]:
    """First tokens that tell prompts apart; `reserved` ones end texts."""
    taken = set(reserved)
    return [token for token in range(vocab_size // SPECIAL_SHARE, vocab_size) if token not in taken]


def requests(
    prompts: Sequence[Ids], firsts: Sequence[int], max_tokens: int, tag: str
) -> list[Request]:
    """Greedy requests of exactly `max_tokens` tokens. Each prompt begins with a token of its own,
    one of `firsts`, so that no prefix cache answers in place of the model."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    pairs = zip(firsts, prompts, strict=True)
    return [
        Request(f"{tag} {i}", (first, *prompt), params) for i, (first, prompt) in enumerate(pairs)
    ]


@dataclass(slots=True)
class _Open:
    """An answer that is under way."""

    due: float
    prompt_tokens: int
    max_tokens: int
    arrivals: list[tuple[float, int]]
    rounds: int = 0
    accepted: int = 0

    def take(self, event: Committed, now: float) -> None:
        self.arrivals.append((now, len(event.ids)))
        self.rounds += event.speculation.rounds
        self.accepted += event.speculation.accepted

    def close(self, event: Finished) -> Answered:
        """Raises what it ended with."""
        if event.error is not None:
            raise event.error
        assert not event.usage.cached_tokens, "the prefix cache answered for the model"
        assert event.usage.completion_tokens == self.max_tokens, "answers are equally long"
        usage = Usage(self.prompt_tokens, self.max_tokens, self.rounds, self.accepted)
        return Answered(self.due, tuple(self.arrivals), usage)


def closed_loop(
    engine: Engine,
    asked: Sequence[Request],
    users: int,
    *,
    clock: Clock = time.perf_counter,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[Sequence[EngineEvent], bool], None] = lambda _events, _busy: None,
) -> Part:
    """So many users, each of whom asks again as soon as it is answered; every request once.

    Counted is until the first user has nothing more to ask. before_step: may raise to give up.
    after_step(events, busy): what a step said, and whether it is counted.
    """
    waiting = list(reversed(asked))
    under_way: dict[str, _Open] = {}
    answers: list[Answered] = []
    started, work = Work.until_now(engine.figures), None
    began = now = idle = clock()
    while waiting or under_way:
        while waiting and len(under_way) < users:
            request = waiting.pop()
            engine.submit(request)
            most = request.sampling.max_tokens or 0
            under_way[request.request_id] = _Open(now, len(request.prompt_ids), most, [])
        if work is None and len(under_way) < min(users, len(asked)):
            work, idle = Work.until_now(engine.figures) - started, now
        before_step()
        events = engine.step()
        now = clock()
        after_step(events, work is None)
        for (request_id, _), event in events:
            if isinstance(event, Committed):
                under_way[request_id].take(event, now)
            else:
                answers.append(under_way.pop(request_id).close(event))
    if work is None:  # all ended together
        work, idle = Work.until_now(engine.figures) - started, now
    return Part(Slice(tuple(answers), now - began, idle - began, client_s=0.0), work)
