"""Floors: tokens a second that a request should never fall below, served before Θ is maximised.

A floor is reached by weights: what ranks first is verified first, and a weighted Θ shortens the
step where a longer one would starve those that are not drafted. Weights grow by how much a floor is
missed (multiplicative updates towards max-min of rate / floor), so floors that cannot all be
reached end up missed by the same part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.core.reports import SURVIVAL_BINS
from dspark.scheduler.joint.demand import SURVIVAL, Demand
from dspark.scheduler.joint.steps import FloatArray, admitted, best_capacity

MAX_WEIGHT = 64.0
# A weight moves by the square of what is missed, by no more than MAX_MOVE; and those of all who
# miss their floor by ALL_MOVE against everybody else's.
MAX_MOVE, ALL_MOVE = 16.0, 1.5
# Histograms are read in so many bins where each tenant has its own weight.
_BINS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Floored:
    """weights: [C]. K, theta (unweighted, tokens a second), round_s: [V]. reached: [V] the least
    rate / floor, ∞ without a floor. gain: [C] draft tokens that a round brings a request."""

    weights: FloatArray
    K: FloatArray
    theta: FloatArray
    round_s: FloatArray
    reached: FloatArray
    gain: FloatArray


def reached(demand: Demand, floor: FloatArray, gain: FloatArray, round_s: FloatArray) -> FloatArray:
    """[V] the least rate / floor of a verifier's cells. floor: [C] tokens a second of a request, 0
    for none. gain: [C] draft tokens that it gets in a round of round_s [V] seconds."""
    rate = (1.0 + gain) / round_s[demand.of]
    ratio = np.divide(rate, floor, out=np.full_like(rate, np.inf), where=floor > 0)
    least: FloatArray = np.minimum.reduceat(ratio, demand.starts)
    return least


def with_floors(
    demand: Demand, floor: FloatArray, f: FloatArray, weights: FloatArray, rounds: int
) -> Floored:
    """The best of `rounds` ≥ 1 of weights, first by floors reached, then by Θ.

    floor: [C] of a request. f: [V] share of requests that are drafted. weights: [C] to start from.
    """
    best = now = _weighted(demand, floor, f, weights)
    for _ in range(rounds - 1):
        if (best.reached >= 1).all():
            break
        now = _weighted(demand, floor, f, _moved(demand, floor, now))
        best = _better(demand, best, now)
    return best


def _moved(demand: Demand, floor: FloatArray, now: Floored) -> FloatArray:
    missed = floor * now.round_s[demand.of] / (1.0 + now.gain)  # 1: just reached
    # Where all are missed, what counts is by how much more than each other.
    least = np.minimum.reduceat(np.where(floor > 0, missed, np.inf), demand.starts)
    move = np.clip((missed / np.maximum(least, 1.0)[demand.of]) ** 2, 1 / MAX_MOVE, MAX_MOVE)
    move = np.where(missed > 1, move * ALL_MOVE, move)
    weights = np.where(floor > 0, now.weights * move, 1.0)
    # Where one would be too heavy, all of the verifier's stay as they are to each other.
    heaviest = np.maximum.reduceat(weights, demand.starts)
    weights = weights * np.minimum(MAX_WEIGHT / heaviest, 1.0)[demand.of]
    return np.where(floor > 0, np.maximum(weights, 1.0), 1.0)


def _better(demand: Demand, one: Floored, other: Floored) -> Floored:
    """Of each verifier the better of two."""
    a, b = np.minimum(one.reached, 1.0), np.minimum(other.reached, 1.0)
    v = (b > a) | ((b == a) & (other.theta > one.theta))
    c = v[demand.of]
    return Floored(
        weights=np.where(c, other.weights, one.weights),
        K=np.where(v, other.K, one.K),
        theta=np.where(v, other.theta, one.theta),
        round_s=np.where(v, other.round_s, one.round_s),
        reached=np.where(v, other.reached, one.reached),
        gain=np.where(c, other.gain, one.gain),
    )


def _weighted(demand: Demand, floor: FloatArray, f: FloatArray, weights: FloatArray) -> Floored:
    """The best K for these weights; who is verified is told by weight times survival."""
    V, C = len(demand.R), len(demand.of)
    place = np.arange(C) - demand.starts[demand.of]
    width = int(place.max()) + 1
    merged = (C, _BINS, SURVIVAL_BINS // _BINS)
    each = demand.shapes.of_cells(np.arange(C))
    shape = each.reshape(merged).sum(axis=2)
    worth = (each * SURVIVAL).reshape(merged).sum(axis=2)
    survival = np.divide(worth, shape, out=np.zeros_like(worth), where=shape > 0)
    whole = (demand.gamma * f)[demand.of] * demand.drafted  # a request's draft tokens, expected
    count, gain = np.zeros((2, V, width, _BINS))
    of_cell = (demand.R[demand.of] * demand.mix * whole)[:, None] * shape
    count[demand.of, place] = of_cell
    gain[demand.of, place] = weights[:, None] * survival
    count, gain = count.reshape(V, -1), gain.reshape(V, -1)
    order = np.argsort(-gain, axis=1, kind="stable")
    ranked = np.take_along_axis(count, order, axis=1)
    overhead = demand.exposed_s * f * demand.asking
    best = best_capacity(
        demand.steps,
        ranked,
        np.take_along_axis(gain, order, axis=1),
        demand.R * demand.each(weights * demand.mix),
        overhead,
    )
    share = np.empty_like(count)
    np.put_along_axis(share, order, admitted(ranked, best.K), axis=1)
    of_cell_share = share.reshape(V, width, _BINS)[demand.of, place]
    tokens = whole * np.einsum("cb,cb->c", worth, of_cell_share)
    round_s = best.seconds + overhead
    decode_s = round_s - demand.steps.prefill_s
    return Floored(
        weights=weights,
        K=best.K,
        theta=demand.R * (1.0 + demand.each(demand.mix * tokens)) / decode_s,
        round_s=round_s,
        reached=reached(demand, floor, tokens, round_s),
        gain=tokens,
    )
