"""Which tenant is admitted where, when more is asked than can be served.

Tenants must get tokens by their shares over the whole cluster, not on each verifier. Where their
drafts stand differently well, or verifiers pay differently for a longer step, that leaves a choice:
each verifier takes more of the tenant that it serves best (comparative advantage). With θ_c what a
verifier would make if all its requests were one tenant's, that is a linear program in the mix y_c,

    maximise Z  with  Σ_v y_c θ_c = σ_i Z for each tenant i,  Σ_i y_c = 1,  0 ≤ y_c ≤ u_c.

Its dual has one price a tenant; each verifier takes what is worth most at these prices. Here it
takes them softly, y_c ∝ σ_i (π_i θ_c)^(1/ε): verifiers that are alike stay alike, what noise says
of θ does little, and Z is at least (1 − ε ln(1/min σ)) of the optimum. A tenant's tokens rise with
its own price and fall with others', so prices are found by raising them where tokens are short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.scheduler.joint.steps import FloatArray, IntArray, summed

# ε; the last is the one that counts, the others are the way there from prices of nothing.
SOFTNESS = (0.3, 0.1, 0.02)
ROUNDS = 24  # at each
WARM_ROUNDS = 8  # at the last, from last time's prices
CLOSE = 0.002  # tokens of each tenant within so much of its share: done
# Realised shares are corrected over so many seconds, by at most e^±0.7, a factor of 2. Slower than
# requests last, or it would chase what is already on its way.
LEAN_S = 20.0
MAX_LEAN = 0.7
LEAST_SHARE = 0.01
_LEAST = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Contest:
    """The cells of tenants that want more than they get, at verifiers that cannot take more.

    of: [C] verifier; starts: [V] first cell of each; tenant: [C]. theta: [C] tokens a second of the
    verifier if it had only this tenant. most: [C] share of the verifier's requests that the tenant
    can fill. room: [V] share of its requests that this is about.
    """

    of: IntArray
    starts: IntArray
    tenant: IntArray
    theta: FloatArray
    most: FloatArray
    room: FloatArray


def shares_with_floors(shares: FloatArray, floors: FloatArray) -> tuple[FloatArray, float]:
    """σ [I]: shares, raised for tenants whose floors (as parts of all tokens) need more, and the
    part of their floors that all of them can have: 1, or less where there are not the tokens. The
    others keep a LEAST_SHARE of theirs: floors come first, but nobody starves."""
    shares = shares / shares.sum()
    needed = float(floors.sum())
    if needed >= 1.0:
        sigma = np.maximum(floors / needed, LEAST_SHARE * shares)
        return sigma / sigma.sum(), 1.0 / needed
    held = np.zeros(len(shares), bool)
    while True:
        free = shares[~held].sum()
        scale = (1.0 - floors[held].sum()) / free if free > 0 else 0.0
        more = ~held & (floors > shares * scale)
        if not more.any():
            sigma = np.maximum(np.where(held, floors, shares * scale), LEAST_SHARE * shares)
            return sigma / sigma.sum(), 1.0
        held |= more


def mixes(contest: Contest, sigma: FloatArray, prices: FloatArray) -> tuple[FloatArray, FloatArray]:
    """y [C] and log prices [I]. sigma: [I] share of each tenant, Σ = 1. prices: [I] logs to start
    from, 0 for none."""
    log_theta, log_sigma = np.log(contest.theta), np.log(sigma)
    y = np.zeros(len(contest.of))
    cold = not prices.any()
    for epsilon in SOFTNESS if cold else SOFTNESS[-1:]:
        for _ in range(ROUNDS if cold else WARM_ROUNDS):
            score = (prices[contest.tenant] + log_theta) / epsilon + log_sigma[contest.tenant]
            score -= np.maximum.reduceat(score, contest.starts)[contest.of]
            y = fitted(contest, np.exp(score))
            tokens = summed(contest.tenant, y * contest.theta, len(sigma))
            short = log_sigma - np.log(np.maximum(tokens, _LEAST) / tokens.sum())
            if np.abs(short).max() < CLOSE:
                break
            prices = prices + epsilon * np.clip(short, -3.0, 3.0)
            prices -= prices.mean()
    return y, np.clip(prices, -10.0, 10.0)


def token_shares(contest: Contest, y: FloatArray) -> FloatArray:
    """x [C] of the tokens that a verifier makes for these tenants, if they are mixed so."""
    tokens = y * contest.theta
    total: FloatArray = np.add.reduceat(tokens, contest.starts)
    x: FloatArray = tokens / total[contest.of]
    return x


def own_shares(contest: Contest, sigma: FloatArray) -> FloatArray:
    """x [C] where each verifier keeps the shares by itself."""
    share = sigma[contest.tenant]
    total: FloatArray = np.add.reduceat(share, contest.starts)
    x: FloatArray = share / total[contest.of]
    return x


def paid(tokens: FloatArray, due: FloatArray) -> float:
    """What of tokens [I] is due [I]: what one tenant has beyond that makes up for nothing that
    another lacks."""
    return float(np.minimum(tokens, due).sum())


def leaned(lean: FloatArray, sigma: FloatArray, served: FloatArray, seconds: float) -> FloatArray:
    """Corrections [I], logs on shares, after `seconds` in which served [I] tokens a second came."""
    if served.sum() <= 0:
        return lean
    missed = np.log(sigma * served.sum() / np.maximum(served, 1e-3 * sigma * served.sum()))
    moved = lean + np.clip(missed, -1.0, 1.0) * (seconds / LEAN_S)
    lean = np.clip(moved, -MAX_LEAN, MAX_LEAN)
    return lean


def fitted(contest: Contest, y: FloatArray) -> FloatArray:
    """y scaled so that each verifier's cells fill its room, none above its most."""
    y = np.maximum(y, _LEAST)
    total = np.add.reduceat(y, contest.starts)
    y = y * (contest.room / total)[contest.of]
    for _ in range(4):
        if (y <= contest.most).all():
            break
        full = y >= contest.most
        taken = np.add.reduceat(np.where(full, contest.most, 0.0), contest.starts)
        free = np.add.reduceat(np.where(full, 0.0, y), contest.starts)
        scale = np.maximum(contest.room - taken, 0.0) / np.maximum(free, _LEAST)
        y = np.where(full, contest.most, y * scale[contest.of])
    return np.clip(y, np.minimum(_LEAST, contest.most), contest.most)
