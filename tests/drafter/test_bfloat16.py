"""bfloat16 is what torch makes of a float32, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from dspark.drafter.bfloat16 import from_bfloat16, to_bfloat16


def patterns() -> np.ndarray:
    """float32 of all kinds: random bits (NaN, subnormals, infinities among them) and each upper
    half with the lower halves next to a tie."""
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    ties = [upper | np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return np.concatenate([any_bits, *ties]).view(np.float32)


def test_it_rounds_as_torch_does() -> None:
    values = patterns()
    ours = to_bfloat16(values)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(ours[number], theirs[number])
    assert np.isnan(from_bfloat16(ours)[~number]).all()


def test_back_is_exact() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    back = from_bfloat16(halves)
    theirs = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float().numpy()
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(back.view(np.uint32)[number], theirs.view(np.uint32)[number])
    np.testing.assert_array_equal(to_bfloat16(back)[number], halves[number])


def test_shapes_stay() -> None:
    rows = np.ones((3, 0, 5), np.float32)
    assert to_bfloat16(rows).shape == from_bfloat16(to_bfloat16(rows)).shape == (3, 0, 5)
