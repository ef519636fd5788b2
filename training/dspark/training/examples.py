"""What training reads of one answered prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEATURE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Layout:
    """What every row of a folder looks like. width: D of the target."""

    layer_ids: tuple[int, ...]
    width: int
    top_k: int
    feature_dtype: str = "float16"

    @property
    def feature_width(self) -> int:
        return len(self.layer_ids) * self.width

    @property
    def bytes_per_token(self) -> int:
        """Of any token: its id and features."""
        return 4 + 2 * self.feature_width

    @property
    def bytes_per_answer_token(self) -> int:
        """More, for one whose choice is kept."""
        return 4 + 6 * self.top_k

    def bytes(self, prompt_tokens: int, answer_tokens: int) -> int:
        tokens = prompt_tokens + answer_tokens
        return tokens * self.bytes_per_token + answer_tokens * self.bytes_per_answer_token


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sequence comes from and how its answer was made."""

    line: int
    sample: int = 0
    domain: str = ""
    source: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Target:
    """The target's distribution of n tokens: top_ids int32 [n, K], top_p float [n, K], tail [n]."""

    top_ids: torch.Tensor
    top_p: torch.Tensor
    tail: torch.Tensor

    def __getitem__(self, rows: slice | torch.Tensor) -> Target:
        return Target(self.top_ids[rows], self.top_p[rows], self.tail[rows])


@dataclass(frozen=True, slots=True)
class Example:
    """One answered prompt. token_ids int32 [n]; features [n, m D]; target: of the answer's tokens,
    row i of token `prompt_tokens + i`."""

    origin: Origin
    token_ids: torch.Tensor
    prompt_tokens: int
    features: torch.Tensor
    target: Target

    @property
    def answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens
