"""What the SDK gives back: plain data that a program can keep, compare and print."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.core.requests import FinishReason, SpeculationFigures, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of one choice. index: output position of the first of `ids`. Text lags behind ids by
    what may still change. The last chunk of a choice has its `finish_reason` and `usage`."""

    choice: int
    index: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    speculation: SpeculationFigures | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer; finish_reason None: not at its end. logprobs: one for each id, or empty.
    speculation: of the attempt that brought the end."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage
    speculation: SpeculationFigures = field(default_factory=SpeculationFigures)
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """All choices of a request. prompt_ids: only if `return_prompt_ids` was asked for."""

    request_id: str
    model: str
    prompt_tokens: int
    choices: tuple[Choice, ...]
    prompt_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first choice."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter that a request may name. gamma: draft tokens of its whole block."""

    drafter_id: str
    kind: str
    gamma: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a gateway serves. sequence_tokens: what prompt and answer together may have."""

    name: str
    target_id: str
    tokenizer_hash: str
    vocab_size: int
    sequence_tokens: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    drafters: tuple[DrafterInfo, ...]
    verify: str
    couple_unseeded: bool
