"""`dspark eval trace`: every round of one greedy answer, as the golden traces have them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dspark.core.drafts import Drafter
from dspark.models.targets.backend import Backend
from dspark.training.records import Round
from dspark.training.rounds import Asking, ask


def trace(
    backend: Backend,
    drafter: Drafter,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos_ids: Collection[int] = (),
) -> dict[str, Any]:
    """`{"output": prompt and answer, "rounds": [...]}`: greedy, every block verified whole, also
    past max_tokens. drafter: with its head over the whole vocabulary. Raises what ended the answer
    before its time."""
    gamma = drafter.card.gamma
    # Room for the last block: its anchor may be the last token.
    room = Asking(max_tokens=max_tokens + gamma + 1, concurrency=1)
    (answer,) = ask(backend, drafter, [prompt], room, eos_ids=eos_ids)
    if answer.error is not None:
        raise answer.error
    end = len(prompt) + max_tokens
    rounds = [_as_json(one) for one in answer.rounds if one.start < end]
    return {"output": [*prompt, *answer.ids[:max_tokens]], "rounds": rounds}


def _as_json(one: Round) -> dict[str, Any]:
    return {
        "start": one.start,
        "anchor": one.anchor,
        "draft": list(one.draft),
        "confidence_logits": [round(z, 6) for z in one.logits],
        "accepted": one.accepted,
    }
