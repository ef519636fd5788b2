"""The target writes users' turns: where it begins, what is kept, and how a file is gone on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark.core.errors import ConfigError
from dspark.models.targets.backend import RaggedBatch, StepOutput
from dspark.models.targets.transformers import TransformersBackend
from dspark.training.errors import DataError
from dspark.training.synthesis import Wish, synthesize_prompts, user_turn

from ..models.tiny import VOCABULARY, tiny_model

BOS, TURN, END = 1, 2, 3


class Letters:
    """Ids are characters; a text begins with BOS, a turn with TURN. eos_ids: many ids, so that the
    tiny model's turns end. before, behind: what is put around a text that is encoded."""

    def __init__(
        self,
        *,
        header: bool = True,
        ends: Sequence[int] = range(100),
        before: Sequence[int] = (BOS,),
        behind: Sequence[int] = (),
    ) -> None:
        self._header = [BOS, TURN] if header else []
        self.eos_ids = tuple(ends)
        self._before, self._behind = before, behind

    def encode(self, text: str) -> tuple[int, ...]:
        return (*self._before, *self._ids(text), *self._behind)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        told = "".join(m["content"] for m in messages if m["role"] == "system")
        return (*self._header, *self._ids(told), *self._ids(messages[-1]["content"]), END)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(ord(char) % VOCABULARY for char in text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + i) for i in ids if i not in self.eos_ids)


class Reading(TransformersBackend):
    """Keeps what it was given to read as far as position `first`: sequences' ids up to there."""

    def __init__(self, first: int) -> None:
        super().__init__(tiny_model("llama"), block_size=4)
        self.first = first
        self.read: dict[int, list[int]] = {at: [] for at in range(first)}

    def forward(self, batch: RaggedBatch) -> StepOutput:
        for at, token in zip(batch.positions.tolist(), batch.token_ids.tolist(), strict=True):
            if at < self.first:
                self.read[at].append(token)
        return super().forward(batch)


def make(output: Path, prompts: int, words: Any = None, **rest: Any) -> Any:
    wish = Wish(prompts, max_tokens=8, **{"temperature": 1.5, **rest.pop("wish", {})})
    backend = rest.pop("backend", None) or TransformersBackend(tiny_model("llama"), block_size=4)
    return synthesize_prompts(backend, words or Letters(), wish, output, concurrency=3, **rest)


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_user_s_turn_begins_where_messages_begin_to_differ() -> None:
    assert user_turn(Letters(), None) == (BOS, TURN)
    assert user_turn(Letters(), "ab") == (BOS, TURN, ord("a"), ord("b"))
    with pytest.raises(ConfigError, match="nothing before a user's words"):
        user_turn(Letters(header=False), None)


def test_prompts_are_whole_different_and_labelled(tmp_path: Path) -> None:
    output = tmp_path / "made.jsonl"
    made = make(output, 8, wish={"domain": "math"})
    found = lines(output)
    assert made.kept == len(found) == 8
    assert len({line["prompt"] for line in found}) == 8
    assert {(line["domain"], line["source"]) for line in found} == {("math", "synthesized")}
    assert all(line["prompt"].strip() for line in found)


def test_a_file_is_gone_on_with(tmp_path: Path) -> None:
    """A last line that a kill cut short is taken away, and no attempt is made twice."""
    output = tmp_path / "made.jsonl"
    make(output, 4)
    kept = output.read_text()
    output.write_text(kept + '{"domain": "chat", "prom')
    make(output, 9)
    assert output.read_text().startswith(kept)
    found = lines(output)
    assert len({line["prompt"] for line in found}) == len(found) == 9
    attempts = [line["attempt"] for line in found]
    assert len(set(attempts)) == 9
    assert make(output, 9).thrown == 0  # there is nothing left to do


def test_openers_are_what_prompts_begin_with(tmp_path: Path) -> None:
    openers = tmp_path / "openers.jsonl"
    openers.write_text('{"prompt": "one two three"}\n{"prompt": "four"}\n')
    output = tmp_path / "made.jsonl"
    make(output, 6, openers=openers, wish={"opener_words": 2})
    begun = {line["prompt"].split("\u4e00")[0][:4].strip() for line in lines(output)}
    assert all(line["prompt"].startswith(("one two", "four")) for line in lines(output)), begun


@pytest.mark.parametrize("opener", [None, "a(b"])
@pytest.mark.parametrize(
    ("before", "behind"), [((), ()), ((BOS,), ()), ((BOS,), (END,)), ((), (END,))]
)
def test_a_user_s_words_go_on_the_template(
    tmp_path: Path, before: Sequence[int], behind: Sequence[int], opener: str | None
) -> None:
    """What a tokenizer puts around a text does not stand between the template and the words."""
    openers = None if opener is None else tmp_path / "openers.jsonl"
    if openers is not None:
        openers.write_text(json.dumps({"prompt": opener}) + "\n")
    prompt = [BOS, TURN, *map(ord, opener or "")]
    backend = Reading(len(prompt) + 1)
    words = Letters(before=before, behind=behind)
    make(tmp_path / "made.jsonl", 4, words, backend=backend, openers=openers)
    *read, following = ([*dict.fromkeys(ids)] for ids in backend.read.values())
    assert read == [[token] for token in prompt]
    assert following  # the model's own: none that ends a turn
    assert not {BOS, END} & set(following)


def test_what_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 prompts of 2: 10 attempts for each were not enough"):
        make(tmp_path / "made.jsonl", 2, Letters(ends=()))
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a prompt of mine"}\n')
    with pytest.raises(DataError, match="line 1 is not one of `dspark data synthesize`"):
        make(other, 2)
    (tmp_path / "none.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="line 1 has no prompt"):
        make(tmp_path / "new.jsonl", 2, openers=tmp_path / "none.jsonl")
