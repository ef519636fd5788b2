"""The target's distribution of one position: p of L2, from one row of logits.

The order of SamplingParams: penalties, bias, min_tokens and grammar masks (`adjust`), then
temperature, top-k, top-p, min-p (`distribution`), as transformers orders them. Ties are broken
for the lower id everywhere, so the support is well defined.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from dspark.core.errors import ModelError
from dspark.core.requests import TokenLogprob
from dspark.core.sampling import SamplingParams
from dspark.models.verification.counts import TokenCounts
from dspark.models.verification.scratch import Scratch
from dspark.models.verification.selecting import largest, nucleus
from dspark.models.verification.support import Distribution

LogitRow = NDArray[np.float32]
Probabilities = NDArray[np.float64]
IdArray = NDArray[np.int64]
Mask = NDArray[np.bool_]


def adjust(
    logits: LogitRow,
    params: SamplingParams,
    counts: TokenCounts,
    banned_ids: Collection[int] = (),
    mask: Mask | None = None,
    scratch: Scratch | None = None,
) -> LogitRow:
    """Penalties, bias and masks applied to a copy of float32 [V] logits, in float32; the logits
    themselves where there is nothing to apply. The copy is a row of `scratch`.

    repetition (prompt and output): z / r if z > 0 else z * r, once an id; presence and frequency
    (output): z - presence - frequency * count. banned_ids: stop ids while fewer than min_tokens
    are out. mask: bool [V], the allowed ids. One that leaves nothing but banned ids beats the ban:
    a grammar that has ended can only end.
    """
    if not (params.penalized or params.logit_bias or banned_ids or mask is not None):
        return logits
    row = (scratch or Scratch()).logits(len(logits))
    row[:] = logits
    if params.repetition_penalty != 1.0:
        seen = np.concatenate((counts.prompt_ids, counts.output_ids))
        scores = row[seen]
        factor = np.float32(params.repetition_penalty)
        row[seen] = np.where(scores < 0, scores * factor, scores / factor)
    if params.presence_penalty or params.frequency_penalty:
        penalty = params.presence_penalty + params.frequency_penalty * counts.output_counts
        row[counts.output_ids] -= penalty.astype(np.float32)
    if params.logit_bias:
        row[list(params.logit_bias)] += np.array([*params.logit_bias.values()], np.float32)
    banned = [*{*banned_ids}]
    if mask is not None:
        row[~mask] = -np.inf
        if np.count_nonzero(mask) == np.count_nonzero(mask[banned]):
            return row
    row[banned] = -np.inf
    return row


def distribution(
    adjusted: LogitRow, params: SamplingParams, scratch: Scratch | None = None
) -> Distribution:
    """p of L2 from an adjusted float32 row. Temperature must not be 0. Where nothing is cut off its
    weights are a row of `scratch`.

    Only top-p needs the weight of what it cuts off; for top-k and min-p no other exponential is
    taken than those of the ids that may stay. Raises ModelError for a row of which no logit is
    finite and largest (NaN, inf, all masked).
    """
    top = top_logit(adjusted)
    ids: IdArray | None = None
    if 0 < params.top_k < len(adjusted):
        ids = largest(adjusted, params.top_k)
    elif params.top_p == 1.0 and params.min_p > 0.0:
        # A little below the logit of min_p, for rounding; the exact comparison is further down.
        least = np.float32(top + params.temperature * (np.log(params.min_p) - 1e-6))
        ids = np.flatnonzero(adjusted >= np.nextafter(least, np.float32(-np.inf)))
    if ids is None:
        weights = (scratch or Scratch()).weights(len(adjusted))
        weights[:] = adjusted
    else:
        weights = adjusted[ids].astype(np.float64)
    weights -= top
    if params.temperature != 1.0:
        weights *= 1.0 / params.temperature
    np.exp(weights, out=weights)  # the largest is exp(0) = 1
    if params.top_p < 1.0:
        kept = nucleus(weights, params.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    return Distribution(weights, ids)


def probabilities(adjusted: LogitRow, params: SamplingParams) -> Probabilities:
    """p of L2 as a vector: float64 [V], sums to 1. Raises as `distribution` does."""
    return distribution(adjusted, params).dense(len(adjusted))


def top_logit(row: LogitRow) -> float:
    """The largest logit. Raises ModelError if that is not a finite number."""
    top = float(row.max())
    if not np.isfinite(top):
        raise ModelError(f"the target gave no token to choose: its largest logit is {top}")
    return top


def token_logprob(
    logits: LogitRow, token: int, top: int, scratch: Scratch | None = None
) -> TokenLogprob:
    """log softmax of raw float32 [V] logits, in float64, of a token and of the `top` likeliest.

    The float64 row of `scratch` is written to.
    """
    highest = top_logit(logits)
    z = (scratch or Scratch()).weights(len(logits))
    z[:] = logits
    z -= highest
    norm = highest + np.log(np.exp(z, out=z).sum())
    ids = largest(logits, min(top, len(logits))) if top else np.empty(0, np.int64)
    ids = ids[np.lexsort((ids, -logits[ids]))]
    values = logits[ids].astype(np.float64) - norm
    likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logits[token] - norm), likeliest)
