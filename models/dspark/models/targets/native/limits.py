"""How far the matrix products of a step are from what the machine gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.models.targets.native.backend import NativeBackend

_ROWS = (1, 4, 16, 64)
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Products:
    """Seconds of a step's matrix products, B rows that all want logits; the bytes of weights at the
    measured bandwidth; and the multiply-adds at the measured rate."""

    B: int
    seconds: float
    reading_s: float
    arithmetic_s: float

    @property
    def distance(self) -> float:
        """Times the nearer of the two limits, 1 at best."""
        return self.seconds / max(self.reading_s, self.arithmetic_s)


@dataclass(frozen=True, slots=True)
class Limits:
    """kernels: the instruction set. bandwidth: bytes a second. arithmetic: multiply-adds a
    second."""

    kernels: str
    threads: int
    weight_bytes: int
    bandwidth: float
    arithmetic: float
    products: tuple[Products, ...]


def measure_limits(
    backend: NativeBackend,
    rows: Sequence[int] = _ROWS,
    clock: Callable[[], float] = time.perf_counter,
) -> Limits:
    """The best of a few tries each; about a second for a model of 135 M parameters."""
    bandwidth, arithmetic = backend.bandwidth(), backend.arithmetic()
    products = []
    for B in rows:
        seconds = []
        for _ in range(_TRIES):
            begin = clock()
            backend.products(B, B)
            seconds.append(clock() - begin)
        products.append(
            Products(
                B,
                min(seconds),
                backend.weight_bytes / bandwidth,
                B * backend.multiply_adds / arithmetic,
            )
        )
    return Limits(
        backend.kernels,
        backend.threads,
        backend.weight_bytes,
        bandwidth,
        arithmetic,
        tuple(products),
    )
