"""The rules that make speculation lossless (design.md §4, L1 to L4), as functions of arrays.

`judge` is what a verifier calls for one sequence; plain greedy ones need `argmax_rows` and
`verify_greedy` only. A drafter draws with `sample_from_support` or `coupled_token`.
"""

from dspark.models.verification.counts import TokenCounts
from dspark.models.verification.distribution import adjust, probabilities, token_logprob
from dspark.models.verification.judge import argmax_rows, judge
from dspark.models.verification.rules import (
    coupled_token,
    verify_coupled,
    verify_greedy,
    verify_own,
    verify_rejection,
)
from dspark.models.verification.support import (
    check_support,
    draw,
    normalized_weights,
    sample_from_support,
)

__all__ = [
    "TokenCounts",
    "adjust",
    "argmax_rows",
    "check_support",
    "coupled_token",
    "draw",
    "judge",
    "normalized_weights",
    "probabilities",
    "sample_from_support",
    "token_logprob",
    "verify_coupled",
    "verify_greedy",
    "verify_own",
    "verify_rejection",
]
