"""The ids a drafter can propose, and where each stands in its head (design.md §7, cheap heads)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dspark.core.errors import ConfigError

IdArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """ids: int64 [Vd], growing ids of a target's vocabulary of vocab_size ids. Raises ConfigError.

    Exact by L2 and L3: what cannot be proposed has q = 0 and is reached by the target alone.
    """

    ids: IdArray
    vocab_size: int

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or not len(self.ids) or not (np.diff(self.ids) > 0).all():
            raise ConfigError("draft vocabulary: its ids must be growing, and not empty")
        if self.ids[0] < 0 or self.ids[-1] >= self.vocab_size:
            raise ConfigError(
                f"draft vocabulary: ids {self.ids[0]} to {self.ids[-1]} must lie in "
                f"[0, {self.vocab_size})"
            )

    @classmethod
    def whole(cls, vocab_size: int) -> DraftVocabulary:
        return cls(np.arange(vocab_size), vocab_size)

    @classmethod
    def most_frequent(cls, counts: IdArray, size: int) -> DraftVocabulary:
        """The `size` ids with the largest counts [V], of equal ones the lower ids."""
        order = np.argsort(-counts, kind="stable")
        return cls(np.sort(order[:size]), len(counts))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_whole(self) -> bool:
        return len(self.ids) == self.vocab_size

    @property
    def rows(self) -> int:
        """Rows of a table over "the id before": one an id, and one for all that are left out."""
        return len(self.ids) + (not self.is_whole)

    @cached_property
    def index(self) -> IdArray:
        """int64 [V]: place of each id among `ids`; Vd, the last row, for one that is left out."""
        index = np.full(self.vocab_size, len(self.ids))
        index[self.ids] = np.arange(len(self.ids))
        return index
