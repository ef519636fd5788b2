"""Rounds with their verdicts, and many of them as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Round:
    """start: position of the anchor. draft: x_1..x_n, n = γ unless the answer's end came nearer.
    logits: raw confidences [n]. judged: how many of them have a verdict; less than n only where the
    answer ended inside the block. accepted: how many stand."""

    start: int
    anchor: int
    draft: tuple[int, ...]
    logits: tuple[float, ...]
    judged: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Records:
    """N rounds as arrays. logits float64 [N, γ], NaN beyond a block's end. accepted, judged int64
    [N], as of `Round`."""

    logits: NDArray[np.float64]
    accepted: NDArray[np.int64]
    judged: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.accepted)

    def __getitem__(self, rows: NDArray[np.bool_] | slice) -> Records:
        return Records(self.logits[rows], self.accepted[rows], self.judged[rows])

    @property
    def stood(self) -> NDArray[np.bool_]:
        """bool [N, γ]: x_1..x_k all stood."""
        positions = np.arange(self.logits.shape[1])
        stood: NDArray[np.bool_] = positions < self.accepted[:, None]
        return stood

    @property
    def known(self) -> NDArray[np.bool_]:
        """bool [N, γ]: it is known whether they did."""
        positions = np.arange(self.logits.shape[1])
        known: NDArray[np.bool_] = positions < self.judged[:, None]
        return known

    @property
    def reached(self) -> NDArray[np.bool_]:
        """bool [N, γ]: x_k has a verdict of its own: those before it stood."""
        positions = np.arange(self.logits.shape[1])
        reached: NDArray[np.bool_] = self.known & (positions <= self.accepted[:, None])
        return reached


def records(rounds: Iterable[Round], gamma: int) -> Records:
    """Rounds of blocks of at most γ tokens."""
    held = list(rounds)
    logits = np.full((len(held), gamma), np.nan)
    for row, one in zip(logits, held, strict=True):
        row[: len(one.logits)] = one.logits
    return Records(
        logits,
        np.array([one.accepted for one in held], np.int64),
        np.array([one.judged for one in held], np.int64),
    )
