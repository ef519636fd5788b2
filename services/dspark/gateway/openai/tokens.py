"""Single tokens as OpenAI's log-probabilities show them: text, bytes, and where they stand."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from dspark.core.requests import TokenLogprob
from dspark.gateway.text import Detokenizer
from dspark.gateway.tokenizer import Tokenizer

# For a token that cannot come, whose log-probability JSON has no number for; OpenAI's value.
LOWEST = -9999.0
# Ids whose texts are kept: more than the vocabularies that are served have.
KEPT_TEXTS = 2**18


class TokenTexts:
    """What one id says by itself, special tokens (which an answer's text leaves out) included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.data = lru_cache(KEPT_TEXTS)(tokenizer.token_bytes)

    def text(self, id: int) -> str:
        r"""Bytes that are no text by themselves read `bytes:\xf0\x9f`, as OpenAI writes them."""
        data = self.data(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def described(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(id), "logprob": finite(logprob), "bytes": [*self.data(id)]}

    def detokenizer(self) -> Detokenizer:
        return self._tokenizer.detokenizer()


def chat_logprobs(
    texts: TokenTexts, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
) -> dict[str, Any]:
    """`logprobs` of (part of) a chat's choice."""
    content = [
        texts.described(id, entry.logprob)
        | {"top_logprobs": [texts.described(top, logprob) for top, logprob in entry.top]}
        for id, entry in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a completion's choice, as it grows. text_offset: where in the answer's text a
    token begins, or of one that is no text by itself, what the tokens before have released."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._detokenizer = texts.detokenizer()
        self._offset = 0

    def of(self, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        text = self._texts.text
        offsets = [self._place(id) for id in ids]
        top = [
            {text(id): finite(logprob) for id, logprob in (*entry.top, (said, entry.logprob))}
            for said, entry in zip(ids, logprobs, strict=True)
            if entry.top
        ]
        return {
            "tokens": [text(id) for id in ids],
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": top or None,
            "text_offset": offsets,
        }

    def _place(self, id: int) -> int:
        before, own, released = self._offset, self._texts.text(id), self._detokenizer.push(id)
        self._offset += len(released)
        return self._offset - len(own) if released.endswith(own) else before


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
