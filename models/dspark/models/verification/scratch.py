"""The arrays that judging a row needs, kept between rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark.core.noise import NoiseScratch


class Scratch:
    """One row of float32 and one of float64, V long, and what noise is made in. At a vocabulary of
    262,144 that is 3 MiB, which would otherwise come from the allocator, and often from the system,
    with each row. One caller at a time; a row is valid until the same one is asked for again.
    """

    def __init__(self) -> None:
        self.noise = NoiseScratch()
        self._logits = np.empty(0, np.float32)
        self._weights = np.empty(0, np.float64)
        self._bounds = np.empty(0, np.float64)

    def logits(self, n: int) -> NDArray[np.float32]:
        """float32 [n], holding anything."""
        if len(self._logits) < n:
            self._logits = np.empty(n, np.float32)
        return self._logits[:n]

    def weights(self, n: int) -> NDArray[np.float64]:
        """float64 [n], holding anything."""
        if len(self._weights) < n:
            self._weights = np.empty(n, np.float64)
        return self._weights[:n]

    def bounds(self, n: int) -> NDArray[np.float64]:
        """float64 [n], holding anything; n is what noise is made for at a time."""
        if len(self._bounds) < n:
            self._bounds = np.empty(n, np.float64)
        return self._bounds[:n]
