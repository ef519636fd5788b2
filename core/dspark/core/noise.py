"""Counter-based Gumbel noise that target and drafter share (design.md §4, L3).

The definition is a published contract, with vectors, in docs/noise.md: a change here changes the
text of every seeded request.

    Philox4x32-10 (Salmon et al., SC 2011) with
        key      k0 = seed mod 2^32,  k1 = (seed >> 32) mod 2^32
        counter  c0 = id >> 2,  c1 = output position,  c2 = choice,  c3 = 0
    bits = output word id & 3,   u = (bits + 1/2) / 2^32,   g = -log(-log u)   in float64

A block of four output words serves four neighbouring ids, so a vocabulary costs V / 4 blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

WordArray = NDArray[np.uint64]
NoiseArray = NDArray[np.float64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)
# One row for each product of a round: M1 of c2, M0 of c0.
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], np.uint64)
# What is added to (k0, k1) in each of the ten rounds: [10, 2, 1].
_WEYL = np.arange(10, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], np.uint64
)

# Blocks at a time: what they need (state, product, float64 noise) is 640 KiB, within an L2 cache.
_CHUNK = 8192


def philox4x32(even: WordArray, odd: WordArray, key: WordArray) -> None:
    """Philox4x32-10 of n counters, in place. even: words c0, c2, uint64 [2, n]; odd: c1, c3; key:
    [2, 1] or [2, n]; all below 2^32. Words are kept in 64 bits so that a product needs no cast.

    One round, with hi and lo of a 64-bit product, and the key moved on by its Weyl constants:
        c0, c1, c2, c3 = hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)
    """
    product = np.empty_like(even)
    for round_key in (key + _WEYL) & _LOW:
        np.multiply(even[::-1], _MULTIPLIERS, out=product)
        np.right_shift(product, _HALF_WORD, out=even)
        even ^= odd
        even ^= round_key
        np.bitwise_and(product, _LOW, out=odd)


def gumbel(
    seed: int, choice: int, position: int, token_ids: ArrayLike | None, vocab_size: int
) -> NoiseArray:
    """The noise of one output position: float64 of token_ids' shape, or [V] for None.

    seed: 64 bits, taken mod 2^64. choice, position: in [0, 2^32); position counts generated tokens
    from the end of the original prompt. token_ids: ids in [0, V). Raises ValueError.
    """
    if not (0 <= choice <= 0xFFFFFFFF and 0 <= position <= 0xFFFFFFFF):
        raise ValueError(f"choice {choice} and position {position} must be in [0, 2^32)")
    seed %= 2**64
    if token_ids is not None:
        return gumbel_at(np.uint64(seed), choice, position, token_ids)
    key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], np.uint64)
    noise = np.empty((-(-vocab_size // 4), 4))
    for start in range(0, len(noise), _CHUNK):
        chunk = noise[start : start + _CHUNK]
        even = np.full((2, len(chunk)), choice, np.uint64)
        even[0] = np.arange(start, start + len(chunk))
        odd = np.zeros_like(even)
        odd[0] = position
        philox4x32(even, odd, key)
        chunk[:, 0::2] = even.view(np.int64).T  # signed ones convert faster
        chunk[:, 1::2] = odd.view(np.int64).T
        _bits_to_gumbel(chunk)
    return noise.reshape(-1)[:vocab_size]


def gumbel_at(
    seeds: ArrayLike, choices: ArrayLike, positions: ArrayLike, token_ids: ArrayLike
) -> NoiseArray:
    """Noise of many rows at once: the four broadcast together, and the result has their shape.

    A drafter asks for R requests' candidates with seeds, choices, positions [R, 1] and token_ids
    [R, M]. seeds: uint64 (a negative seed mod 2^64); the others non-negative below 2^32.
    """
    arrays = (np.asarray(a, np.uint64) for a in (seeds, choices, positions, token_ids))
    seed, choice, position, ids = np.broadcast_arrays(*arrays)
    even = np.stack((ids.ravel() >> np.uint64(2), choice.ravel()))
    odd = np.stack((position.ravel(), np.zeros(ids.size, np.uint64)))
    key = np.stack((seed.ravel() & _LOW, seed.ravel() >> _HALF_WORD))
    philox4x32(even, odd, key)
    word = ids.ravel() & np.uint64(3)
    low, high = np.where(word & np.uint64(1), odd, even)
    bits = np.where(word & np.uint64(2), high, low)
    return _bits_to_gumbel(bits.astype(np.float64)).reshape(ids.shape)


def _bits_to_gumbel(bits: NoiseArray) -> NoiseArray:
    """In place: 32 random bits -> u = (bits + 1/2) / 2^32, exact in float64 -> -log(-log u)."""
    bits += 0.5
    bits *= 2.0**-32
    np.log(bits, out=bits)
    np.negative(bits, out=bits)
    np.log(bits, out=bits)
    return np.negative(bits, out=bits)
