"""The noise of docs/noise.md: published vectors, an independent definition, and its statistics."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dspark.core.noise import gumbel, gumbel_at, philox4x32

PAGE = Path(__file__).parents[2] / "docs" / "noise.md"
WORD = 2**32


def reference_block(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as docs/noise.md writes it, one block of plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return [c0, c1, c2, c3]


def reference_bits(seed: int, choice: int, position: int, token: int) -> int:
    key = [seed % WORD, (seed >> 32) % WORD]
    return reference_block([token // 4, position, choice, 0], key)[token % 4]


def reference_gumbel(seed: int, choice: int, position: int, token: int) -> float:
    return -math.log(-math.log((reference_bits(seed, choice, position, token) + 0.5) / WORD))


def page_vectors() -> list[list[str]]:
    """Rows `| seed | choice | position | id | bits | g |` of the page."""
    rows = [line.strip("| \n").split("|") for line in PAGE.read_text().splitlines()]
    return [[cell.strip(" `") for cell in row] for row in rows if len(row) == 6 and "0x" in row[4]]


# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, output: str) -> None:
    words = np.array([[int(w, 16)] for w in counter.split()], np.uint64)
    even, odd = words[0::2].copy(), words[1::2].copy()
    philox4x32(even, odd, np.array([[int(w, 16)] for w in key.split()], np.uint64))
    found = even[0, 0], odd[0, 0], even[1, 0], odd[1, 0]
    assert " ".join(f"{int(w):08x}" for w in found) == output
    plain = reference_block(*([int(w, 16) for w in text.split()] for text in (counter, key)))
    assert plain == [int(w) for w in found]


def test_published_vectors() -> None:
    vectors = page_vectors()
    assert len(vectors) >= 12
    for seed, choice, position, token, bits, g in vectors:
        where = int(seed), int(choice), int(position), int(token)
        assert reference_bits(*where) == int(bits, 16)
        # Two logarithms, each within a few ulp of a value below 23.
        assert gumbel(*where[:3], [where[3]], 2**17)[0] == pytest.approx(float(g), abs=1e-14)


def test_published_tokens() -> None:
    line = next(x for x in PAGE.read_text().splitlines() if x.startswith("    tokens "))
    log_p = np.log(np.arange(1, 9) / 36)
    drawn = [int((log_p + gumbel(42, 0, n, None, 8)).argmax()) for n in range(16)]
    assert drawn == [int(token) for token in line.split()[1:]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, WORD - 1),
    position=st.integers(0, WORD - 1),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=9),
)
def test_noise_is_the_definition(seed: int, choice: int, position: int, tokens: list[int]) -> None:
    expected = [reference_gumbel(seed, choice, position, token) for token in tokens]
    found = gumbel(seed, choice, position, tokens, 2**20 + 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
    mod = gumbel(seed % 2**64, choice, position, tokens, 2**20 + 1)
    np.testing.assert_array_equal(found, mod)


# Below one block, across the end of a chunk of 4 * 8192 ids, a tail that is no multiple of four.
@pytest.mark.parametrize("vocab_size", [1, 7, 512, 49_152, 70_001])
def test_some_ids_have_the_noise_of_the_whole_vocabulary(vocab_size: int) -> None:
    ids = np.unique(np.r_[0, vocab_size - 1, np.arange(0, vocab_size, 61), vocab_size // 2])
    whole = gumbel(-3, 2, 41, None, vocab_size)
    assert whole.shape == (vocab_size,)
    np.testing.assert_array_equal(whole[ids], gumbel(-3, 2, 41, ids, vocab_size))


def test_rows_of_many_requests_at_once() -> None:
    seeds, choices, positions = [5, -1, 2**63], [0, 3, 1], [0, 9, 2**31]
    ids = np.random.default_rng(0).integers(0, 1000, (3, 16))
    columns = ([[s % 2**64] for s in seeds], [[c] for c in choices], [[n] for n in positions])
    rows = gumbel_at(*columns, ids)
    for row, *where, row_ids in zip(rows, seeds, choices, positions, ids, strict=True):
        np.testing.assert_array_equal(row, gumbel(*where, row_ids, 1000))


def test_noise_is_gumbel_and_independent_between_neighbours() -> None:
    """40 000 draws: Kolmogorov-Smirnov, and correlations within 4 / sqrt(n) of none."""
    n = 40_000
    base = gumbel(11, 0, 5, None, n)
    assert stats.kstest(base, "gumbel_r").pvalue > 1e-3
    others = {
        "next id": np.roll(base, 1),
        "next position": gumbel(11, 0, 6, None, n),
        "next choice": gumbel(11, 1, 5, None, n),
        "next seed": gumbel(12, 0, 5, None, n),
        "seed above 32 bits": gumbel(11 + WORD, 0, 5, None, n),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(n), name


@pytest.mark.parametrize(("choice", "position"), [(-1, 0), (0, -1), (WORD, 0), (0, WORD)])
def test_words_out_of_range_are_refused(choice: int, position: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        gumbel(0, choice, position, None, 8)
