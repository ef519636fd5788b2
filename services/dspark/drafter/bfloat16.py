"""float32 to bfloat16 and back, in NumPy, which has no such type."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.core.drafts import FloatArray

_QUIET_NAN = np.uint16(0x7FC0)


def to_bfloat16(values: FloatArray) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even; same shape. What is beyond
    the largest bfloat16 becomes infinite, a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)  # a tie goes up only from an odd upper half
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    upper = rounded.astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, _QUIET_NAN, upper) if nan.any() else upper


def from_bfloat16(halves: NDArray[np.uint16]) -> FloatArray:
    """Exact; same shape."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
