"""No beginning of a stop string leaks into a stream, and nothing comes after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from .served import SAID, Served, said, serve, tokenizer, toy

STOPS = (
    "<stop>",
    "👩‍👧",
    "語と",
    "\n\nof",
    "Z\u0361a",
    "again; H",
    "\u2028<",
    "한국어. ﷽",
    "lo, w",
)
TOKENS = 150  # SAID once round and more


def cut(text: str, stops: Sequence[str]) -> str:
    """Before the first stop string to be complete."""
    ends = {text.find(stop) + len(stop): stop for stop in stops if stop in text}
    first = min(ends, default=None)
    return text if first is None else text[: first - len(ends[first])]


async def test_a_hundred_prompts_at_gamma_7() -> None:
    with serve(toy(gamma=7, max_sequences=16, max_step_tokens=512)) as front:
        client = front.async_client

        async def ask(i: int) -> None:
            stops = [STOPS[i % len(STOPS)], STOPS[i // 2 % len(STOPS)]]
            given: Any = {"model": "toy", "max_tokens": TOKENS, "temperature": 0, "stop": stops}
            prompt = SAID[: 1 + i % len(SAID)]
            expected = cut(said(prompt, TOKENS), stops)
            shown = ""
            ended = False
            async for chunk in await client.completions.create(**given, prompt=prompt, stream=True):
                choice = chunk.choices[0]
                assert not ended, "something came after the end"
                shown += choice.text
                assert expected.startswith(shown), f"{shown!r} leaks of {stops}"
                ended = choice.finish_reason is not None
            assert ended
            assert shown == expected
            whole = await client.completions.create(**given, prompt=prompt)
            assert whole.choices[0].text == expected
            assert whole.choices[0].finish_reason == (
                "stop" if expected != said(prompt, TOKENS) else "length"
            )

        await asyncio.gather(*(ask(i) for i in range(100)))
        await client.close()
        front.wait_freed(2)


@pytest.mark.parametrize("stop", ["😀", "world!"])
def test_ids_and_log_probabilities_end_with_the_token_that_completes_it(
    front: Served, stop: str
) -> None:
    told = front.client.completions.create(
        model="toy", prompt="H", max_tokens=TOKENS, temperature=0, stop=stop, logprobs=0,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice: Any = told.choices[0]
    text = tokenizer().decode(choice.token_ids)
    assert stop in text
    assert stop not in tokenizer().decode(choice.token_ids[:-1])
    assert choice.text == text.partition(stop)[0]
    assert len(choice.logprobs.tokens) == len(choice.token_ids)
    assert told.usage is not None
    assert told.usage.completion_tokens == len(choice.token_ids)
