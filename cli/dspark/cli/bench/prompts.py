"""What is asked: real prompts, and no two of a run alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.cli.bench.load import Ask
from dspark.cli.inputs import parse_line, read_lines
from dspark.core.errors import InvalidRequest

# Ours, of four kinds: math, code, chat, and texts to edit, of which an answer repeats a part.
OWN = Path(__file__).with_name("prompts.jsonl")

Chat = tuple[Mapping[str, str], ...]


def read_chats(file: Path = OWN) -> list[Chat]:
    """The chats of a file of {"prompt": …} or {"messages": …} lines. Raises InvalidRequest."""
    chats = []
    for number, line in read_lines(file):
        prompt = parse_line(line)
        if prompt.ids is not None:
            raise InvalidRequest(
                "prompts", f"line {number}", "has prompt_ids: a bench asks by chat, in words"
            )
        prompt.check(raw=False, system=None)
        chats.append(prompt.messages or ({"role": "user", "content": prompt.text or ""},))
    if not chats:
        raise InvalidRequest("prompts", str(file), "holds no prompt")
    return chats


def asks(chats: Sequence[Chat], count: int, max_tokens: int, tag: str, first: int = 0) -> list[Ask]:
    """`count` asks, the chats in turn from number `first` on. Each begins with a line of its own,
    made of `tag`, so that no prefix cache answers in place of the model; the same tag asks every
    arm the same."""
    return [
        Ask(_begun_with(f"Conversation {tag}-{i}.", chats[(first + i) % len(chats)]), max_tokens)
        for i in range(count)
    ]


def context_tokens(chats: Sequence[Chat], max_tokens: int) -> int:
    """Tokens that the longest chat and its answer take at most, for servers that must be told:
    two bytes a token (English has four), and room for the template."""
    longest = max(sum(len(m["content"].encode()) for m in chat) for chat in chats)
    return -(-(longest // 2 + max_tokens + 256) // 256) * 256


def _begun_with(line: str, chat: Chat) -> Chat:
    if chat[0].get("role") == "system":
        return ({**chat[0], "content": f"{line}\n{chat[0]['content']}"}, *chat[1:])
    return ({"role": "system", "content": f"{line} You are a helpful assistant."}, *chat)
