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

from collections.abc import Iterator

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

# Blocks at a time: what they need (words, products, float64 noise) is 960 KiB, about an L2 cache;
# with fewer the calls cost more than the words.
_CHUNK = 12288


class NoiseScratch:
    """What a chunk of a vocabulary's noise is made in, kept between rows. One caller at a time."""

    def __init__(self, blocks: int = _CHUNK) -> None:
        self.blocks = np.arange(blocks, dtype=np.uint64)
        self.even, self.odd, self.product = np.empty((3, 2, blocks), np.uint64)
        self.gaps = np.empty((2, 2, blocks))


def philox4x32(
    even: WordArray, odd: WordArray, key: WordArray, product: WordArray | None = None, done: int = 0
) -> None:
    """Philox4x32-10 of n counters, in place. even: words c0, c2, uint64 [2, n]; odd: c1, c3; key:
    [2, 1] or [2, n]; all below 2^32. Words are kept in 64 bits so that a product needs no cast.
    product: [2, n] to work in. done: rounds that are over already.

    One round, with hi and lo of a 64-bit product, and the key moved on by its Weyl constants:
        c0, c1, c2, c3 = hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)
    """
    if product is None:
        product = np.empty_like(even)
    for round_key in (key + _WEYL[done:]) & _LOW:
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
    if token_ids is None:
        noise = np.empty((-(-vocab_size // 4), 4))
        for start, gaps in noise_gaps(seed, choice, position, vocab_size, NoiseScratch()):
            noise[start // 4 : start // 4 + gaps.shape[1]] = gaps.T
        return gumbel_of_gaps(noise.reshape(-1)[:vocab_size])
    ids = np.asarray(token_ids, np.uint64)
    flat = ids.ravel()
    scratch = NoiseScratch(flat.size)
    even, odd = _words(seed, choice, position, flat >> np.uint64(2), scratch)
    return _gumbel_of_words(even, odd, flat).reshape(ids.shape)


def noise_gaps(
    seed: int, choice: int, position: int, vocab_size: int, scratch: NoiseScratch
) -> Iterator[tuple[int, NoiseArray]]:
    """2^32 (1 - u) of the ids in [0, V), exact, in chunks: the first id, and float64 [4, n] that
    holds id first + 4 i + w at [w, i], which the next chunk overwrites. The last chunk may run on
    to a multiple of four.

    For those whom most ids' noise does not matter: where u is near 1, the noise is large. seed,
    choice, position: as for `gumbel`.
    """
    blocks = -(-vocab_size // 4)
    step = len(scratch.blocks)
    for start in range(0, blocks, step):
        n = min(step, blocks - start)
        numbers = np.add(scratch.blocks[:n], np.uint64(start), out=scratch.product[1, :n])
        even, odd = _words(seed, choice, position, numbers, scratch)
        gaps = scratch.gaps.reshape(-1)[: 4 * n].reshape(2, 2, n)
        gaps[:, 0] = even.view(np.int64)  # signed ones convert faster
        gaps[:, 1] = odd.view(np.int64)
        np.subtract(2.0**32 - 0.5, gaps, out=gaps)
        yield 4 * start, gaps.reshape(4, n)


def gumbel_of_gaps(gaps: NoiseArray) -> NoiseArray:
    """In place: 2^32 (1 - u) -> -log(-log u)."""
    np.subtract(2.0**32, gaps, out=gaps)  # exact, as the next: multiples of 1/2 below 2^32
    gaps *= 2.0**-32
    return _minus_log_minus_log(gaps)


def _words(
    seed: int, choice: int, position: int, blocks: WordArray, scratch: NoiseScratch
) -> tuple[WordArray, WordArray]:
    """Output words 0, 2 and 1, 3 of some blocks of one position: two [2, n]. `blocks` may be the
    scratch's product[1].

    Only c0 differs between the blocks, so half of the first two rounds is the same for all.
    """
    if not (0 <= choice <= 0xFFFFFFFF and 0 <= position <= 0xFFFFFFFF):
        raise ValueError(f"choice {choice} and position {position} must be in [0, 2^32)")
    n = len(blocks)
    even, odd, product = scratch.even[:, :n], scratch.odd[:, :n], scratch.product[:, :n]
    seed %= 2**64
    key = np.array([[seed & 0xFFFFFFFF], [seed >> 32]], np.uint64)
    (_, k1), (next_k0, next_k1) = ((key + _WEYL[:2]) & _LOW)[:, :, 0].tolist()
    m1, m0 = _MULTIPLIERS[:, 0].tolist()
    same = m1 * choice
    c0 = (same >> 32) ^ position ^ (seed & 0xFFFFFFFF)
    np.multiply(blocks, np.uint64(m0), out=product[0])
    np.right_shift(product[0], _HALF_WORD, out=even[0])
    even[0] ^= np.uint64(k1)  # c2 after one round
    np.bitwise_and(product[0], _LOW, out=even[1])
    even[1] ^= np.uint64(((m0 * c0) >> 32) ^ next_k1)  # c2 after two
    np.multiply(even[0], np.uint64(m1), out=product[0])
    np.right_shift(product[0], _HALF_WORD, out=even[0])
    even[0] ^= np.uint64((same & 0xFFFFFFFF) ^ next_k0)  # c0
    np.bitwise_and(product[0], _LOW, out=odd[0])  # c1
    odd[1] = (m0 * c0) & 0xFFFFFFFF  # c3
    philox4x32(even, odd, key, product, done=2)
    return even, odd


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
    return _gumbel_of_words(even, odd, ids.ravel()).reshape(ids.shape)


def _gumbel_of_words(even: WordArray, odd: WordArray, ids: WordArray) -> NoiseArray:
    """Each id's own word of its block, as noise: float64 [n]."""
    word = ids & np.uint64(3)
    low, high = np.where(word & np.uint64(1), odd, even)
    u = np.where(word & np.uint64(2), high, low).astype(np.float64)
    u += 0.5
    u *= 2.0**-32  # exact
    return _minus_log_minus_log(u)


def _minus_log_minus_log(u: NoiseArray) -> NoiseArray:
    """In place."""
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    return np.negative(u, out=u)
