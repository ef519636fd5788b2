"""Which answers are made: the plan, and the lines it is made from."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dspark.core.errors import InvalidRequest
from dspark.training.errors import DataError
from dspark.training.jobs import Heat, parse_mix, plan_jobs
from dspark.training.prompts import Prompt, Room, read_prompts

MIX = parse_mix("0:0.5,0.3/0.9:0.25,0.8:0.25")
ROOM = Room(vocab_size=50, context=20)


def prompts(**domains: int) -> list[Prompt]:
    named = [name for name, count in domains.items() for _ in range(count)]
    return [Prompt(i, (1, 2), domain) for i, domain in enumerate(named, start=1)]


def encode(messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    return tuple(len(word) for message in messages for word in message["content"].split())


def test_a_mix_is_read() -> None:
    assert MIX == (Heat(0.0, 1.0, 0.5), Heat(0.3, 0.9, 0.25), Heat(0.8, 1.0, 0.25))
    assert parse_mix("0.5") == (Heat(0.5),)


@pytest.mark.parametrize("text", ["", "hot", "0.3/1.5:1", "0.3:-1", "-1:1", "0.3:nan", "0.3/0:1"])
def test_a_mix_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must be temperature"):
        parse_mix(text)


@pytest.mark.parametrize("balance", [False, True])
def test_more_answers_only_add_to_the_end(balance: bool) -> None:
    """So a folder can be made larger."""
    some = prompts(math=5, chat=2)
    long = plan_jobs(some, 30, MIX, balance=balance, seed=4)
    assert plan_jobs(some, 11, MIX, balance=balance, seed=4) == long[:11]
    assert plan_jobs(some, 11, MIX, balance=balance, seed=5) != long[:11]


def test_domains_get_the_same_number_if_they_are_to() -> None:
    some = prompts(math=20, code=7, chat=2)
    jobs = plan_jobs(some, 30, MIX, balance=True, seed=0)
    assert Counter(job.prompt.domain for job in jobs) == {"math": 10, "code": 10, "chat": 10}
    plain = plan_jobs(some, 29, MIX, balance=False, seed=0)
    assert Counter(job.prompt.domain for job in plain) == {"math": 20, "code": 7, "chat": 2}


def test_no_answer_is_made_twice() -> None:
    jobs = plan_jobs(prompts(chat=3), 60, MIX, balance=True, seed=0)
    assert len({job.name for job in jobs}) == 60
    assert len({job.seed for job in jobs}) == 60
    greedy = Counter(job.prompt.line for job in jobs if job.heat.greedy)
    assert max(greedy.values()) == 1
    only_greedy = plan_jobs(prompts(chat=3), 60, (Heat(0.0),), balance=False, seed=0)
    assert len(only_greedy) == 3


def test_the_mix_is_kept_to() -> None:
    jobs = plan_jobs(prompts(math=2000), 2000, MIX, balance=False, seed=0)
    counts = Counter(job.heat.temperature for job in jobs)
    assert counts[0.0] == pytest.approx(1000, abs=80)
    assert counts[0.8] == pytest.approx(500, abs=80)


def test_a_given_answer_is_read_once() -> None:
    given = [Prompt(1, (1,), answer_ids=(2, 3)), Prompt(2, (1,), answer_ids=(4,))]
    assert len(plan_jobs(given, 10, MIX, balance=True, seed=0)) == 2


GOOD = [
    {"prompt": "one two", "domain": "math", "source": "made up"},
    {"messages": [{"role": "user", "content": "three"}]},
    {"prompt_ids": [1, 2, 3], "answer_ids": [4, 5]},
]


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_lines_are_read(tmp_path: Path, name: str) -> None:
    data = "\n\n".join(map(json.dumps, GOOD)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    read, bad = read_prompts(path, encode, ROOM)
    assert bad == []
    assert read == [
        Prompt(1, (3, 3), "math", "made up"),
        Prompt(3, (5,)),
        Prompt(5, (1, 2, 3), answer_ids=(4, 5)),
    ]


BAD = {
    "{": "no JSON",
    "[1]": "must be a JSON object",
    "{}": "exactly one of",
    '{"prompt": "a", "prompt_ids": [1]}': "exactly one of",
    '{"prompt": "  "}': "not blank",
    '{"prompt": 3}': "must be a string",
    '{"prompt_ids": []}': "is empty",
    '{"prompt_ids": [50]}': r"prompt_ids: 50 is no id of the vocabulary \[0, 50\)",
    '{"prompt_ids": ["a"]}': "list of token ids",
    '{"prompt_ids": [1], "answer_ids": []}': "empty answer",
    '{"prompt_ids": [1], "answer_ids": [-1]}': "answer_ids: -1",
    '{"messages": "hello"}': "list of objects",
    '{"prompt": "a", "domain": 4}': "domain: 4 must be a string",
    json.dumps({"prompt_ids": [1] * 20}): "'20 tokens'|21 tokens.*leaves no room.*context is 20",
    json.dumps({"prompt_ids": [1] * 12, "answer_ids": [1] * 9}): "21 tokens.*do not fit.*20",
}


@pytest.mark.parametrize("line", sorted(BAD))
def test_a_broken_line_is_told_by_number_and_reason(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{json.dumps(GOOD[0])}\n{line}\n{json.dumps(GOOD[1])}\n")
    with pytest.raises(DataError, match=f"line 2: .*(?:{BAD[line]}).*--skip-bad"):
        read_prompts(path, encode, ROOM)
    read, bad = read_prompts(path, encode, ROOM, skip_bad=True)
    assert [prompt.line for prompt in read] == [1, 3]
    assert [one.line for one in bad] == [2]


def test_bytes_that_are_no_text_are_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_prompts(path, encode, ROOM)
    with pytest.raises(DataError, match="has no line to use"):
        read_prompts(path, encode, ROOM, skip_bad=True)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        read_prompts(tmp_path / "nowhere.jsonl", encode, ROOM)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 99)[:-9])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz"):
        read_prompts(cut, encode, ROOM)
