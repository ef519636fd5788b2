"""Answers as `dspark` tells them: an object for programs, a sentence for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark.core.requests import Request
    from dspark.gateway.answers import Answer


def as_object(request: Request, answers: Sequence[Answer]) -> dict[str, Any]:
    """The output object of interfaces.md; several choices stand in `choices`, the first of them
    also where a single one would."""
    choices = [_choice(request, answer) for answer in answers]
    whole = {**choices[0], "prompt_token_ids": list(request.prompt_ids)}
    return whole if len(choices) == 1 else {**whole, "choices": choices}


def _choice(request: Request, answer: Answer) -> dict[str, Any]:
    figures = answer.speculation
    choice: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason.value,
        "usage": asdict(answer.usage),
        "speculation": {**asdict(figures), "accepted_length": figures.accepted_length},
        "timing": asdict(answer.timing),
    }
    if request.sampling.logprobs:
        choice["logprobs"] = [
            {"logprob": token.logprob, "top": [list(pair) for pair in token.top]}
            for token in answer.logprobs
        ]
    return choice


def as_sentence(answer: Answer) -> str:
    """The figures of one answer."""
    figures, usage, timing = answer.speculation, answer.usage, answer.timing
    speed = f"{1 / timing.tpot_s:.1f} tokens/s after it" if timing.tpot_s else "one token"
    return (
        f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached) + {usage.completion_tokens} "
        f"answer tokens, {answer.finish_reason.value}; "
        f"first token {timing.ttft_s:.2f} s, {speed}; "
        f"{figures.rounds} rounds: {figures.drafted} drafted, {figures.verified} verified, "
        f"{figures.accepted} accepted, {figures.accepted_length:.2f} tokens a round"
    )
