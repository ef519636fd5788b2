"""`dspark generate` as interfaces.md promises it: the command itself, on a tiny checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import Ran

Generate = Callable[..., Ran]

PROMPT = "the cat sat on"
TOKENS = 100
LONG = ("--max-tokens", TOKENS)
SPECULATING = [
    ("--drafter", "none"),
    ("--gamma", 0),
    ("--verify", "none"),
    ("--verify", "early-stop"),
    ("--verify", "top-k"),
    ("--verify", "threshold:0.2"),
    ("--verify", "fixed:3", "--gamma", 3),
    ("--verify", "fixed:7"),
    ("--backend", "transformers"),
    ("--backend", "transformers", "--verify", "fixed:7"),
]
CONVERSATION = [
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "on"},
]


@cache
def greedy(checkpoint: Path, prompt: str = PROMPT) -> tuple[list[int], list[int], str]:
    """Prompt ids, answer ids and text, as transformers has them."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS)
    answer = out[0, len(ids) :].tolist()
    return ids, answer, tokenizer.decode(answer)


def write_lines(path: Path, values: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


# --- one prompt ----------------------------------------------------------------------------------


def test_a_prompt_streams_its_text_to_stdout_and_its_figures_to_stderr(
    generate: Generate, checkpoint: Path
) -> None:
    ran = generate(PROMPT, *LONG)
    _, _, text = greedy(checkpoint)
    assert (ran.status, ran.out) == (0, text + "\n")
    figures = ran.err.splitlines()[-1]
    assert f"+ {TOKENS} answer tokens, length" in figures
    for word in ("tokens/s", "rounds", "drafted", "verified", "accepted"):
        assert word in figures


def test_json_prints_the_whole_answer(generate: Generate, checkpoint: Path) -> None:
    answer = generate(PROMPT, *LONG, "--json", "--verify", "fixed:3").answer
    prompt, ids, text = greedy(checkpoint)
    assert (answer["text"], answer["token_ids"]) == (text, ids)
    assert answer["prompt_token_ids"] == prompt
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": TOKENS,
        "cached_tokens": 0,
    }
    speculation, timing = answer["speculation"], answer["timing"]
    assert set(speculation) == {"rounds", "drafted", "verified", "accepted", "accepted_length"}
    assert speculation["drafted"] >= speculation["verified"] >= speculation["accepted"] > 0
    assert speculation["accepted_length"] == 1 + speculation["accepted"] / speculation["rounds"]
    assert set(timing) == {"ttft_s", "tpot_s", "total_s"}
    assert 0 < timing["ttft_s"] <= timing["total_s"]
    assert 0 < timing["tpot_s"] <= timing["total_s"]


@pytest.mark.parametrize("options", SPECULATING, ids=str)
def test_greedy_ids_are_the_targets_own_however_it_speculates(
    generate: Generate, checkpoint: Path, options: Sequence[object]
) -> None:
    answer = generate(PROMPT, *LONG, "--json", *options).answer
    assert answer["token_ids"] == greedy(checkpoint)[1]


def test_temperature_1e_30_is_greedy_and_top_k_minus_1_is_off(
    generate: Generate, checkpoint: Path
) -> None:
    asked = (PROMPT, *LONG, "--json", "--temperature", "1e-30", "--top-k", "-1")
    assert generate(*asked).answer["token_ids"] == greedy(checkpoint)[1]


SEEDED = (PROMPT, *LONG, "--json", "--temperature", 0.9, "--top-p", 0.95, "--seed")


def test_a_seed_gives_its_text_however_it_speculates(generate: Generate, tmp_path: Path) -> None:
    ids = generate(*SEEDED, 7).answer["token_ids"]
    for options in SPECULATING:
        assert generate(*SEEDED, 7, *options).answer["token_ids"] == ids, options
    assert generate(*SEEDED, 8).answer["token_ids"] != ids
    lines = write_lines(tmp_path / "in.jsonl", [{"prompt": PROMPT}, *[{"prompt": "dog"}] * 7])
    for concurrency in (1, 8):
        asked = ("--input", lines, "--concurrency", concurrency, *SEEDED[1:], 7)
        assert generate(*asked).lines[0]["token_ids"] == ids, concurrency


def test_choices_differ_from_each_other_and_not_from_run_to_run(generate: Generate) -> None:
    answer = generate(*SEEDED, 7, "--n", 3).answer
    choices = [choice["token_ids"] for choice in answer["choices"]]
    assert len({tuple(ids) for ids in choices}) == 3
    assert answer["token_ids"] == choices[0] == generate(*SEEDED, 7).answer["token_ids"]
    again = generate(*SEEDED, 7, "--n", 3, "--drafter", "none").answer
    assert [choice["token_ids"] for choice in again["choices"]] == choices
    shown = generate(*[a for a in SEEDED if a != "--json"], 7, "--n", 3)
    for number, choice in enumerate(answer["choices"]):
        assert f"--- choice {number}\n{choice['text']}\n" in shown.out


def test_what_a_prompt_can_be(generate: Generate, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def prompt(*arguments: object, stdin: bytes = b"") -> list[int]:
        asked = generate(*arguments, "--json", "--max-tokens", 1, stdin=stdin)
        ids: list[int] = asked.answer["prompt_token_ids"]
        return ids

    chat = greedy(checkpoint)[0]
    assert prompt(PROMPT) == chat
    assert prompt("-", stdin=PROMPT.encode() + b"\n") == chat
    assert prompt("--raw", PROMPT) == tokenizer.encode(PROMPT)
    assert prompt("--raw", "-", stdin=b"the dog\n") == tokenizer.encode("the dog\n")
    assert prompt("--prompt-ids", "[5, 6, 250]") == [5, 6, 250]
    with_system = tokenizer.decode(prompt("--system", "be brief", PROMPT))
    assert with_system == "<|im_start|>system\nbe brief<|im_end|>\n" + tokenizer.decode(chat)


# --- how an answer is shaped and ends ------------------------------------------------------------


def test_a_stop_string_cuts_text_and_ids(generate: Generate, checkpoint: Path) -> None:
    _, ids, text = greedy(checkpoint)
    stop = text[30:33]
    asked = (PROMPT, *LONG, "--stop", "never said", "--stop", stop)
    answer = generate(*asked, "--json", "--verify", "fixed:7").answer
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    stood = len(answer["token_ids"])
    assert 0 < stood < TOKENS
    assert answer["token_ids"] == ids[:stood]
    assert answer["usage"]["completion_tokens"] == stood
    assert generate(*asked).out == answer["text"] + "\n"


def test_a_stop_id_is_the_last_one(generate: Generate, checkpoint: Path) -> None:
    ids = greedy(checkpoint)[1]
    answer = generate(PROMPT, *LONG, "--stop-id", ids[20], "--json").answer
    assert answer["token_ids"] == ids[: ids.index(ids[20]) + 1]
    assert answer["finish_reason"] == "stop"


END = ("--logit-bias", '{"1": 100}')  # the model would say nothing but its end of text


def test_the_models_end_min_tokens_and_ignore_eos(generate: Generate) -> None:
    ended = generate(PROMPT, *LONG, *END, "--json").answer
    assert (ended["token_ids"], ended["text"], ended["finish_reason"]) == ([1], "", "stop")
    later = generate(PROMPT, *LONG, *END, "--min-tokens", 5, "--json").answer
    assert later["finish_reason"] == "stop"
    assert later["token_ids"].index(1) == len(later["token_ids"]) - 1 >= 4
    ignored = generate(PROMPT, *END, "--max-tokens", 8, "--ignore-eos", "--json").answer
    assert (ignored["token_ids"], ignored["finish_reason"]) == ([1] * 8, "length")


def test_without_max_tokens_there_are_256_or_what_the_room_is(generate: Generate) -> None:
    assert generate(PROMPT, "--json").answer["usage"]["completion_tokens"] == 256
    full = generate(PROMPT, "--kv-tokens", 128, "--json").answer["usage"]
    assert full["prompt_tokens"] + full["completion_tokens"] == 128


def test_logprobs_stand_beside_the_ids(generate: Generate, checkpoint: Path) -> None:
    ids = greedy(checkpoint)[1][:20]
    asked = (PROMPT, "--max-tokens", 20, "--json", "--verify", "fixed:3")
    told = generate(*asked, "--top-logprobs", 2).answer["logprobs"]
    assert len(told) == 20
    for token, entry in zip(ids, told, strict=True):
        (best, likeliest), (_, second) = entry["top"]
        assert (best, likeliest) == (token, entry["logprob"])
        assert second <= likeliest <= 0
    plain = generate(*asked, "--logprobs").answer["logprobs"]
    assert [entry["top"] for entry in plain] == [[]] * 20
    assert "logprobs" not in generate(*asked).answer


def test_penalties_and_bias_are_the_same_under_speculation(
    generate: Generate, checkpoint: Path
) -> None:
    first = greedy(checkpoint)[1][0]
    asked = (PROMPT, *LONG, "--json", "--repetition-penalty", 1.3, "--presence-penalty", 0.5)
    asked = (*asked, "--frequency-penalty", 0.2, "--logit-bias", json.dumps({str(first): -100}))
    plain = generate(*asked, "--drafter", "none").answer["token_ids"]
    assert first not in plain
    assert plain != greedy(checkpoint)[1]
    assert generate(*asked, "--verify", "fixed:7").answer["token_ids"] == plain


# --- a file of prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("json_too", [(), ("--json",)])
def test_lines_are_answered_in_their_order(
    generate: Generate,
    checkpoint: Path,
    tmp_path: Path,
    concurrency: int,
    json_too: tuple[str, ...],
) -> None:
    prompt, ids, _ = greedy(checkpoint)
    # Answers of many lengths, so that later lines end before earlier ones.
    values = [{"prompt_ids": [5] * (1 + 37 * i % 11)} for i in range(12)]
    values += [{"prompt": PROMPT}, {"messages": CONVERSATION}, {"prompt_ids": prompt}]
    lines, out = write_lines(tmp_path / "in.jsonl", values), tmp_path / "out.jsonl"
    asked = ("--input", lines, "--output", out, "--concurrency", concurrency, *json_too)
    asked = (*asked, "--max-tokens", 30)
    ran = generate(*asked)
    assert (ran.status, ran.out) == (0, "")
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    got = [answer["prompt_token_ids"] for answer in answers]
    assert got[:12] == [value["prompt_ids"] for value in values[:12]]
    assert got[12] == got[14] == prompt
    assert [answers[12]["token_ids"], answers[14]["token_ids"]] == [ids[:30]] * 2
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert answers[12]["text"] == tokenizer.decode(ids[:30])
    template = {"add_generation_prompt": True, "return_dict": False}
    assert got[13] == tokenizer.apply_chat_template(CONVERSATION, **template)


BROKEN = [
    (b"nonsense", "line: 'nonsense' is not JSON"),
    (b'{"prompt": "\xff"}', "is not JSON: 'utf-8' codec can't decode"),
    (b"[" * 100_000, "is not JSON: maximum recursion depth"),
    (b"[1, 2]", "line: [1, 2] must be a JSON object"),
    (b'{"text": "a"}', "line: ['text'] must have exactly one of prompt, messages, prompt_ids"),
    (b'{"prompt": "a", "prompt_ids": [5]}', "must have exactly one of"),
    (b'{"prompt": 3}', "prompt: 3 must be a string"),
    (b'{"prompt": ""}', "prompt: '' is empty"),
    (b'{"prompt": "\\ud800"}', "has half a surrogate pair"),
    (b'{"messages": "a"}', "messages: 'a' must be a list of objects"),
    (b'{"messages": []}', "messages: [] must have at least 1 message"),
    (b'{"messages": [{"role": "king", "content": "a"}]}', "messages[0].role: 'king' must be one"),
    (b'{"messages": [{"role": "user"}]}', "messages[0].content: None must be a string"),
    (b'{"messages": [{"role": "tool", "content": "a"}]}', "no tools here"),
    (b'{"prompt_ids": [1, "a"]}', "prompt_ids: [1, 'a'] must be a list of token ids"),
    (b'{"prompt_ids": []}', "is empty"),
    (b'{"prompt_ids": [999999]}', "prompt_ids: 999999 is not a token id of the vocabulary"),
    (b'{"prompt_ids": [-1]}', "prompt_ids: -1 is not a token id of the vocabulary"),
    (json.dumps({"prompt_ids": [5] * 5000}).encode(), "5000 tokens' leaves no room to answer"),
]


def test_a_broken_line_costs_the_others_nothing(generate: Generate, checkpoint: Path) -> None:
    good = json.dumps({"prompt": PROMPT}).encode()
    text = b"\n\n".join(b"%s\n%s" % (bad, good) for bad, _ in BROKEN)
    ran = generate("--input", "-", "--max-tokens", 3, stdin=text)
    answers = ran.lines
    for i, (bad, why) in enumerate(BROKEN):
        refused = answers[2 * i]
        assert set(refused) == {"line", "error"}
        assert why in refused["error"], bad
        assert refused["line"] == 1 + 3 * i  # as an editor counts, blank ones too
    ids = greedy(checkpoint)[1][:3]
    assert [answer["token_ids"] for answer in answers[1::2]] == [ids] * len(BROKEN)
    assert f"{len(BROKEN)} of {2 * len(BROKEN)} lines failed" in ran.err


def test_only_a_line_feed_ends_a_line(generate: Generate) -> None:
    text = "\ufeff" + json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n"
    (answer,) = generate("--input", "-", "--max-tokens", 1, stdin=text.encode()).lines
    assert answer["usage"]["completion_tokens"] == 1


def test_a_system_message_goes_before_chats_that_have_none(
    generate: Generate, tmp_path: Path
) -> None:
    own = {"role": "system", "content": "be long"}
    lines = write_lines(
        tmp_path / "in.jsonl",
        [
            {"messages": CONVERSATION},
            {"messages": [own, *CONVERSATION]},
            {"prompt_ids": [5]},
            {"messages": [{**own, "content": "be brief"}, *CONVERSATION]},
        ],
    )
    asked = ("--input", lines, "--max-tokens", 1)
    first, second, ids, _ = generate(*asked, "--system", "be brief").lines
    _, kept, _, written_out = generate(*asked).lines
    assert first["prompt_token_ids"] == written_out["prompt_token_ids"]
    assert second["prompt_token_ids"] == kept["prompt_token_ids"]
    assert "system: 'be brief' needs a chat" in ids["error"]


def test_no_number_of_lines_and_choices_is_too_many_at_once(generate: Generate) -> None:
    """20 x 64 choices; an engine refuses more than 1,024 waiting unless it is told of them."""
    text = b'{"prompt_ids": [5]}\n' * 20
    asked = ("--input", "-", "--n", 64, "--concurrency", 20, "--max-tokens", 1)
    answers = generate(*asked, "--temperature", 1, stdin=text).lines
    assert [len(answer["choices"]) for answer in answers] == [64] * 20


def test_an_output_file_is_kept_until_there_is_something_to_put_into_it(
    generate: Generate, tmp_path: Path
) -> None:
    lines, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    out.write_text("precious\n" * 1000)
    asked = ("--input", lines, "--output", out, "--max-tokens", 1)
    assert generate(*asked, "--model", tmp_path / "gone").status == 1
    assert out.read_text() == "precious\n" * 1000
    assert generate(*asked).status == 0
    assert len(json.loads(out.read_text())["token_ids"]) == 1
