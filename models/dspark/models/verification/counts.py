"""Which tokens a sequence has seen, for penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.int64]


def _no_ids() -> IdArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """Immutable, so counting tokens that are rejected later leaves no trace (L4): position k of a
    block reads `counts.after(x_<k)`, a commit is `counts = counts.after(verdict.ids)`.

    prompt_ids: distinct ids of the prompt. output_ids: distinct generated ids, output_counts: how
    often each came. All ascending by id.
    """

    prompt_ids: IdArray = field(default_factory=_no_ids)
    output_ids: IdArray = field(default_factory=_no_ids)
    output_counts: IdArray = field(default_factory=_no_ids)

    @classmethod
    def of(cls, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> TokenCounts:
        return cls(np.unique(np.asarray(prompt_ids, np.int64))).after(output_ids)

    def after(self, ids: Sequence[int]) -> TokenCounts:
        """The counts once `ids` are generated too. A new object unless there are none."""
        if len(ids) == 0:
            return self
        every = np.concatenate((self.output_ids, np.asarray(ids, np.int64)))
        weight = np.concatenate((self.output_counts, np.ones(len(ids), np.int64)))
        output_ids, group = np.unique(every, return_inverse=True)
        return TokenCounts(self.prompt_ids, output_ids, np.bincount(group, weight).astype(np.int64))
