"""What a user may ask with: a text, a chat, or token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark.core.errors import InvalidRequest

if TYPE_CHECKING:
    from dspark.gateway.tokenizer import Tokenizer


# Of a chat template around what a message says: its role, and marks where it begins and ends.
MESSAGE_CHARS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of: `text` to continue as it is, `chat` messages to answer, token `ids`."""

    text: str | None = None
    chat: tuple[Mapping[str, str], ...] | None = None
    ids: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Characters or ids, about: what a message costs without a word in it too."""
        said = sum(MESSAGE_CHARS + len(message["content"] or "") for message in self.chat or ())
        return said + len(self.text or "") + len(self.ids or ())

    def encode(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Token ids. Raises InvalidRequest."""
        if self.ids is not None:
            return self.ids
        if self.chat is not None:
            return tokenizer.chat(self.chat)
        if self.text is None:
            raise InvalidRequest("prompt", None, "is missing: give a text, a chat or token ids")
        return tokenizer.encode(self.text)
