"""`dspark chat`: piped lines in this process; a terminal and Ctrl-C are in test_processes.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dspark.cli.chat import Conversation
from dspark.core.errors import InvalidRequest
from dspark.core.requests import Limits
from dspark.core.sampling import SamplingParams
from dspark.gateway import Tokenizer

from .conftest import Ran

Run = Callable[..., Ran]
BRIEF = ("--temperature", 0, "--max-tokens", 30)


@pytest.fixture
def chat(dspark: Run, checkpoint: Path) -> Run:
    return lambda *arguments, stdin: dspark("chat", "--model", checkpoint, *arguments, stdin=stdin)


def figures(ran: Ran) -> list[tuple[int, int]]:
    """(prompt tokens, those cached) of each turn."""
    found = re.findall(r"^(\d+) prompt \((\d+) cached\)", ran.err, re.MULTILINE)
    return [(int(prompt), int(cached)) for prompt, cached in found]


def test_a_turn_answers_all_that_was_said_and_computes_what_is_new(
    chat: Run, dspark: Run, checkpoint: Path
) -> None:
    ran = chat(*BRIEF, stdin=b"the cat\n\nthe dog\n")  # a blank line is no turn
    assert ran.status == 0
    (first, _), (second, cached) = figures(ran)
    assert second > cached >= first
    alone = dspark("generate", "--model", checkpoint, "the cat", *BRIEF)
    assert ran.out.startswith(alone.out)
    said = alone.out.removesuffix("\n")
    history = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "the dog"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    template = {"add_generation_prompt": True, "return_dict": False}
    assert second == len(tokenizer.apply_chat_template(history, **template))


def test_the_same_chat_without_speculation(chat: Run) -> None:
    lines = b"the cat\nthe dog\nthe mat\n"
    plain = chat(*BRIEF, "--drafter", "none", stdin=lines).out
    assert chat(*BRIEF, "--verify", "fixed:7", stdin=lines).out == plain


def test_a_chat_that_outgrows_the_context_forgets_its_oldest_turns(chat: Run) -> None:
    ran = chat(*BRIEF, "--kv-tokens", 160, "--system", "be brief", stdin=b"the cat\n" * 6)
    assert ran.status == 0
    prompts = [prompt for prompt, _ in figures(ran)]
    assert len(prompts) == 6
    assert max(prompts) + 30 <= 160
    assert "(the context is full; turns forgotten, oldest first: " in ran.err


def test_a_turn_that_does_not_fit_is_refused_and_the_chat_goes_on(chat: Run) -> None:
    lines = b"the cat\n" + b"mat " * 300 + b"\nthe dog\n"
    ran = chat(*BRIEF, "--kv-tokens", 256, stdin=lines)
    assert ran.status == 0
    assert re.search(r"^prompt: '\d+ tokens' leaves no room to answer", ran.err, re.MULTILINE)
    without = chat(*BRIEF, "--kv-tokens", 256, stdin=b"the cat\nthe dog\n")
    assert ran.out == without.out
    assert figures(ran) == figures(without)  # nothing of the refused turn is left


def test_bytes_that_are_no_text_are_read_as_such(chat: Run) -> None:
    ran = chat(*BRIEF, stdin=b"\xff\xfe\nthe dog\n")
    assert (ran.status, len(figures(ran))) == (0, 2)


def test_nothing_is_said_where_nothing_is_asked(chat: Run) -> None:
    ran = chat(*BRIEF, stdin=b"")
    assert (ran.status, ran.out) == (0, "")


def test_a_model_without_a_chat_template_is_refused_at_once(
    dspark: Run, checkpoint: Path, tmp_path: Path
) -> None:
    for file in checkpoint.iterdir():
        if "template" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    ran = dspark("chat", "--model", tmp_path, stdin=b"the cat\n")
    assert (ran.status, ran.out) == (2, "")
    assert "need a chat template; this model has none" in ran.err


# --- what a conversation remembers ---------------------------------------------------------------


def conversation(checkpoint: Path, room: int, max_tokens: int | None = None) -> Conversation:
    limits = Limits(vocab_size=300, context_length=room, kv_tokens=room)
    params = SamplingParams(max_tokens=max_tokens)
    first = [{"role": "system", "content": "be brief"}]
    return Conversation(Tokenizer.load(checkpoint), limits, params, first)


def said(talk: Conversation) -> list[str]:
    return [turn["content"] for turn in talk.turns]


def test_turns_are_forgotten_in_pairs_until_prompt_and_answer_fit(checkpoint: Path) -> None:
    talk = conversation(checkpoint, room=200, max_tokens=40)
    for number in range(20):
        request, _ = talk.ask(f"the cat {number}")
        assert len(request.prompt_ids) + 40 <= 200
        talk.answered(f"the cat {number}", "the log")
        roles = [turn["role"] for turn in talk.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert said(talk)[-2:] == ["the cat 19", "the log"]
    assert 0 < len(said(talk)) < 40
    assert "system" in talk.tokenizer.decode(request.prompt_ids)


def test_an_answer_without_a_limit_is_left_a_quarter_of_a_small_context(checkpoint: Path) -> None:
    talk = conversation(checkpoint, room=200)
    for number in range(20):
        request, _ = talk.ask(f"the cat {number}")
        assert len(request.prompt_ids) <= 150
        talk.answered(f"the cat {number}", "the log")
    assert request.sampling.max_tokens is None


def test_what_does_not_fit_alone_is_refused_and_forgets_nothing(checkpoint: Path) -> None:
    talk = conversation(checkpoint, room=100)
    talk.ask("the cat")
    talk.answered("the cat", "the log")
    with pytest.raises(InvalidRequest, match=r"prompt: '[0-9]+ tokens' leaves no room"):
        talk.ask("mat " * 200)
    assert said(talk) == ["the cat", "the log"]


def test_a_turn_that_got_no_answer_is_not_remembered(checkpoint: Path) -> None:
    talk = conversation(checkpoint, room=100)
    first, _ = talk.ask("the cat")
    talk.answered("the cat", "")
    second, _ = talk.ask("the cat")
    assert second.prompt_ids == first.prompt_ids
    assert second.request_id != first.request_id
