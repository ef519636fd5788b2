"""Which ids a drafter can propose: those that the target really says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dspark.models.drafters.draft_vocab import DraftVocabulary
from dspark.training.examples import Example

# Counts of the vocabulary are whole numbers of this share of a token.
GRAIN = 1e-3


@dataclass(frozen=True, slots=True)
class Chosen:
    """coverage: share of the counted mass on the chosen ids."""

    vocabulary: DraftVocabulary
    coverage: float


def choose_vocabulary(
    examples: Iterable[Example], size: int, vocab_size: int, keep: Iterable[int] = ()
) -> Chosen:
    """The `size` ids with most of the answers' tokens and of the target's probability at them, as
    far as examples hold it.

    keep: ids that are taken in any case (such as those that end an answer).
    """
    mass = np.zeros(vocab_size)
    for example in examples:
        target = example.target
        p = target.top_p.double().numpy().ravel()
        mass += np.bincount(target.top_ids.numpy().ravel(), p, minlength=vocab_size)
        said = example.token_ids[example.prompt_tokens :].numpy()
        mass += np.bincount(said, minlength=vocab_size)
    counts = np.rint(mass / GRAIN).astype(np.int64)
    kept = np.array(sorted(set(keep)), np.int64)
    counts[kept] += counts.max() + 1
    vocabulary = DraftVocabulary.most_frequent(counts, size)
    total = mass.sum()
    return Chosen(vocabulary, float(mass[vocabulary.ids].sum() / total) if total else 0.0)
