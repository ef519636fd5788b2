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
        new, times = np.unique(np.asarray(ids, np.int64), return_counts=True)
        at = np.searchsorted(self.output_ids, new)
        known = np.append(self.output_ids, -1)[at] == new
        counts = self.output_counts.copy()
        counts[at[known]] += times[known]
        if known.all():
            return TokenCounts(self.prompt_ids, self.output_ids, counts)
        fresh = ~known
        return TokenCounts(
            self.prompt_ids,
            np.insert(self.output_ids, at[fresh], new[fresh]),
            np.insert(counts, at[fresh], times[fresh]),
        )
