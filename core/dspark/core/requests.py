"""What a request asks of a verifier and what it gets back: plain data, one choice at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import DsparkError, InvalidRequest
from dspark.core.sampling import MAX_CHOICES, SamplingParams, check_sampling


@dataclass(frozen=True, slots=True)
class Speculation:
    """A request's own wishes about speculation; None takes the operator's default."""

    drafter: str | None = None
    gamma: int | None = None
    verify: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one request, as a verifier runs it (`Run` of verification.proto).

    prompt_ids: the prompt. committed_ids: tokens an earlier attempt already streamed; the engine
    goes on after them as if it had made them itself. deadline: a point in time on the engine's
    clock, seconds. A newer `attempt` of the same `request_id` and `choice` ends the older one.
    drafter: replica id of the one that the scheduler named, "" for whatever the verifier takes.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choice: int = 0
    attempt: int = 0
    committed_ids: tuple[int, ...] = ()
    deadline: float | None = None
    lease: str = ""
    epoch: int = 0
    drafter: str = ""
    tenant: str = ""
    priority: int = 0
    floor_tps: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a target and its engine can hold. context_length, kv_tokens: tokens."""

    vocab_size: int
    context_length: int
    kv_tokens: int

    @property
    def sequence_tokens(self) -> int:
        """The longest sequence (prompt and answer) that can be served."""
        return min(self.context_length, self.kv_tokens)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """log p of one committed token under the model's own distribution (before temperature,
    penalties and truncation), and of the `top_logprobs` most likely ids."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """rounds: verify rounds; drafted >= verified >= accepted: draft tokens."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    def __add__(self, other: SpeculationFigures) -> SpeculationFigures:
        return SpeculationFigures(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.verified + other.verified,
            self.accepted + other.accepted,
        )

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round committed, the bonus token counted (τ)."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that stand for good. index: output position of the first of `ids`. cached_tokens: of
    the prompt, those that the prefix cache brought."""

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a choice; `error` says why when reason is ERROR."""

    reason: FinishReason
    usage: Usage
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)
    error: DsparkError | None = None


Event = Committed | Finished


def check_request(request: Request, limits: Limits) -> None:
    """Raise `InvalidRequest` for what can never be served; the message names the limit."""
    check_sampling(request.sampling, limits.vocab_size)
    gamma = request.speculation.gamma
    if gamma is not None and not 0 <= gamma <= MAX_GAMMA:
        raise InvalidRequest("speculation.gamma", gamma, f"must be in [0, {MAX_GAMMA}]")
    if not 0 <= request.choice < MAX_CHOICES:
        raise InvalidRequest("choice", request.choice, f"must be in [0, {MAX_CHOICES})")
    prompt = len(request.prompt_ids)
    if prompt == 0:
        raise InvalidRequest("prompt", "", "is empty: it must have at least 1 token")
    room = limits.sequence_tokens - prompt
    if room < 1:
        raise InvalidRequest(
            "prompt",
            f"{prompt} tokens",
            f"leaves no room to answer: prompt and answer together hold at most "
            f"{limits.sequence_tokens} tokens",
        )
    asked = request.sampling.max_tokens
    if asked is not None and asked > room:
        raise InvalidRequest(
            "max_tokens",
            asked,
            f"is above the room left: {limits.sequence_tokens} tokens "
            f"- {prompt} prompt tokens = {room}",
        )
    if request.sampling.min_tokens > room:
        raise InvalidRequest(
            "min_tokens", request.sampling.min_tokens, f"is above the room left: {room} tokens"
        )
    for ids in filter(None, (request.prompt_ids, request.committed_ids)):
        for token in (min(ids), max(ids)):  # last: it looks at each of them
            if not 0 <= token < limits.vocab_size:
                told = f"is not a token id of the vocabulary [0, {limits.vocab_size})"
                raise InvalidRequest("prompt_ids", token, told)
