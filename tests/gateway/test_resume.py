"""A choice that goes on behind ids its reader holds: same whole, and only the rest is sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from dspark.core.errors import InvalidRequest
from dspark.core.requests import Committed, Event, Finished, FinishReason, Limits, Request, Usage
from dspark.core.sampling import SamplingParams
from dspark.gateway.answers import Answer, Piece, stream_answer
from dspark.gateway.gateway import Call, Chunk, Gateway, ServedModel, Started
from dspark.gateway.prompts import Prompt

from .toy_front import VOCAB, tokenizer

TEXT = "one 👩‍👩‍👧‍👦 two STO日本 three STOP four 😀"


@dataclass
class Saying:
    """A target that says these ids, two a step, and goes on where it is asked to."""

    ids: tuple[int, ...]
    asked: list[Request] = field(default_factory=list)

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        self.asked.append(request)
        for at in range(len(request.committed_ids), len(self.ids), 2):
            yield Committed(at, self.ids[at : at + 2], cached_tokens=1)
        yield Finished(FinishReason.LENGTH, Usage(1, len(self.ids), 1))


def ids_of(text: str) -> tuple[int, ...]:
    return tokenizer().encode(text)


async def told(
    target: Saying, sampling: SamplingParams, held: tuple[int, ...] = ()
) -> tuple[list[Piece], Answer]:
    request = Request("a", (5,), sampling, committed_ids=held)
    *pieces, answer = [event async for event in stream_answer(target, tokenizer(), request)]
    assert isinstance(answer, Answer)
    return [piece for piece in pieces if isinstance(piece, Piece)], answer


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(stop=("STOP",)),
        SamplingParams(stop=("STOP four", "OP")),
        SamplingParams(stop=("never", "STO")),
        SamplingParams(stop=("STO",), min_tokens=30),
        SamplingParams(stop=("😀",)),
        SamplingParams(stop=("😀 and more",)),
    ],
)
@pytest.mark.parametrize("ids", [ids_of(TEXT), ids_of(TEXT)[:-1]], ids=["whole", "cut character"])
async def test_behind_any_id_the_whole_is_the_same(
    sampling: SamplingParams, ids: tuple[int, ...]
) -> None:
    target = Saying(ids)
    pieces, whole = await told(target, sampling)
    assert "".join(piece.text for piece in pieces) == whole.text
    held: tuple[int, ...] = ()
    text = ""
    # Text without ids comes at the very end; the servicer sends it with the end itself.
    for piece in [Piece("", ()), *(piece for piece in pieces if piece.ids)]:
        held, text = held + piece.ids, text + piece.text
        rest, again = await told(target, sampling, held)
        assert text + "".join(p.text for p in rest) == whole.text
        assert held + tuple(token for p in rest for token in p.ids) == whole.token_ids
        assert (again.text, again.token_ids) == (whole.text, whole.token_ids)
        assert again.finish_reason is whole.finish_reason
        assert (
            again.usage.completion_tokens == whole.usage.completion_tokens == len(whole.token_ids)
        )


async def test_a_stop_string_that_stands_already_ends_it_without_the_target() -> None:
    target = Saying(ids_of(TEXT))
    _, whole = await told(target, SamplingParams(stop=("STOP",)))
    target.asked.clear()
    rest, again = await told(target, SamplingParams(stop=("STOP",)), whole.token_ids)
    assert (rest, target.asked) == ([], [])
    assert again.finish_reason is FinishReason.STOP
    assert again.text == whole.text
    assert again.usage == Usage(1, len(whole.token_ids))


# --- through the gateway


def gateway(target: Saying) -> Gateway:
    return Gateway(target, tokenizer(), ServedModel("toy", "toy", Limits(VOCAB, 200, 200)))


def call(resume: dict[int, tuple[int, ...]], **sampling: Any) -> Call:
    return Call(Prompt(ids=(5,)), SamplingParams(**sampling), "a", resume=resume)


async def test_indices_go_on_and_each_choice_has_its_own() -> None:
    ids = ids_of(TEXT)
    outputs = [o async for o in gateway(Saying(ids)).generate(call({1: ids[:7]}, n=2))]
    assert outputs[0] == Started("a", (5,))
    for choice, first in ((0, 0), (1, 7)):
        chunks = [o for o in outputs if isinstance(o, Chunk) and o.choice == choice and o.ids]
        assert chunks[0].index == first
        for before, after in pairwise(chunks):
            assert after.index == before.index + len(before.ids)
        assert tuple(token for chunk in chunks for token in chunk.ids) == ids[first:]
    answers = [output for output in outputs if isinstance(output, Answer)]
    assert [answer.text for answer in answers] == [TEXT, TEXT]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (call({2: (5,)}, n=2), "resume"),
        (call({-1: (5,)}), "resume"),
        (call({0: (5,) * 9}, max_tokens=8), "resume"),
        (call({0: (5,) * 200}), "resume"),
        (call({0: (VOCAB,)}), "prompt_ids"),
        (Call(Prompt(ids=(5,)), request_id="a\nb"), "request_id"),
        (Call(Prompt(ids=(5,)), request_id="a" * 129), "request_id"),
        (Call(Prompt(ids=(5,)), attempt=2**16), "attempt"),
    ],
)
def test_what_cannot_be_resumed_is_refused(asked: Call, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        gateway(Saying(())).requests(asked)
    assert error.value.field == field


def test_no_tenant_can_name_what_another_one_runs() -> None:
    asked = [
        Call(Prompt(ids=(5,)), request_id=name, tenant=tenant)
        for tenant, name in (("a", "x"), ("b", "x"), ("", "a/x"), ("a", ""))
    ]
    names = {gateway(Saying(())).requests(one)[0].request_id for one in asked}
    assert len(names) == len(asked)
