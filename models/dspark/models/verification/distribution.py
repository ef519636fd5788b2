"""The target's distribution of one position: p of L2, from one row of logits.

The order of SamplingParams: penalties, bias, min_tokens and grammar masks (`adjust`), then
temperature, top-k, top-p, min-p (`probabilities`), as transformers orders them. Ties are broken
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
) -> LogitRow:
    """Penalties, bias and masks applied to a copy of float32 [V] logits, in float32.

    repetition (prompt and output): z / r if z > 0 else z * r, once an id; presence and frequency
    (output): z - presence - frequency * count. banned_ids: stop ids while fewer than min_tokens
    are out. mask: bool [V], the allowed ids. One that leaves nothing but banned ids beats the ban:
    a grammar that has ended can only end.
    """
    row = logits.copy()
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


def probabilities(adjusted: LogitRow, params: SamplingParams) -> Probabilities:
    """p of L2: float64 [V], sums to 1, from an adjusted float32 row. Temperature must not be 0.

    Raises ModelError for a row of which no logit is finite and largest (NaN, inf, all masked).
    """
    p = adjusted.astype(np.float64)
    p -= top_logit(adjusted)
    p *= 1.0 / params.temperature
    np.exp(p, out=p)
    if 0 < params.top_k < len(p):
        p = _only(p, _largest(adjusted, params.top_k))
    if params.top_p < 1.0:
        p = _only(p, _nucleus(p, params.top_p))
    if params.min_p > 0.0:
        p[p < params.min_p] = 0.0  # the largest is exp(0) = 1
    p *= 1.0 / p.sum()
    return p


def top_logit(row: LogitRow) -> float:
    """The largest logit. Raises ModelError if that is not a finite number."""
    top = float(row.max())
    if not np.isfinite(top):
        raise ModelError(f"the target gave no token to choose: its largest logit is {top}")
    return top


def token_logprob(logits: LogitRow, token: int, top: int) -> TokenLogprob:
    """log softmax of raw float32 [V] logits, in float64, of a token and of the `top` likeliest."""
    largest = top_logit(logits)
    z = logits.astype(np.float64)
    z -= largest
    norm = largest + np.log(np.exp(z, out=z).sum())
    ids = _largest(logits, min(top, len(logits))) if top else np.empty(0, np.int64)
    ids = ids[np.lexsort((ids, -logits[ids]))]
    likeliest = tuple((int(i), float(logits[i] - norm)) for i in ids)
    return TokenLogprob(float(logits[token] - norm), likeliest)


def _nucleus(p: Probabilities, top_p: float) -> IdArray:
    """Ids of the smallest set, likeliest first, that holds top_p of the mass (at least one id).

    No sort of the vocabulary: all ids below (1 - top_p) / V of the mass together hold less than
    1 - top_p, so the nucleus lies among the others. Half of that bound leaves room for rounding.
    """
    mass = p.sum()
    candidates = np.flatnonzero(p >= 0.5 * (1.0 - top_p) * mass / len(p))
    values = p[candidates]
    held = np.cumsum(np.sort(values)[::-1])
    size = min(int(np.searchsorted(held, top_p * mass)) + 1, len(candidates))
    return candidates[_largest(values, size)]


def _largest(values: LogitRow | Probabilities, n: int) -> IdArray:
    """Indices of the n largest values, in no order; of equal ones the lower indices."""
    least = np.partition(values, -n)[-n]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: n - len(above)]
    return np.concatenate((above, equal))


def _only(p: Probabilities, ids: IdArray) -> Probabilities:
    kept = np.zeros_like(p)
    kept[ids] = p[ids]
    return kept
