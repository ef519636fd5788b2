"""Drafting rounds as they happen: whole blocks through the engine, each with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.core.config import EngineConfig
from dspark.core.drafts import Draft, Drafter, DrafterCard, DraftRequest, NeedContext
from dspark.core.errors import DsparkError
from dspark.core.requests import Committed, Finished, Request
from dspark.core.sampling import SamplingMode, SamplingParams
from dspark.models.targets.backend import Backend
from dspark.scheduler import OnlineStepCost, StepCost
from dspark.training.records import Round
from dspark.verifier.engine import Engine, Key

# What tells a step's cost does not matter where the policy is fixed.
_ANY_COST = {1: 1.0}


@dataclass(slots=True)
class Answer:
    """One answered prompt. ids: of the answer."""

    prompt: int
    ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    error: DsparkError | None = None


class ListeningDrafter:
    """A drafter whose last replies are remembered, by session and round, until they are taken."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._said: dict[tuple[str, int], tuple[DraftRequest, Draft]] = {}

    @property
    def card(self) -> DrafterCard:
        return self._drafter.card

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | NeedContext]:
        replies = self._drafter.propose(requests)
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, Draft):
                self._said[request.session, request.round] = request, reply
        return replies

    def close(self, session: str) -> None:
        self._drafter.close(session)

    def take(self, session: str, round_: int) -> tuple[DraftRequest, Draft] | None:
        return self._said.pop((session, round_), None)


@dataclass(frozen=True, slots=True)
class Asking:
    """How prompts are asked: temperature and seeded or not (the three modes), tokens at most,
    answers at once. seed: of unseeded draws and, plus the prompt's number, of seeded requests."""

    temperature: float = 0.0
    coupled: bool = False
    max_tokens: int = 256
    concurrency: int = 16
    seed: int = 0

    @property
    def mode(self) -> SamplingMode:
        return self.params(0).mode

    def params(self, prompt: int) -> SamplingParams:
        seed = self.seed + prompt if self.coupled else None
        return SamplingParams(self.temperature, seed=seed, max_tokens=self.max_tokens)


def ask(
    backend: Backend,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    asking: Asking,
    *,
    eos_ids: Collection[int] = (),
    enough: Callable[[int], bool] = lambda _rounds: False,
    watch: Callable[[int, int, int], None] = lambda _done, _all, _rounds: None,
) -> list[Answer]:
    """Answers to prompts with every block verified whole (`fixed:γ`), and their rounds.

    backend: with the drafter's projection loaded. enough(rounds so far): begin no further answer.
    watch: told answers done, of how many, and rounds.
    """
    listening = ListeningDrafter(drafter)
    engine = _engine(backend, listening, prompts, asking, eos_ids)
    answers: list[Answer] = []
    running: dict[Key, _Following] = {}
    ids = iter(enumerate(prompts))
    done = rounds = 0
    more = True
    while more or running:
        while more and len(running) < asking.concurrency:
            found = next(ids, None)
            if found is None or enough(rounds):
                more = False
                break
            number, prompt = found
            request = _request(engine, number, prompt, asking)
            engine.submit(request)
            answers.append(Answer(number))
            running[request.request_id, 0] = _Following(answers[-1], request)
        for key, event in engine.step():
            following = running[key]
            if isinstance(event, Finished):
                following.answer.error = event.error
                del running[key]
                done += 1
            else:
                rounds += following.take(event, listening)
        watch(done, len(prompts), rounds)
    return answers


@dataclass(slots=True)
class _Following:
    answer: Answer
    request: Request
    round: int = 0

    def take(self, event: Committed, drafter: ListeningDrafter) -> int:
        """Adds what was committed; 1 if that was a round with a draft."""
        session = f"{self.request.request_id}/{self.request.choice}/{self.request.attempt}"
        said = drafter.take(session, self.round)
        self.round += 1
        text = (*self.request.prompt_ids, *self.answer.ids)
        start, anchor = len(text) - 1, text[-1]
        self.answer.ids += event.ids
        figures = event.speculation
        if not figures.rounds:
            return 0
        if said is None:  # it was asked and gave nothing
            self.answer.rounds.append(Round(start, anchor, (), (), 0, 0))
            return 1
        request, draft = said
        assert request.anchor_position == start, "a draft of another round"
        # The token after those that stand is the target's verdict on the next one. It is missing
        # where a draft token ended the answer.
        ended = len(event.ids) == figures.accepted
        self.answer.rounds.append(
            Round(
                start=start,
                anchor=anchor,
                draft=draft.ids[: figures.verified],
                logits=tuple(draft.confidence_logits[: figures.verified].tolist()),
                judged=figures.accepted if ended else figures.verified,
                accepted=figures.accepted,
            )
        )
        return 1


def _engine(
    backend: Backend,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    asking: Asking,
    eos_ids: Collection[int],
) -> Engine:
    gamma = drafter.card.gamma
    longest = max(map(len, prompts)) + asking.max_tokens + gamma + 2 * backend.block_size
    tokens = min(longest, backend.context_length + 2 * backend.block_size)
    config = EngineConfig(
        kv_tokens=asking.concurrency * tokens,
        block_size=backend.block_size,
        max_sequences=asking.concurrency,
        max_step_tokens=max(512, asking.concurrency * (1 + gamma)),
        max_waiting=asking.concurrency,
        gamma=gamma,
        verify=f"fixed:{gamma}",
    )
    return Engine(
        backend,
        config,
        OnlineStepCost(StepCost.from_table(_ANY_COST)),
        drafters={drafter.card.drafter_id: drafter},
        eos_ids=eos_ids,
        rng=np.random.default_rng(asking.seed),
    )


def _request(engine: Engine, number: int, prompt: Sequence[int], asking: Asking) -> Request:
    """Answers end where the context does."""
    params = asking.params(number)
    room = engine.limits.sequence_tokens - len(prompt)
    most = min(asking.max_tokens, max(room, 1))
    sampling = SamplingParams(params.temperature, seed=params.seed, max_tokens=most)
    return Request(str(number), tuple(prompt), sampling)
