"""Answers as JSON, without a server: lines, usage, and single tokens of every kind of tokenizer."""

from __future__ import annotations

import json

import pytest

from dspark.core.requests import FinishReason, SpeculationFigures, TokenLogprob, Usage
from dspark.gateway.answers import Answer, Timing
from dspark.gateway.gateway import Chunk
from dspark.gateway.openai.render import CompletionRendering, Head, Shown, dumps, usage
from dspark.gateway.openai.tokens import LOWEST, TokenTexts

from ..test_text import BYTE_LEVEL, KINDS, SAMPLES
from ..test_text import tokenizer as tokenizer_of

BREAKS = "a\nb\r\u0085\u2028\u2029\x0b\x0c\x1c\x1d\x1e\U0001f600"


def test_json_is_one_line_to_every_reader() -> None:
    data = dumps({"text": BREAKS})
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data) == {"text": BREAKS}
    assert "\U0001f600".encode() in data


def answer(choice: int, prompt: int, cached: int, figures: SpeculationFigures) -> Answer:
    ids = (5, 6, 7)
    said = Usage(prompt, len(ids), cached)
    timing = Timing(0.1, 0.1, 0.3)
    return Answer(choice, "abc", ids, FinishReason.LENGTH, said, figures, (), timing)


def test_a_prompt_counts_once_and_every_answer() -> None:
    one, two = SpeculationFigures(2, 14, 9, 5), SpeculationFigures(1, 7, 2, 1)
    told = usage([answer(0, 10, 3, one), answer(1, 10, 9, two), answer(2, 4, 2, two)], n=2)
    assert told["prompt_tokens"] == 14
    assert told["completion_tokens"] == 9
    assert told["total_tokens"] == 23
    assert told["prompt_tokens_details"] == {"cached_tokens": 3 + 2}
    figures = {"rounds": 4, "drafted": 28, "verified": 13, "accepted": 7, "accepted_length": 2.75}
    assert told["speculation"] == figures


def test_a_chunk_with_nothing_to_see_is_no_event() -> None:
    head, texts = Head("cmpl-1", 0, "toy", "t"), TokenTexts(tokenizer_of(BYTE_LEVEL))
    rendering = CompletionRendering(head, Shown(prompts=[(1,)]), texts)
    assert b'"text":""' in rendering.delta(Chunk(0, 0, (5,), ""))  # the first token is a sign
    assert rendering.delta(Chunk(0, 1, (6,), "")) == b""
    assert b'"text":"x"' in rendering.delta(Chunk(0, 2, (7,), "x"))
    asked = Shown(prompts=[(1,)], logprobs=True)
    rendering = CompletionRendering(head, asked, texts)
    for index in range(2):
        impossible = (TokenLogprob(float("-inf")),)
        event = rendering.delta(Chunk(0, index, (5,), "", impossible))
        told = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]
        assert told["token_logprobs"] == [LOWEST]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", SAMPLES)
def test_tokens_are_the_bytes_of_the_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(text)
    spelled = b"".join(texts.data(id) for id in ids).decode()
    # A first space may be the decoder's own.
    assert spelled in (tokenizer.decode(ids), " " + tokenizer.decode(ids))
    for id in ids:
        shown = texts.text(id)
        assert shown.encode() == texts.data(id) or shown.startswith("bytes:\\x")
    assert texts.text(tokenizer.eos_ids[0]) == "</s>"
    assert texts.text(10**6) == ""
