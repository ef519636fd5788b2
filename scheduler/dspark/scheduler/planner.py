"""How many draft tokens of each request this step verifies (§3.2.2). Pure: arrays in, arrays out.

Rules of this file. A draft token's *gain* is its survival a_{r,j} (times the request's weight);
tokens are ranked by gain, ties by (arrival, position), so a rank respects prefixes. Whether x_k of
a request is admitted must depend only on what ranks above it (design.md §4, L2): every policy
walks down the rank and decides from what it has passed. Only `full_search` looks ahead; it is for
greedy and coupled requests, where truncation is free, and for survivals whose drafts are over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.drafts import MAX_GAMMA
from dspark.core.errors import InvalidRequest
from dspark.scheduler.step_cost import StepCost

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


class PolicyKind(StrEnum):
    EARLY_STOP = "early-stop"
    TOP_K = "top-k"
    FIXED = "fixed"
    THRESHOLD = "threshold"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Policy:
    """How lengths are chosen. length: of `fixed`, tokens. threshold: of `threshold`, survival."""

    kind: PolicyKind
    length: int = 0
    threshold: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Of `early-stop | top-k | fixed:N | threshold:X | none`; else `InvalidRequest`."""
        if text in (PolicyKind.EARLY_STOP, PolicyKind.TOP_K, PolicyKind.NONE):
            return cls(PolicyKind(text))
        if found := re.fullmatch(r"fixed:([0-9]{1,3})", text):
            length = int(found[1])
            if 1 <= length <= MAX_GAMMA:
                return cls(PolicyKind.FIXED, length=length)
        if found := re.fullmatch(r"threshold:([0-9]*\.?[0-9]+(?:e-[0-9]+)?)", text):
            threshold = float(found[1])
            if 0.0 <= threshold <= 1.0:
                return cls(PolicyKind.THRESHOLD, threshold=threshold)
        raise InvalidRequest(
            "verify",
            text,
            f"must be early-stop, top-k, fixed:N (N in [1, {MAX_GAMMA}]), "
            "threshold:X (X in [0, 1]) or none",
        )

    def __str__(self) -> str:
        if self.kind is PolicyKind.FIXED:
            return f"fixed:{self.length}"
        if self.kind is PolicyKind.THRESHOLD:
            return f"threshold:{self.threshold!r}"
        return self.kind.value


EARLY_STOP = Policy(PolicyKind.EARLY_STOP)


def plan(
    survival: Sequence[NDArray[np.floating[Any]]],
    step_cost: StepCost,
    P: int,
    R: int,
    context: int,
    policy: Policy,
    capacity: int | None = None,
    caps: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    *,
    lookahead: bool = False,
    overhead: float = 0.0,
    max_tokens: int | None = None,
    joining: int = 0,
) -> IntArray:
    """Verify lengths [R] of a step with P prefill tokens and R decoding requests.

    survival: R arrays in order of arrival, each non-increasing in [0, 1], empty without a draft.
    capacity K: bounds Σℓ; of `top-k` it is what is filled, and without one `top-k` plans like
    `early-stop`. caps [R]: the longest ℓ of each request. weights [R] ≥ 0: what a token of each
    counts in τ. max_tokens: bounds B. overhead: seconds a round takes beside its step (draft time
    that nothing hides). joining: requests that decode with them later (`decode_seconds`).
    lookahead: let the search pass a dip of Θ; only where every draft in the step is free of the
    barrier (greedy, coupled, looks_back_only).

    `fixed:N` asks for N of every request whatever the confidence, `threshold:X` for the longest
    prefix whose survival (not confidence) is at least X; where a bound bites, the rank decides.
    """
    if len(survival) != R:
        raise ValueError(f"survival has {len(survival)} entries for R = {R} requests")
    if policy.kind is PolicyKind.NONE or R == 0:
        return np.zeros(R, np.intp)
    if policy.kind is PolicyKind.FIXED:
        caps = np.minimum(policy.length, MAX_GAMMA if caps is None else caps)
    a, request = flatten(survival, caps)
    weight = None if weights is None else np.asarray(weights, np.float64)
    gain = a if weight is None else a * weight[request]
    if policy.kind is PolicyKind.THRESHOLD:
        gain, request = gain[keep := a >= policy.threshold], request[keep]
    elif policy.kind is not PolicyKind.FIXED:
        gain, request = gain[keep := gain > 0], request[keep]

    order = np.argsort(-gain, kind="stable")  # flat order is (arrival, position)
    bounds = [len(order)] if capacity is None else [len(order), capacity]
    if max_tokens is not None:
        bounds.append(max_tokens - P - R)
    order = order[: max(min(bounds), 0)]

    searched = policy.kind is PolicyKind.EARLY_STOP or (
        policy.kind is PolicyKind.TOP_K and capacity is None
    )
    admitted = len(order)
    if searched:
        search = full_search if lookahead else early_stop
        tau0 = float(R) if weight is None else float(weight.sum())
        cost = step_cost.decode_curve(P, R, context, len(order), joining) + overhead
        admitted = search(gain[order], tau0, cost)
    return fill(request[order], admitted, R)


def flatten(
    survival: Sequence[NDArray[np.floating[Any]]], caps: ArrayLike | None
) -> tuple[FloatArray, IntArray]:
    """All draft tokens in (arrival, position) order: survival a [N] and request r [N], capped."""
    sizes = np.fromiter(map(len, survival), np.intp, len(survival))
    a = np.concatenate(survival, dtype=np.float64)
    request = np.repeat(np.arange(len(sizes)), sizes)
    if caps is None:
        return a, request
    position = np.arange(len(a)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keep = position < np.broadcast_to(np.asarray(caps), sizes.shape)[request]
    return a[keep], request[keep]


def throughput(gain: FloatArray, tau0: float, cost: FloatArray) -> FloatArray:
    """Θ [N + 1] with the first 0..N ranked tokens: (τ₀ + Σ gain) / T, tokens a second.

    gain: [N] ranked. cost: [N + 1] seconds of decoding (`StepCost.decode_curve`). Sums run in rank
    order, so an entry never depends on a later one, not even by rounding.
    """
    tau = np.cumsum(np.concatenate(([tau0], gain)))
    return tau / cost


def early_stop(gain: FloatArray, tau0: float, cost: FloatArray) -> int:
    """Algorithm 1: tokens to admit, stopping at the first that does not raise Θ strictly.

    The optimum where T is convex (then Θ has one peak); elsewhere a dip may hide a better one,
    and not looking behind it is what keeps admission from anticipating (Appendix A).
    """
    theta = throughput(gain, tau0, cost)
    stops = theta[1:] <= theta[:-1]
    return int(stops.argmax()) if stops.any() else len(gain)


def full_search(gain: FloatArray, tau0: float, cost: FloatArray) -> int:
    """The optimum for every T, the fewest tokens of equals: of all sets of n tokens the first n of
    the rank have the largest τ. Anticipates; see the rules of this file."""
    return int(throughput(gain, tau0, cost).argmax())


def fill(request: IntArray, K: int, R: int) -> IntArray:
    """Lengths [R] when the first K ranked tokens are admitted. request: [N] whose they are."""
    return np.bincount(request[:K], minlength=R)


def capacity(
    survival: Sequence[NDArray[np.floating[Any]]],
    step_cost: StepCost,
    P: int,
    R: int,
    context: int,
    caps: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    *,
    overhead: float = 0.0,
    max_tokens: int | None = None,
    joining: int = 0,
) -> int:
    """K for `top-k` (§5.2): unconstrained search on survivals of *past* drafts, `plan`'s arguments.

    Every draft that K may admit must be newer than all of `survival`: that is the causal barrier.
    """
    lengths = plan(
        survival, step_cost, P, R, context, EARLY_STOP, None, caps, weights,
        lookahead=True, overhead=overhead, max_tokens=max_tokens, joining=joining,
    )  # fmt: skip
    return int(lengths.sum())


def scaled(K: int, R_then: float, R_now: int) -> int:
    """K made for R_then > 0 requests (a mean, if need be), for R_now: the same tokens a request,
    halves rounded up."""
    return int((2 * K * R_now + R_then) // (2 * R_then))


def saving(
    expected: Sequence[float], lengths: Sequence[int], theta0: float, extra_s: float
) -> list[float]:
    """Seconds [R] each request's draft is expected to save in this step, draft time not counted.

    expected [R]: tokens of it that should stand, Σ_{j≤ℓ} a_j; lengths [R]: ℓ. theta0: tokens a
    second of decoding without drafts, R / `decode_seconds`. extra_s: what the drafts add, T(B) −
    T(P + R). A draft's tokens would else take their number over theta0; it pays the share of
    extra_s that it has of Σℓ. The sum over requests is positive iff Θ rose, so a request that saves
    nothing is one without which Θ would be as good.
    """
    share_s = extra_s / max(sum(lengths), 1)
    return [tokens / theta0 - n * share_s for tokens, n in zip(expected, lengths, strict=True)]
