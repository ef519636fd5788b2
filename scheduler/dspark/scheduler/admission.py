"""Whether a request may come in at all: deadlines, and the last room in the cluster. Pure.

What is refused is refused at once, with the reason and the time to come again. Each check raises
and returns nothing, so callers line them up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dspark.core.errors import DeadlineExceeded, Overloaded
from dspark.core.leases import LeaseRequest
from dspark.scheduler.fair_queue import DEFAULT_SHARE
from dspark.scheduler.fleet import Pace, VerifierState

# Refused is only what would be late even at twice the expected speed: answers end before
# max_tokens, steps shorten as others finish, and an expectation is no more than that.
OPTIMISM = 0.5
# Of all room, what stays free for tenants that hold less than their share.
RESERVE = 0.1
# Told where nobody knows when a running request ends.
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that a request is expected to take at a verifier: until it runs, until its first
    token, from there to its last."""

    wait_s: float
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prefill_s + self.decode_s


def estimate(
    verifier: VerifierState,
    request: LeaseRequest,
    prefill_chunk: int,
) -> Estimate | None:
    """When a request would finish; None if nothing is known of the verifier's steps.

    Waiting: what runs beyond max_sequences claim, at the speed of a full verifier, R τ / T(R).
    Prefill: chunks of prefill_chunk tokens, each in a step beside those that decode; one where the
    prompt's blocks are named, as nobody here knows which of them a verifier has already. Decoding:
    max_tokens at τ a step; a bound that is not told counts as 1 token, as nothing more is certain.
    """
    pace, most = Pace.of(verifier.report), verifier.card.max_sequences
    R = min(verifier.runs + request.choices, most)
    step_s, full_s = verifier.step_seconds(R, pace), verifier.step_seconds(most, pace)
    if step_s is None or full_s is None:
        return None
    waiting = max(verifier.runs + request.choices - most, 0)
    each = verifier.claimed_tokens / verifier.claimed_runs if verifier.claimed_runs else 0.0
    beside = Pace(pace.tau, pace.drafts, pace.context, min(request.prompt_tokens, prefill_chunk))
    chunk_s = verifier.step_seconds(R - 1, beside) or 0.0
    chunks = math.ceil(request.prompt_tokens / prefill_chunk)
    if request.prefix_hashes:
        chunks = min(chunks, 1)
    return Estimate(
        wait_s=waiting * each * full_s / (most * pace.tau),
        prefill_s=chunks * chunk_s,
        decode_s=(request.max_tokens or 1) * step_s / pace.tau,
    )


def check_deadline(
    verifier: VerifierState,
    request: LeaseRequest,
    prefill_chunk: int,
) -> None:
    """Arguments of `estimate`. Raises `DeadlineExceeded` for a request that would be late on an
    idle verifier too, `Overloaded` for one that is late because of others."""
    if request.deadline_s is None:
        return
    if not request.deadline_s > 0:
        raise DeadlineExceeded("the deadline has passed")
    expected = estimate(verifier, request, prefill_chunk)
    if expected is None or OPTIMISM * expected.total_s <= request.deadline_s:
        return
    idle = VerifierState(verifier.replica, verifier.card, step_cost=verifier.step_cost)
    alone = estimate(idle, request, prefill_chunk)
    told = f"{request.prompt_tokens} prompt tokens and {request.max_tokens or 1} to answer"
    if alone is not None and OPTIMISM * alone.total_s > request.deadline_s:
        raise DeadlineExceeded(
            f"{told} take {alone.total_s:.1f} s on an idle verifier, "
            f"the deadline is in {request.deadline_s:.1f} s"
        )
    raise Overloaded(
        f"{told} would take {expected.total_s:.1f} s now ({expected.wait_s:.1f} s of them in the "
        f"queue), the deadline is in {request.deadline_s:.1f} s",
        max(OPTIMISM * expected.total_s - request.deadline_s, RETRY_S),
    )


def check_room(
    tenant: str, tokens: int, held: Mapping[str, int], room: int, shares: Mapping[str, float]
) -> None:
    """Raises `Overloaded` if the last room in the cluster is not a tenant's to take.

    held: tokens leased, by tenant. room: KV tokens of all verifiers together. A tenant may hold
    more than its share of the room (of the tenants that hold any) while RESERVE of it stays free:
    so one that comes later finds room, and the queues decide by share what runs. One that holds
    nothing may always come, or a request beyond its share would never be served.
    """
    free = room - sum(held.values()) - tokens
    if free >= RESERVE * room or not held.get(tenant, 0):
        return
    active = {name for name, amount in held.items() if amount > 0} | {tenant}
    weights = {name: shares.get(name, DEFAULT_SHARE) for name in active}
    part = (1.0 - RESERVE) * weights[tenant] / (sum(weights.values()) or 1.0)
    if held.get(tenant, 0) + tokens > part * room:
        raise Overloaded(
            f"the cluster is nearly full and tenant {tenant} holds {held.get(tenant, 0)} tokens, "
            f"its share of {room} is {part * room:.0f}",
            RETRY_S,
        )
