"""The rules that make speculation lossless (design.md §4, L1 to L4), as functions of arrays.

`judge` is what a verifier calls for one sequence; plain greedy ones need `argmax_rows` and
`verify_greedy` only. A drafter draws with `sample_from_support` or `coupled_token`.
"""

from dspark.models.verification.counts import TokenCounts
from dspark.models.verification.distribution import (
    adjust,
    distribution,
    probabilities,
    token_logprob,
)
from dspark.models.verification.judge import argmax_rows, judge
from dspark.models.verification.rules import (
    coupled_token,
    verify_coupled,
    verify_greedy,
    verify_own,
    verify_rejection,
)
from dspark.models.verification.scratch import Scratch
from dspark.models.verification.selecting import largest, nucleus
from dspark.models.verification.support import (
    Distribution,
    check_support,
    draw,
    normalized_weights,
    sample_from_support,
)

__all__ = [
    "Distribution",
    "Scratch",
    "TokenCounts",
    "adjust",
    "argmax_rows",
    "check_support",
    "coupled_token",
    "distribution",
    "draw",
    "judge",
    "largest",
    "normalized_weights",
    "nucleus",
    "probabilities",
    "sample_from_support",
    "token_logprob",
    "verify_coupled",
    "verify_greedy",
    "verify_own",
    "verify_rejection",
]
