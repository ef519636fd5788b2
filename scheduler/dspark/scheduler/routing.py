"""Which verifier takes a request, and which drafter drafts for it (design.md §8). Pure.

Candidates come in order of preference, and whoever hands out the lease takes the first that still
has room:

1. the *home* of the prompt's prefix, by rendezvous hashing (Thaler and Ravishankar, 1998) of its
   last given block hash, which names all blocks before it too. With bounded load (Mirrokni et al.,
   2018): no verifier is a home beyond AFFINITY_LOAD times its part of all runs, nor where a request
   adds less than AFFINITY_GAIN of what it adds elsewhere; its prefixes move to the next in their
   own order, and come back.
2. of the verifiers where the request adds most throughput (equal within NEAR), the less loaded of
   two drawn at random: many routers with the same old view then do not all take the same one.
3. the others by what the request adds.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dspark.core.errors import (
    DeadlineExceeded,
    DsparkError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from dspark.core.leases import LeaseRequest
from dspark.core.replicas import Replica, VerifierCard
from dspark.scheduler.admission import RETRY_S, check_deadline
from dspark.scheduler.fleet import BoolArray, DrafterState, Fleet, FloatArray

# Named for one request: enough to get past verifiers that filled up or died since the last look.
MAX_CANDIDATES = 8
# Tokens of an answer whose bound is not told; most chat answers are shorter.
USUAL_ANSWER = 512
# What a step costs is known to a few percent.
NEAR = 0.05
# Mirrokni et al. bound moves to O(1 / ε²) a change at load 1 + ε.
AFFINITY_LOAD = 1.25
# A prefix saves some prefill; half the speed for the whole answer costs more.
AFFINITY_GAIN = 0.5
NO_DRAFTER = "none"
# A drafter this busy is given new sessions only if no other version has room: waits grow from here.
CROWDED = 0.9


@dataclass(frozen=True, slots=True)
class Candidate:
    """tokens: that a lease claims of the verifier's KV pool. drafter: None for plain decoding or
    the verifier's own."""

    verifier: Replica
    tokens: int
    drafter: Replica | None = None


def route(fleet: Fleet, request: LeaseRequest, rng: random.Random) -> list[Candidate]:
    """At most MAX_CANDIDATES verifiers that have room, best first; at least one.

    Raises NotFound (no such model), InvalidRequest (too long for every verifier, or which model?),
    Unavailable (those of the model drain or just failed the request), Overloaded (all are full).
    """
    usable = _usable(fleet, request)
    claims = claimed_tokens(fleet, request)
    room = usable & (fleet.claimed_tokens + claims <= fleet.kv_tokens)
    room &= fleet.runs + request.choices <= fleet.max_runs
    if not room.any():
        raise Overloaded(f"all {np.count_nonzero(usable)} verifiers are full", RETRY_S)
    score = np.where(room, _score(fleet, request), -np.inf)
    order = _order(fleet, score, rng)
    home = _home(fleet, request, room, score)
    if home is not None:
        order = [home, *(i for i in order if i != home)][:MAX_CANDIDATES]
    wish = request.speculation.drafter
    return [
        Candidate(
            verifier=fleet.verifiers[i].replica,
            tokens=int(claims[i]),
            drafter=choose_drafter(fleet, fleet.verifiers[i].card, wish, rng),
        )
        for i in order
    ]


def in_time(
    fleet: Fleet, candidates: list[Candidate], request: LeaseRequest, prefill_chunk: int
) -> list[Candidate]:
    """Those where the request makes its deadline, as `check_deadline` sees it; all of them if it
    has none. If it makes it nowhere: what the best one says, DeadlineExceeded or Overloaded."""
    if request.deadline_s is None:
        return candidates
    kept, refused = [], list[DsparkError]()
    for candidate in candidates:
        i = fleet.index[candidate.verifier.replica_id]
        now = replace(
            fleet.verifiers[i],
            claimed_tokens=int(fleet.claimed_tokens[i]),
            claimed_runs=int(fleet.runs[i]),
        )
        try:
            check_deadline(now, request, prefill_chunk)
        except (DeadlineExceeded, Overloaded) as error:
            refused.append(error)
        else:
            kept.append(candidate)
    if not kept:
        raise refused[0]
    return kept


def claimed_tokens(fleet: Fleet, request: LeaseRequest) -> FloatArray:
    """KV tokens [V] that a request claims of each verifier: whole blocks of its prompt and of each
    choice's answer, the prompt's whole blocks once. Never more than there are: a request of many
    choices then runs them in turn. A bound that is not told is taken for USUAL_ANSWER."""
    size, prompt = fleet.block_size, request.prompt_tokens
    answer = request.max_tokens
    longest = np.clip(fleet.sequence_tokens - prompt, 0, USUAL_ANSWER) if answer is None else answer
    shared = prompt // size * size
    each = np.ceil((prompt - shared + longest) / size) * size
    return np.minimum(shared + request.choices * each, fleet.kv_tokens)


def choose_drafter(
    fleet: Fleet, card: VerifierCard, wish: str | None, rng: random.Random
) -> Replica | None:
    """The less loaded of two drawn from the drafters that fit a verifier and the wish, a drafter's
    id or kind: of the newest version, or of one before it while that is crowded. None where none
    fits (the verifier may have it itself) or none is wished."""
    versions = () if wish == NO_DRAFTER else fleet.versions(card, wish)
    newest = None
    for fit in versions:
        drawn = min(rng.sample(fit, 2), key=_wait) if len(fit) > 1 else fit[0]
        if drawn.busy < CROWDED:
            return drawn.replica
        newest = newest or drawn.replica
    return newest


def _wait(drafter: DrafterState) -> float:
    return drafter.wait


def _usable(fleet: Fleet, request: LeaseRequest) -> BoolArray:
    """[V] verifiers that could ever serve the request, and are not to be avoided now."""
    model = request.model
    if not fleet.verifiers:
        raise Unavailable("no verifier is registered")
    if not model and len(fleet.models) > 1:
        known = ", ".join(sorted(fleet.models))
        raise InvalidRequest("model", model, f"must name one of: {known}")
    if model and model not in fleet.models:
        raise NotFound(f"no verifier serves the model {model!r:.80}")
    serving = fleet.serving(model or next(iter(fleet.models)))
    tokens = request.prompt_tokens + (request.max_tokens or 1)
    fits = serving & (tokens <= fleet.sequence_tokens)
    if not fits.any():
        longest = int(fleet.sequence_tokens[serving].max())
        raise InvalidRequest(
            "prompt", f"{tokens} tokens with its answer", f"must be at most {longest}"
        )
    usable = fits & ~fleet.draining
    for replica_id in request.exclude:
        if replica_id in fleet.index:
            usable[fleet.index[replica_id]] = False
    if not usable.any():
        raise Unavailable("every verifier of the model is draining or has just failed the request")
    return usable


def _score(fleet: Fleet, request: LeaseRequest) -> FloatArray:
    """[V] tokens a second that the request adds; where its floor would be missed, by how much."""
    if request.floor_tps <= 0:
        return fleet.gain
    return np.where(fleet.rate >= request.floor_tps, fleet.gain, fleet.rate - request.floor_tps)


def _order(fleet: Fleet, score: FloatArray, rng: random.Random) -> list[int]:
    """Indices of those with room, the best first but for the luck of two equal ones."""
    best = float(score.max())
    near = np.flatnonzero(score >= best - NEAR * abs(best))
    first = int(near[0])
    if len(near) > 1:
        a, b = (int(near[i]) for i in rng.sample(range(len(near)), 2))
        load = fleet.claimed_tokens / fleet.kv_tokens
        first = a if (load[a], fleet.runs[a]) <= (load[b], fleet.runs[b]) else b
    count = min(MAX_CANDIDATES, len(score))
    top = np.argpartition(-score, count - 1)[:count]
    rest = top[np.argsort(-score[top], kind="stable")]
    return [first, *(int(i) for i in rest if i != first and score[i] > -math.inf)][:count]


def _home(fleet: Fleet, request: LeaseRequest, room: BoolArray, score: FloatArray) -> int | None:
    """Where the prompt's prefix lives, of the verifiers that affinity may load further."""
    if not request.prefix_hashes:
        return None
    part = np.where(room, fleet.max_sequences, 0.0)
    total = float(fleet.runs[room].sum())
    most = np.ceil(AFFINITY_LOAD * (total * part / part.sum() + request.choices))
    may = room & (fleet.runs + request.choices <= most)
    if (best := score.max()) > 0:  # else the request waits wherever it goes
        may &= score >= AFFINITY_GAIN * best
    if not may.any():
        return None
    key = hashlib.blake2b(request.prefix_hashes[-1], digest_size=8).digest()
    weight = _mixed(fleet.hashes ^ np.uint64(int.from_bytes(key, "little")))
    return int(np.where(may, weight, np.uint64(0)).argmax())


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finisher of SplitMix64 (Steele, Lea, Flood, 2014): every bit of x moves every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
