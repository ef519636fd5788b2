"""The installed script as a process of its own: exit status, streams, signals, a terminal."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

Start = Callable[..., "subprocess.Popen[bytes]"]

ENDLESS = ("the cat", "--max-tokens", 4000)  # seconds of work


def end(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit status and stderr; a process that does not end is a failure of its test (timeout)."""
    assert process.stderr is not None
    said = process.stderr.read().decode()
    return process.wait(), said


def read(process: subprocess.Popen[bytes], count: int) -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), count)


def test_a_full_disk_costs_a_line_and_stdout_holds_the_answer_alone(
    start: Start, tmp_path: Path
) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    asked = ("the cat", "--json", "--max-tokens", 5)
    process = start("generate", *asked, cache=tmp_path, preexec_fn=no_room)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert len(json.loads(out)["token_ids"]) == 5
    assert b"the step cost could not be kept ([Errno 27] File too large)" in err
    assert list((tmp_path / "step-cost").iterdir()) == []


def test_ctrl_c_ends_an_answer_quickly(start: Start) -> None:
    process = start("generate", *ENDLESS)
    assert read(process, 1), "text comes while it is made"
    process.send_signal(signal.SIGINT)
    status, said = end(process)
    assert status == 130
    assert "Traceback" not in said
    assert "answer tokens" not in said, "it was not answered to its end"


def test_ctrl_c_leaves_the_lines_that_were_answered(start: Start, tmp_path: Path) -> None:
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text('{"prompt_ids": [5]}\n' * 2000)
    os.mkfifo(out)
    process = start("generate", "--input", lines, "--output", out, "--max-tokens", 64)
    with out.open(encoding="utf-8") as answers:
        first = answers.readline()
        process.send_signal(signal.SIGINT)
        rest = answers.readlines()
    status, said = end(process)
    assert status == 130
    assert "Traceback" not in said
    told = [json.loads(line) for line in (first, *rest)]
    assert 0 < len(told) < 2000
    assert all(len(answer["token_ids"]) == 64 for answer in told), "an answer, not an error"


def test_a_reader_that_has_seen_enough(start: Start) -> None:
    """`dspark generate … | head -c 1`"""
    process = start("generate", *ENDLESS)
    assert process.stdout is not None
    assert read(process, 1)
    process.stdout.close()
    status, said = end(process)
    assert status == 1
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert "answer tokens" not in said


def until(terminal: IO[bytes], words: bytes) -> bytes:
    """What a terminal shows up to and with `words`."""
    seen = b""
    while not seen.endswith(words):
        shown = terminal.read(1)
        assert shown, f"the chat ended after {seen!r}"
        seen += shown
    return seen


def test_a_chat_in_a_terminal(start: Start) -> None:
    """Ctrl-C stops the answer and not the chat, Ctrl-D ends it."""
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        os.login_tty(theirs)

    options: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = start("chat", "--temperature", 0, **options, preexec_fn=take_terminal)
    os.close(theirs)
    with open(ours, "r+b", buffering=0) as terminal:
        until(terminal, b"you> ")
        terminal.write(b"the cat\n")
        until(terminal, b"the cat\r\n")
        terminal.read(1)  # of 4,000 tokens of answer
        terminal.write(b"\x03")
        until(terminal, b"(stopped)")
        until(terminal, b"you> ")
        # The line feed is for Python's `input`, which sees a signal that comes between its prompt
        # and its wait for a key with the next key only.
        terminal.write(b"\x03\n")
        until(terminal, b"(Ctrl-D ends the chat)")
        until(terminal, b"you> ")
        terminal.write(b"\x04")
        status = process.wait()
    assert status == 0
