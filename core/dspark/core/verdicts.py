"""What a verifier decided about one draft block."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.core.requests import TokenLogprob


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many draft tokens stand, and the token after them.

    ids: what to commit, x_1..x_accepted and then the target's own token; never empty. Stop ids
    and token limits are not looked at (L6 is the sequence's). logprobs: one for each id, or empty.
    fallbacks: residuals without mass that were replaced by p (L2), at most 1.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    fallbacks: int = 0

    @property
    def accepted(self) -> int:
        return len(self.ids) - 1
