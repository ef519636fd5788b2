"""Taking a drafter's reply for what it is: an untrusted hint (L5)."""

from __future__ import annotations

import math
import operator

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import Draft, DraftRequest
from dspark.core.sampling import SamplingMode
from dspark.models.verification import check_support


def survival(logits: NDArray[np.float32], scaling: NDArray[np.float64]) -> NDArray[np.float64]:
    """Raw confidence logits [γ], scaling [2, γ] -> calibrated survival
    a_k = ∏_{i<=k} σ(logit_i / t_i + b_i).

    Ends before the first logit that is not a finite number: only x_<k may be admitted then.
    """
    alive, survivals = 1.0, []
    # A block is a handful of numbers: plain floats are five times as fast as arrays here.
    for logit, temperature, offset in zip(logits.tolist(), *scaling.tolist(), strict=True):
        if not math.isfinite(logit):
            break
        alive /= 1.0 + math.exp(min(-logit / temperature - offset, 700.0))
        survivals.append(alive)
    return np.array(survivals, np.float64)


def fault_of(request: DraftRequest, reply: object, vocab_size: int) -> str | None:
    """What makes a reply no draft as a whole, or None. May raise on what is no reply at all."""
    if not isinstance(reply, Draft):
        return "not a draft"
    if (reply.session, reply.round) != (request.session, request.round):
        return "stale"
    if len(reply.ids) > request.gamma:
        return "too long"
    logits = reply.confidence_logits
    if not isinstance(logits, np.ndarray) or logits.shape != (len(reply.ids),):
        return "malformed"
    if logits.dtype.kind != "f":
        return "malformed"
    if not all(0 <= operator.index(token) < vocab_size for token in reply.ids):
        return "malformed"
    if request.sampling.mode is SamplingMode.REJECTION and not _support_is_sound(reply, vocab_size):
        return "bad support"
    return None


def _support_is_sound(draft: Draft, vocab_size: int) -> bool:
    ids, weights = draft.support_ids, draft.support_weights
    if ids is None and weights is None:
        return True
    if not (isinstance(ids, np.ndarray) and isinstance(weights, np.ndarray)):
        return False
    if ids.dtype.kind not in "iu" or weights.dtype != np.float32:  # the wire type, see L2
        return False
    return check_support(ids, weights, draft.ids, vocab_size)
